"""Benchmarks: bench train, track, data, gpu, top1, comm."""

import argparse
from pathlib import Path

from pipeline.cli.arguments import (
    OVERRIDES_HELP,
    Parser,
    path,
    path_or_uri,
    positive_int,
)


def add_commands(commands: "argparse._SubParsersAction[Parser]") -> None:
    bench = commands.add_parser("bench", help="throughput, with the comparison stated")
    subjects = bench.add_subparsers(metavar="SUBJECT", required=True)
    steps = subjects.add_parser("train", help="our loop against the barest torch loop with the same model and batch")
    _add_turns(steps, steps=8)
    steps.set_defaults(run=_bench_train)
    tracked = subjects.add_parser("track", help="what journal and tracker cost a step: our loop with them and without")
    _add_turns(tracked, steps=20)
    tracked.set_defaults(run=_bench_track)
    feed = subjects.add_parser(
        "data", help="images/s of the loader, from plain files and from packs, against the usual one",
        description="The whole loader, two workers, on at most 2,000 of the images of DIR, which are packed for it.",
    )  # fmt: skip
    feed.add_argument("--images", type=path, required=True, metavar="DIR", help="an image folder, of photos best")
    feed.add_argument("--rounds", type=positive_int, default=7, metavar="N", help="interleaved rounds (default 7)")
    feed.add_argument("--steps", type=positive_int, default=8, metavar="N", help="batches a round (default 8)")
    feed.add_argument(
        "--peers", nargs="?", type=path, const=Path("build/peers"), metavar="ENV",
        help="also other loaders, which pip installs in a virtual environment of their own (default build/peers)",
    )  # fmt: skip
    feed.add_argument(
        "--write", type=path, metavar="FOLDER", help="also write benchmarks.md and a plot there, as in docs"
    )
    feed.add_argument("--json", action="store_true", help="rows for machines")
    feed.set_defaults(run=_bench_data)
    gpu = subjects.add_parser(
        "gpu", help="all that wants a GPU to be shown, in under 8 minutes on one, with a short table last"
    )
    gpu.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES_HELP)
    gpu.add_argument(
        "--images", type=path, metavar="DIR", help="an image folder of photos (default: patterns are made)"
    )
    gpu.add_argument("--batch", type=positive_int, default=256, metavar="N", help="images a step (default 256)")
    gpu.set_defaults(run=_bench_gpu)
    top1 = subjects.add_parser(
        "top1", help="top-1 of a recipe against a plain torchvision loop that trains for the same seconds",
        description="RECIPE, as 'pipeline train' runs it, then the plain loop, for as many seconds, on the same folder.",
    )  # fmt: skip
    top1.add_argument("recipe", type=path_or_uri, metavar="RECIPE")
    top1.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES_HELP)
    top1.add_argument(
        "--seeds", type=positive_int, default=3, metavar="N", help="times, each from another seed (default 3)"
    )
    top1.set_defaults(run=_bench_top1)
    comm = subjects.add_parser("comm", help="how gradients meet: exact mode against DDP, in one group of processes")
    comm.add_argument("--nproc", type=positive_int, metavar="N", help="start N processes on this machine")
    _add_turns(comm, steps=8)
    comm.set_defaults(run=_bench_comm)


def _add_turns(loops: argparse.ArgumentParser, steps: int) -> None:
    """What a benchmark of loops that take turns is told."""
    loops.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES_HELP)
    loops.add_argument("--rounds", type=positive_int, default=7, metavar="N", help="interleaved rounds (default 7)")
    loops.add_argument(
        "--steps", type=positive_int, default=steps, metavar="N", help=f"steps a round (default {steps})"
    )
    loops.add_argument("--json", action="store_true", help="rows for machines")


def _bench_train(options: argparse.Namespace) -> str:
    from pipeline.bench import train

    return train.train(options.overrides, options.rounds, options.steps, as_json=options.json)


def _bench_track(options: argparse.Namespace) -> str:
    from pipeline.bench import train

    return train.track(options.overrides, options.rounds, options.steps, as_json=options.json)


def _bench_data(options: argparse.Namespace) -> str:
    from pipeline.bench import data

    return data.data(
        options.images, options.rounds, options.steps, peers=options.peers, write=options.write, as_json=options.json
    )


def _bench_gpu(options: argparse.Namespace) -> str:
    from pipeline.bench import gpu

    return gpu.gpu(options.images, options.overrides, options.batch)


def _bench_top1(options: argparse.Namespace) -> str:
    from pipeline.bench import accuracy

    return accuracy.top1(options.recipe, options.overrides, options.seeds)


def _bench_comm(options: argparse.Namespace) -> str | int:
    from pipeline.bench import train
    from pipeline.operate import launch

    if options.nproc and options.nproc > 1:
        numbers = ["--rounds", str(options.rounds), "--steps", str(options.steps)]
        flags = [*numbers, *(["--json"] if options.json else [])]
        return launch.start_processes(options.nproc, ["bench", "comm", *options.overrides, *flags])
    return train.comm(options.overrides, options.rounds, options.steps, as_json=options.json)
