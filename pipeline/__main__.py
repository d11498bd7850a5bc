"""The command line: parse, call, exit code.

What a command answers goes to standard output; what it says meanwhile, and the one line of an error, to standard error.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline import verdict, world
from pipeline.train.signals import StopRequest
from pipeline.verdict import RequestError, Verdict

_DESCRIPTION = """\
Train image classifiers with PyTorch DDP: kill it anywhere, restart it, resize it; the same samples, the same bits, one
run in MLflow.

  pipeline train digits                      the embedded example, in a minute
  pipeline train digits --nproc 2            two processes on this machine
  torchrun --nproc-per-node 8 -m pipeline train my.yaml data.root=/data batch.global=1024
"""

_EPILOG = """\
exit codes: 0 done · 2 the request is wrong, do not retry · 3 the loss is not finite · 4 data or storage ·
75 temporary (interrupted, folder held by another, a peer not there yet): retry · anything else a crash
"""

_OVERRIDES = "key=value changes the recipe; the keys are listed by 'pipeline train --help'"


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and RequestErrors."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise RequestError(f"{message} (see '{self.prog} --help')")


class _HelpWithKeys(argparse.Action):
    """`--help` of train: the parser's own text, then every key; reading the schema takes a moment, so only here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from pipeline.config import describe_keys

        print(f"{parser.format_help()}\nkeys:\n{describe_keys()}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    is_main = os.environ.get("RANK", "0") == "0"  # of several processes one speaks
    try:
        options = _parse(arguments)
        answer = options.run(options)
        if isinstance(answer, int):
            return answer
        if is_main:
            print(answer, flush=True)
        return verdict.OK
    except Verdict as ending:
        if is_main or ending.code == RequestError.code:
            print(f"pipeline: {ending}", file=sys.stderr, flush=True)
        return ending.code
    except KeyboardInterrupt:
        return verdict.TemporaryError.code
    except BrokenPipeError:  # whoever read our answer has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return verdict.OK


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of a command; key=value words may stand before and after its flags, which argparse alone cannot."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and hasattr(options, "overrides") and not any(word.startswith("-") for word in rest):
        options.overrides = options.overrides + rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pipeline", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    train = commands.add_parser(
        "train", help="train a recipe; the same command again goes on where it stood", add_help=False,
        description="Trains RECIPE, a name from pipeline/recipes/ or the path of a YAML file. Under torchrun it takes its"
        " place in the group; alone it is one process, or starts N on this machine.",
    )  # fmt: skip
    train.add_argument("-h", "--help", nargs=0, action=_HelpWithKeys, help="this text and every key")
    train.add_argument("recipe", metavar="RECIPE")
    train.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="changes the recipe, for example train.epochs=10"
    )
    train.add_argument("--nproc", type=_count, metavar="N", help="start N processes on this machine")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("evaluate", help="validate a checkpoint exactly, at any number of processes")
    evaluate.add_argument("target", metavar="RUN_DIR|CHECKPOINT", help="a run's folder (its last checkpoint) or a file")
    evaluate.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=_OVERRIDES)
    evaluate.add_argument("--nproc", type=_count, metavar="N", help="start N processes on this machine")
    evaluate.set_defaults(run=_evaluate)

    plan = commands.add_parser("plan", help="the arithmetic of a run, without running it")
    plan.add_argument("recipe", metavar="RECIPE")
    plan.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=_OVERRIDES)
    plan.add_argument("--world", type=_count, default=1, metavar="N", help="processes in the whole job (default 1)")
    plan.add_argument(
        "--nodes", type=_count, default=1, metavar="M", help="machines that they are spread over (default 1)"
    )
    plan.set_defaults(run=_plan)

    data = commands.add_parser("data", help="make or check a data set").add_subparsers(metavar="ACTION", required=True)
    make = data.add_parser("make", help="write the embedded digits, or synthetic images, as an image folder")
    make.add_argument("kind", choices=("digits", "synthetic"))
    make.add_argument("out", nargs="?", metavar="OUT", help="folder to make (default data/<kind>)")
    make.add_argument(
        "--images", type=_count, default=1000, metavar="N", help="synthetic: images to train (default 1000)"
    )
    make.add_argument("--classes", type=_count, default=10, metavar="N", help="synthetic: classes (default 10)")
    make.add_argument("--side", type=_count, default=64, metavar="PX", help="synthetic: pixels a side (default 64)")
    make.set_defaults(run=_data_make)
    check = data.add_parser("check", help="layout, sums and decodability of an image folder; names each defect")
    check.add_argument("root", type=Path, metavar="FOLDER")
    check.add_argument("--write-sums", action="store_true", help="write SHA256SUMS, which later checks compare with")
    check.add_argument("--val-split", type=float, default=0.1, metavar="SHARE", help="as data.val_split (default 0.1)")
    check.set_defaults(run=_data_check)

    sync = commands.add_parser("sync", help="send to MLflow what the journal holds and the server lacks")
    sync.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    sync.add_argument(
        "--follow", action="store_true", help="go on until standard input ends, as a training run uses it"
    )
    sync.set_defaults(run=_sync)

    bench = commands.add_parser("bench", help="throughput, with the comparison stated")
    subjects = bench.add_subparsers(metavar="SUBJECT", required=True)
    steps = subjects.add_parser("train", help="our loop against the barest torch loop with the same model and batch")
    steps.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=_OVERRIDES)
    steps.add_argument("--rounds", type=_count, default=7, metavar="N", help="interleaved rounds (default 7)")
    steps.add_argument("--steps", type=_count, default=8, metavar="N", help="steps a round (default 8)")
    steps.add_argument("--json", action="store_true", help="rows for machines")
    steps.set_defaults(run=_bench_train)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _train(options: argparse.Namespace) -> str | int:
    parent = os.getppid()
    stop = StopRequest()
    if not (options.nproc and options.nproc > 1):
        stop.listen()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        world.die_with_parent(parent)

    from pipeline.operate import launch

    return launch.train(options.recipe, options.overrides, options.nproc, stop)


def _evaluate(options: argparse.Namespace) -> str | int:
    from pipeline.operate import launch

    return launch.evaluate(options.target, options.overrides, options.nproc)


def _plan(options: argparse.Namespace) -> str:
    from pipeline.config import load
    from pipeline.data.sources import size_of
    from pipeline.plan import make_plan, memory_row

    if options.world % options.nodes:
        raise RequestError(
            f"--world {options.world} does not divide by --nodes {options.nodes}: give the same number to each"
        )
    config = load(options.recipe, options.overrides)
    place = world.World(cpus=world.allowed_cpus()).resized(options.world, options.world // options.nodes)
    plan = make_plan(config, place, size_of(config))

    from pipeline.model.architectures import count_parameters  # imports torch: last, so that a mistake is said at once

    parameters = count_parameters(config.model, plan.num_classes)
    return f"{config.recipe}\n{plan.table()}\n{memory_row(config, parameters)}"


def _data_make(options: argparse.Namespace) -> str:
    from pipeline.operate import data

    return data.make(options.kind, options.out, options.images, options.classes, options.side)


def _data_check(options: argparse.Namespace) -> str:
    from pipeline.operate import data

    return data.check(options.root, options.val_split, write_sums=options.write_sums)


def _sync(options: argparse.Namespace) -> str:
    from pipeline.record.mlflow import sync

    sync(options.run_dir, follow=options.follow)
    return f"{options.run_dir} is delivered"


def _bench_train(options: argparse.Namespace) -> str:
    from pipeline.operate import bench

    return bench.train(options.overrides, options.rounds, options.steps, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
