"""Commands about a run: train, evaluate, predict, plan, verify, report, export, sync."""

import argparse
import faulthandler
import os
import signal

from pipeline import machine, supervision, world
from pipeline.cli.arguments import (
    OVERRIDES_HELP,
    Parser,
    path,
    path_or_uri,
    positive_int,
)
from pipeline.guards.signals import StopRequest


class _HelpWithKeys(argparse.Action):
    """`--help` of train: the parser's own text, then every key; reading the schema takes a moment, so only here."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from pipeline.config.help import describe_keys

        print(f"{parser.format_help()}\nkeys:\n{describe_keys()}")
        parser.exit()


def add_commands(commands: "argparse._SubParsersAction[Parser]") -> None:
    train = commands.add_parser(
        "train", help="train a recipe; the same command again goes on where it stood", add_help=False,
        description="Trains RECIPE, a name from pipeline/recipes/ or the path of a YAML file. Under torchrun it takes its"
        " place in the group; alone it is one process, or starts N on this machine.",
    )  # fmt: skip
    train.add_argument("-h", "--help", nargs=0, action=_HelpWithKeys, help="this text and every key")
    train.add_argument("recipe", type=path_or_uri, metavar="RECIPE")
    train.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="changes the recipe, for example train.epochs=10"
    )
    train.add_argument("--nproc", type=positive_int, metavar="N", help="start N processes on this machine")
    train.add_argument("--quiet", action="store_true", help="errors and the last line alone")
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("evaluate", help="validate a checkpoint exactly, at any number of processes")
    evaluate.add_argument(
        "target", type=path_or_uri, metavar="RUN_DIR|CHECKPOINT", help="a run's folder (its last checkpoint) or a file"
    )
    evaluate.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES_HELP)
    evaluate.add_argument("--nproc", type=positive_int, metavar="N", help="start N processes on this machine")
    evaluate.set_defaults(run=_evaluate)

    predict = commands.add_parser(
        "predict", help="label images: the five likeliest classes, with their probabilities",
        description="Labels each IMAGE, and each image in a folder, with the model of a checkpoint, of a run's last one, or"
        " of MLflow's registry (at MLFLOW_TRACKING_URI, else in runs/mlflow.db). Bad images are named and left out.",
    )  # fmt: skip
    predict.add_argument(
        "target", type=path_or_uri, metavar="CHECKPOINT|RUN_DIR|models:/NAME@ALIAS", help="whose model"
    )
    predict.add_argument(
        "images", nargs="+", type=path_or_uri, metavar="IMAGE", help="image files, and folders of them"
    )
    predict.add_argument("--json", action="store_true", help="for machines")
    predict.add_argument("--sheet", type=path, metavar="FILE.png", help="also draw the first 64 with their labels")
    predict.set_defaults(run=_predict)

    plan = commands.add_parser("plan", help="the arithmetic of a run, without running it")
    plan.add_argument("recipe", type=path_or_uri, metavar="RECIPE")
    plan.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES_HELP)
    plan.add_argument(
        "--world", type=positive_int, default=1, metavar="N", help="processes in the whole job (default 1)"
    )
    plan.add_argument(
        "--nodes", type=positive_int, default=1, metavar="M", help="machines that they are spread over (default 1)"
    )
    plan.set_defaults(run=_plan)

    verify = commands.add_parser(
        "verify", help="repeat a run from its receipt: identical, or the first step and tensor that differ",
        description="Trains the run in RUN_DIR again from its receipt, in a temporary folder, and compares weights and"
        " checkpoints. Answers 'identical: …' (exit 0) or 'differs: …' (exit 1).",
    )  # fmt: skip
    verify.add_argument("run_dir", type=path, metavar="RUN_DIR")
    verify.add_argument("--steps", type=positive_int, metavar="N", help="the first N steps alone (default: all)")
    verify.set_defaults(run=_verify)

    report = commands.add_parser("report", help="draw a run's curves, confusions and mistakes into its folder report/")
    report.add_argument("run_dir", type=path, metavar="RUN_DIR")
    report.set_defaults(run=_report)

    export = commands.add_parser(
        "export", help="the trained model in another format, compared with it on validation images",
        description="Writes the model of a run's last checkpoint, or of the one that is named, to the run's folder export."
        " torch.export and onnx take pixels of 0 to 255 and give probabilities; safetensors has the weights alone.",
    )  # fmt: skip
    export.add_argument("target", type=path, metavar="RUN_DIR|CHECKPOINT")
    export.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES_HELP)
    export.add_argument("--to", required=True, choices=("torch.export", "onnx", "safetensors"))
    export.add_argument("--out", type=path, metavar="FILE", help="another place for it")
    export.set_defaults(run=_export)

    sync = commands.add_parser("sync", help="send to MLflow what the journal holds and the server lacks")
    sync.add_argument("run_dir", type=path, metavar="RUN_DIR")
    sync.add_argument(
        "--follow", action="store_true", help="go on until standard input ends, as a training run uses it"
    )
    sync.set_defaults(run=_sync)


def _train(options: argparse.Namespace) -> str | int:
    faulthandler.register(signal.SIGUSR1)  # says where each thread stands, of a rank and of its loader workers
    stop = StopRequest()
    if not (options.nproc and options.nproc > 1):
        stop.listen()
    if supervision.launch_id() is not None:
        supervision.die_with_agent()

    from pipeline.operate import launch
    from pipeline.record.terminal import QUIET

    if options.quiet:
        os.environ[QUIET] = "1"

    return launch.train(options.recipe, options.overrides, options.nproc, stop)


def _evaluate(options: argparse.Namespace) -> str | int:
    from pipeline.operate import launch

    return launch.evaluate(options.target, options.overrides, options.nproc)


def _predict(options: argparse.Namespace) -> str:
    from pipeline.operate import predict

    return predict.predict(options.target, options.images, as_json=options.json, sheet=options.sheet)


def _plan(options: argparse.Namespace) -> str:
    from pipeline.config.load import load
    from pipeline.data.sources import size_of
    from pipeline.plan import make_plan, memory_row

    config = load(options.recipe, options.overrides)
    place = world.World(cpus=machine.available_cpus(), has_gpu=machine.has_gpu()).resized(options.world, options.nodes)
    plan = make_plan(config, place, size_of(config))

    from pipeline.model.architectures import count_parameters  # imports torch: last, so that a mistake is said at once

    parameters = count_parameters(config.model, plan.num_classes)
    return f"{config.recipe}\n{plan.table()}\n{memory_row(config, parameters, plan.world)}"


def _verify(options: argparse.Namespace) -> str | int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the repetition and its folder go with us

    from pipeline.operate import verify

    return verify.verify(options.run_dir, options.steps)


def _report(options: argparse.Namespace) -> str:
    from pipeline.operate.report import report

    return report(options.run_dir)


def _export(options: argparse.Namespace) -> str:
    from pipeline.operate import export

    return export.export(options.target, options.to, options.out, options.overrides)


def _sync(options: argparse.Namespace) -> str:
    from pipeline.record.mlflow.sync import sync

    sync(options.run_dir, follow=options.follow)
    return f"{options.run_dir} is delivered"
