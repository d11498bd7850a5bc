"""Benchmark commands: bench train, track, data, store, gpu, top1, comm."""

import argparse
from pathlib import Path

from pipeline.cli.arguments import (
    Commands,
    Parser,
    add_command,
    add_gpu_speed,
    add_overrides,
    add_recipe,
    path,
    positive_int,
)

# the rows of `bench.train` and the parts of `bench.gpu`, which import torch
LOOPS = ("reference", "torchvision", "timm", "plain", "loaded")
PARTS = ("headline", "bf16", "fp16", "jpeg", "checks", "memory")


def add_commands(commands: Commands) -> None:
    bench = commands.add_parser(
        "bench", help="measure speed, always against a stated reference",
        description="Measure speed, always against a stated reference. What is compared takes turns, round after round,"
        " so that other load on the machine affects all alike. The result is the median ratio of the rounds.",
    )  # fmt: skip
    subjects = bench.add_commands("SUBJECT", dest="subject")
    help = "training loop: ours against a minimal torch loop with the same model and batch"
    train = add_command(subjects, "train", _compare_loops, help, "", "pipeline bench train")
    _add_loop_arguments(train, steps=8)
    help = f"compare only this row, and its reference (repeat it for more): {', '.join(LOOPS)}, or one with -compiled"
    choices = [*LOOPS, *(f"{loop}-compiled" for loop in LOOPS)]
    train.add_argument("--only", action="append", choices=choices, metavar="ROW", help=help)
    help = "tracking: our training loop with journal and MLflow against the same loop without"
    _add_loop_arguments(add_command(subjects, "track", _compare_loops, help, "", "pipeline bench track"), steps=20)
    for add in (_add_data, _add_store, _add_gpu, _add_top1, _add_comm):
        add(subjects)


def _add_loop_arguments(parser: Parser, steps: int) -> None:
    add_overrides(parser)
    add = parser.add_argument
    add("--rounds", type=positive_int, default=7, metavar="N", help="interleaved rounds (default 7)")
    add("--steps", type=positive_int, default=steps, metavar="N", help=f"steps per round (default {steps})")
    add("--json", action="store_true", help="print JSON")


def _compare_loops(options: argparse.Namespace) -> str:
    from pipeline.bench.train import bench_comm, bench_track, bench_train

    size = options.overrides, options.rounds, options.steps
    if options.subject == "train":
        return bench_train(*size, only=options.only, as_json=options.json)
    run = {"track": bench_track, "comm": bench_comm}[options.subject]
    return run(*size, as_json=options.json)


def _add_data(subjects: Commands) -> None:
    parser = add_command(
        subjects, "data", _data, "data loader: from image files and from packs, against ImageFolder with Pillow",
        "Images/s of the whole data loader with two workers, from image files and from packs, against ImageFolder"
        " with Pillow and torchvision's transforms. Uses at most 2,000 of the images of DIR and packs them"
        " temporarily.",
        "pipeline bench data --images data/imagenette/train",
    )  # fmt: skip
    _add_loader_arguments(parser)
    add_gpu_speed(parser)
    help = "also write loaders.md and a plot to FOLDER, as in docs/"
    parser.add_argument("--write", type=path, metavar="FOLDER", help=help)


def _add_loader_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--images", type=path, required=True, metavar="DIR", help="an image folder, preferably of photos")
    add("--rounds", type=positive_int, default=7, metavar="N", help="interleaved rounds (default 7)")
    add("--steps", type=positive_int, default=8, metavar="N", help="batches per round (default 8)")
    help = "also compare other data loaders, which pip installs in the virtual environment ENV (default build/peers)"
    add("--peers", nargs="?", type=path, const=Path("build/peers"), metavar="ENV", help=help)
    add("--json", action="store_true", help="print JSON")


def _data(options: argparse.Namespace) -> str:
    from pipeline.bench import data

    size = options.images, options.rounds, options.steps
    return data.bench_data(
        *size, peers=options.peers, write=options.write, as_json=options.json, gpu_images_per_s=options.gpu_images_per_s
    )


def _add_store(subjects: Commands) -> None:
    parser = add_command(
        subjects, "store", _store, "data loader: from a bucket, against the local pack",
        "Images/s and CPU time of the data loader with two workers, from a pack in a bucket and from its cache,"
        " against the same pack on the local disk. Uses at most 2,000 of the images of DIR, packs them temporarily,"
        " and removes from the bucket what it wrote there.",
        "pipeline bench store s3://my-data/scratch --images data/imagenette/train",
    )  # fmt: skip
    add = parser.add_argument
    add("place", metavar="s3://BUCKET/PREFIX", help="where it may write")
    _add_loader_arguments(parser)


def _store(options: argparse.Namespace) -> str:
    from pipeline.bench import store

    size = options.images, options.place, options.rounds, options.steps
    return store.bench_store(*size, peers=options.peers, as_json=options.json)


def _add_gpu(subjects: Commands) -> None:
    parser = add_command(
        subjects, "gpu", _gpu, "everything that needs a GPU, in about 7 minutes on one GPU, part by part",
        "Measure everything that needs a GPU, on one GPU. Prints each row as soon as it is known, and ends after 7"
        " minutes. The parts: headline (our loop and the minimal loop, compiled, in bf16); bf16 and fp16 (the same,"
        " also eager, with the loops of torchvision and timm); jpeg (with the data loader); checks (accuracy,"
        " bit-identical repetition and resumption, SIGTERM, doctor); memory (the largest pass, a batch cut to fit, a"
        " profile).",
        "pipeline bench gpu --images data/imagenette/train", "pipeline bench gpu --only checks --only memory",
    )  # fmt: skip
    add_overrides(parser)
    add = parser.add_argument
    add("--only", action="append", choices=PARTS, metavar="PART", help="run only this part (repeat it for more)")
    add("--images", type=path, metavar="DIR", help="an image folder, preferably of photos (default: generated images)")
    add("--batch", type=positive_int, default=256, metavar="N", help="images per step (default 256)")
    add("--write", type=path, metavar="FOLDER", help="also write the profile to FOLDER")


def _gpu(options: argparse.Namespace) -> str:
    from pipeline.bench import gpu

    return gpu.bench_gpu(options.only, options.images, options.overrides, options.batch, options.write)


def _add_top1(subjects: Commands) -> None:
    parser = add_command(
        subjects, "top1", _top1, "accuracy: a recipe against a plain torchvision loop that trains for the same time",
        "Train RECIPE as 'pipeline train' does, then a plain torchvision loop for as many seconds on the same image"
        " folder, and compare their top-1 accuracy. Repeated for each seed.",
        "pipeline bench top1 cifar10 data.root=FOLDER",
    )  # fmt: skip
    add_recipe(parser)
    parser.add_argument("--seeds", type=positive_int, default=3, metavar="N", help="number of seeds (default 3)")
    help = "train the recipe's network in the plain loop, too, with its optimizer, schedule and batch"
    parser.add_argument("--same-network", action="store_true", help=help)


def _top1(options: argparse.Namespace) -> str:
    from pipeline.bench import accuracy

    return accuracy.bench_top1(options.recipe, options.overrides, options.seeds, same_network=options.same_network)


def _add_comm(subjects: Commands) -> None:
    help = "gradient exchange: exact mode against DDP, in the same group of processes"
    parser = add_command(subjects, "comm", _comm, help, "", "pipeline bench comm --nproc 2")
    parser.add_argument("--nproc", type=positive_int, metavar="N", help="start N processes on this machine")
    _add_loop_arguments(parser, steps=8)


def _comm(options: argparse.Namespace) -> str | int:
    from pipeline.operate import launch

    if options.nproc and options.nproc > 1:
        json = ["--json"] if options.json else []
        flags = ["--rounds", str(options.rounds), "--steps", str(options.steps), *json]
        return launch.start_processes(options.nproc, ["bench", "comm", *options.overrides, *flags])
    return _compare_loops(options)
