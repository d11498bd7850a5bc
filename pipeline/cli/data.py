"""Commands about data: make, get, import, pack, check."""

import argparse

from pipeline.cli.arguments import (
    Parser,
    path,
    path_or_uri,
    positive_int,
)


def add_commands(commands: "argparse._SubParsersAction[Parser]") -> None:
    data = commands.add_parser("data", help="make or check a data set").add_subparsers(metavar="ACTION", required=True)
    make = data.add_parser("make", help="write the embedded digits, or synthetic images, as an image folder")
    make.add_argument("kind", choices=("digits", "synthetic"))
    make.add_argument("out", nargs="?", type=path_or_uri, metavar="OUT", help="folder to make (default data/<kind>)")
    make.add_argument(
        "--images", type=positive_int, default=1000, metavar="N", help="synthetic: images to train (default 1000)"
    )
    make.add_argument("--classes", type=positive_int, default=10, metavar="N", help="synthetic: classes (default 10)")
    make.add_argument(
        "--side", type=positive_int, default=64, metavar="PX", help="synthetic: pixels a side (default 64)"
    )
    make.set_defaults(run=_data_make)
    get = data.add_parser("get", help="fetch a published data set, as an image folder")
    get.add_argument("kind", choices=("imagenette",))
    get.add_argument("out", nargs="?", type=path_or_uri, metavar="OUT", help="folder to make (default data/<kind>)")
    get.set_defaults(run=_data_get)
    imported = data.add_parser(
        "import", help="ImageNet's published archives as an image folder or a pack",
        description="ARCHIVES holds ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz. Each"
        " image is read once, where it lies. Given again it goes on.",
    )  # fmt: skip
    imported.add_argument("kind", choices=("imagenet",))
    imported.add_argument("archives", type=path, metavar="ARCHIVES")
    imported.add_argument("out", type=path, metavar="OUT")
    imported.add_argument("--pack", metavar="LEVEL", help="a pack of this level, as of 'pipeline data pack'")
    imported.set_defaults(run=_data_import)
    pack = data.add_parser(
        "pack", help="an image folder as a few tar files with an index: one read an image, less to decode",
        description="Packs the image folder SRC into OUT, on all cores; given again it goes on. Train from it with"
        " data.source=pack data.root=OUT: ids, order and labels are those of the folder.",
    )  # fmt: skip
    pack.add_argument("src", type=path, metavar="SRC")
    pack.add_argument("out", type=path, metavar="OUT")
    pack.add_argument(
        "--level", default="lossless", metavar="LEVEL",
        help="lossless: JPEGs with restart markers, the same pixels; max-side=500,q=90: encoded anew, lossy; raw=256:"
        " pixels, the shorter side scaled to 256 (default lossless)",
    )  # fmt: skip
    pack.add_argument("--val-split", type=float, default=0.1, metavar="SHARE", help="as data.val_split (default 0.1)")
    pack.set_defaults(run=_data_pack)
    check = data.add_parser(
        "check", help="layout, sums and decodability of an image folder or a pack; names each defect"
    )
    check.add_argument("root", type=path, metavar="FOLDER")
    check.add_argument("--write-sums", action="store_true", help="write SHA256SUMS, which later checks compare with")
    check.add_argument("--val-split", type=float, default=0.1, metavar="SHARE", help="as data.val_split (default 0.1)")
    check.set_defaults(run=_data_check)


def _data_make(options: argparse.Namespace) -> str:
    from pipeline.operate import data

    return data.make(options.kind, options.out, options.images, options.classes, options.side)


def _data_get(options: argparse.Namespace) -> str:
    from pipeline.operate import data

    return data.get(options.kind, options.out)


def _data_import(options: argparse.Namespace) -> str:
    from pipeline.operate import data

    return data.import_imagenet(options.archives, options.out, options.pack)


def _data_pack(options: argparse.Namespace) -> str:
    from pipeline.operate import pack

    return pack.pack(options.src, options.out, options.level, options.val_split)


def _data_check(options: argparse.Namespace) -> str:
    from pipeline.operate import data

    return data.check(options.root, options.val_split, write_sums=options.write_sums)
