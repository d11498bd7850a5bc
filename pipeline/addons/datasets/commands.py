"""Commands for data sets: data make, get, import, pack, check."""

import argparse
from pathlib import Path
from typing import Any

from pipeline.addons.store.bucket import Store
from pipeline.cli.arguments import Commands, Parser, add_command, path, path_or_uri, positive_int
from pipeline.errors import RequestError
from pipeline.lazy import addon


def add_commands(commands: Commands) -> None:
    help = "make, download, import, pack or check a data set"
    data = commands.add_parser("data", help=help, description=f"{help.capitalize()}.")
    actions = data.add_commands("ACTION")

    help = "write the built-in digits, or synthetic images, as an image folder; or a folder's table of labels"
    examples = (
        "pipeline data make digits", "pipeline data make synthetic photos --images 500 --classes 4",
        "pipeline data make table photos",
    )  # fmt: skip
    add = add_command(actions, "make", _make, help, "", *examples).add_argument
    add("kind", choices=("digits", "synthetic", "table"), help="which images, or table")
    help = "folder to make (default data/<kind>); for table an image folder, which gets a labels.csv"
    add("out", nargs="?", type=path_or_uri, metavar="OUT", help=help)
    add("--images", type=positive_int, metavar="N", help="synthetic: training images (default 1000)")
    add("--classes", type=positive_int, metavar="N", help="synthetic: classes (default 10)")
    add("--side", type=positive_int, metavar="PX", help="synthetic: side in pixels (default 64)")

    add = add_command(
        actions, "get", lambda given: addon("datasets.make").get(given.kind, _folder(given)),
        "download a published data set as an image folder", "",
        "pipeline data get imagenette", "pipeline data get cifar10",
    ).add_argument  # fmt: skip
    add("kind", choices=("imagenette", "cifar10"), help="which data set")
    add("out", nargs="?", type=path_or_uri, metavar="OUT", help="folder to make (default data/<kind>)")

    parser = add_command(
        actions, "import", _import, "unpack ImageNet's published archives into an image folder or a pack",
        "Turn ImageNet's published archives into an image folder or a pack. ARCHIVES holds"
        " ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz. Images are read"
        " directly from the archives. The same command continues an interrupted import.",
        "pipeline data import imagenet ARCHIVES data/imagenet",
    )  # fmt: skip
    add = parser.add_argument
    add("kind", choices=("imagenet",), help="which data set")
    add("archives", type=path, metavar="ARCHIVES", help="folder with the three archives")
    add("out", type=path_or_uri, metavar="OUT", help="folder to make, or s3://bucket/prefix of a pack")
    add("--pack", metavar="LEVEL", help="make a pack of this level, see 'pipeline data pack --help'")
    _add_workers(parser)

    parser = add_command(
        actions, "pack", _pack, "pack an image folder into a few indexed tar files, which load faster",
        "Pack the image folder or table SRC into OUT: a few tar files with an index, so that an image is one"
        " read and takes less decoding. The same command continues an interrupted pack. Train from it with"
        " data.source=pack data.root=OUT: sample ids, order and labels are those of the folder. With"
        " s3://bucket/prefix as OUT, each worker keeps one tar file, of at most about 1 GiB, in TMPDIR until"
        " it is uploaded.",
        "pipeline data pack photos packed --level max-side=500,q=90",
        "pipeline data pack photos s3://my-data/photos",
    )  # fmt: skip
    parser.add_argument("src", type=path, metavar="SRC", help="image folder or table to read")
    parser.add_argument("out", type=path_or_uri, metavar="OUT", help="folder to make, or s3://bucket/prefix")
    parser.add_argument(
        "--level", default="lossless", metavar="LEVEL",
        help="lossless: JPEGs with restart markers, pixels unchanged; max-side=500,q=90: re-encoded, lossy;"
        " raw=256: uncompressed pixels, the shorter side scaled to 256 (default lossless)",
    )  # fmt: skip
    _add_workers(parser)
    _add_split(parser)

    parser = add_command(
        actions, "check", _check, "check every image of a folder, a table or a pack, and name each defect",
        "Check the layout and the checksums of an image folder, a table or a pack, and that each image"
        " decodes. Names each defect; exit 4 if there is one. Also says what was left out, and warns of equal"
        " images, dark images and classes without a validation image.",
        "pipeline data check photos --write-sums",
    )  # fmt: skip
    add = parser.add_argument
    add("root", type=path, metavar="FOLDER", help="image folder, table, or folder of a pack")
    add("--write-sums", action="store_true", help="write SHA256SUMS, which later checks compare with")
    add("--json", action="store_true", help="print JSON")
    _add_split(parser)


def _make(options: argparse.Namespace) -> Any:
    sizes = options.images, options.classes, options.side
    if options.kind != "synthetic" and any(sizes):
        raise RequestError("--images, --classes and --side are for synthetic images", "leave them out")
    if options.kind == "table":
        return addon("datasets.make").make_table(_folder(options))
    images, classes, side = (size or default for size, default in zip(sizes, (1000, 10, 64), strict=True))
    return addon("datasets.make").make(options.kind, _folder(options), images, classes, side)


def _import(options: argparse.Namespace) -> Any:
    place, level, workers = _place(options.out), options.pack, options.workers
    return addon("datasets.make").import_imagenet(options.archives, place, level, workers)


def _pack(options: argparse.Namespace) -> Any:
    out, level, share, workers = _place(options.out), options.level, options.val_split, options.workers
    return addon("datasets.write_pack").pack(options.src, out, level, share, workers, options.overrides)


def _check(options: argparse.Namespace) -> Any:
    root, share, words, write_sums = options.root, options.val_split, options.overrides, options.write_sums
    return addon("datasets.check").check(root, share, words, write_sums=write_sums, as_json=options.json)


def _add_split(parser: Parser) -> None:
    help = "share of each class to hold out if there is no split, as data.val_split (default 0.1; 0: none)"
    parser.add_argument("--val-split", type=share, default=0.1, metavar="SHARE", help=help)
    help = "key of a table, such as data.root=FOLDER, data.columns.path=NAME or data.split_by=group"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help)


def _add_workers(parser: Parser) -> None:
    help = "processes that pack (default one for each CPU core that this command may use)"
    parser.add_argument("--workers", type=positive_int, metavar="N", help=help)


def _folder(options: argparse.Namespace) -> Path:
    place = _place(options.out or f"data/{options.kind}")
    if isinstance(place, Store):
        remedy = "make it here; 'pipeline data pack' copies it into a bucket"
        raise RequestError(f"{place} is not a folder", remedy)
    return place


def _place(text: str) -> Path | Store:
    if text.startswith("s3://"):
        return Store(text)
    if "://" in text:
        raise RequestError(f"{text} is not allowed", "give a folder, or s3://bucket/prefix")
    return Path(text)


def share(text: str) -> float:  # argparse names it in its error
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not at least 0 and below 1, such as 0.1")
    return float(text)
