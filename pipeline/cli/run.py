"""The commands train, recipes, plan, evaluate, predict, verify, report, export, sync."""

import argparse
import faulthandler
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import machine, streams, supervision, world
from pipeline.cli import arguments
from pipeline.cli.arguments import (
    Commands,
    Parser,
    add_command,
    add_gpu_speed,
    add_overrides,
    add_recipe,
    add_trust,
    count_or_range,
    path_or_uri,
    positive_int,
    step_range,
)
from pipeline.errors import RequestError
from pipeline.guards.signals import StopRequest, handle

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.plan import Plan

_TARGET_HELP = "a run's folder (its last checkpoint) or a checkpoint file"


def add_commands(commands: Commands) -> None:
    for add in (
        _add_train, _add_recipes, _add_plan, _add_evaluate, _add_predict, _add_verify, _add_report,
        _add_export, _add_sync,
    ):  # fmt: skip
        add(commands)


def _add_best(parser: Parser) -> None:
    help = "use the run's best checkpoint (highest top-1 in validation) instead of the last"
    parser.add_argument("--best", action="store_true", help=help)


def _target(options: argparse.Namespace) -> str:
    """Return the path or URI of the model to use: with --best, the run's best checkpoint."""
    if not options.best:
        return str(options.target)
    from pipeline.record.receipt import best_checkpoint

    return str(best_checkpoint(options.target))


class _HelpWithKeys(argparse.Action):
    """Prints the help of `train` and every key, whose schema is slow to build."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from pipeline.config.help import describe_keys

        print(parser.format_help())
        print(f"Keys of a recipe, with their defaults, by section:\n\n{describe_keys(arguments.help_width())}")
        parser.exit()


def _add_train(commands: Commands) -> None:
    parser = add_command(
        commands, "train", _train, "train a recipe; the same command resumes an interrupted run",
        "Train RECIPE. If its run folder holds checkpoints, training resumes from the newest one. Under torchrun,"
        " this process joins the group; otherwise it trains alone, or starts N processes with --nproc N.",
        "pipeline train digits train.epochs=3 --nproc 2", add_help=False,
    )  # fmt: skip
    add = parser.add_argument
    add("-h", "--help", nargs=0, action=_HelpWithKeys, help="show this help and every key, and exit")
    add_recipe(parser, "name of a recipe in pipeline/recipes/, or a YAML file", "the keys are listed below")
    add("--nproc", type=positive_int, metavar="N", help="start N processes on this machine")
    arguments.add_numa_binding(parser, "with --nproc: ")
    add("--quiet", action="store_true", help="print only errors and the last line")


def _train(options: argparse.Namespace) -> str | int:
    # prints the traceback of every thread, in ranks and in their loader workers; 2: standard error
    faulthandler.register(signal.SIGUSR1, 2)
    streams.lose_unread_log()
    stop = StopRequest()
    stop.listen()
    if supervision.launch_id() is not None:
        supervision.die_with_agent()

    from pipeline.operate import launch

    if options.quiet:
        os.environ[streams.QUIET] = "1"
    return launch.train(options.recipe, options.overrides, options.nproc, stop, options.numa_binding)


def _add_recipes(commands: Commands) -> None:
    help = "list the recipes: what each trains, its target, time, processes, data, source"
    add_command(commands, "recipes", _recipes, help)


def _recipes(_: argparse.Namespace) -> str:
    from pipeline.config.recipes import describe, recipe_names

    return "\n\n".join(map(describe, recipe_names()))


def _add_evaluate(commands: Commands) -> None:
    parser = add_command(
        commands, "evaluate", _evaluate, "evaluate a checkpoint on all validation images",
        "Evaluate a checkpoint on the validation images and print the 'done' line of 'pipeline train'. Every image"
        " counts exactly once, at any number of processes.",
        "pipeline evaluate runs/digits", "pipeline evaluate runs/digits --best --nproc 2",
    )  # fmt: skip
    parser.add_argument("target", type=path_or_uri, metavar="RUN_DIR|CHECKPOINT", help=_TARGET_HELP)
    add_overrides(parser)
    _add_best(parser)
    add_trust(parser)
    parser.add_argument("--nproc", type=positive_int, metavar="N", help="start N processes on this machine")


def _evaluate(options: argparse.Namespace) -> str | int:
    from pipeline.operate import launch

    return launch.evaluate(_target(options), options.overrides, options.nproc)


def _add_predict(commands: Commands) -> None:
    parser = add_command(
        commands, "predict", _predict, "classify images: the five most likely classes and their probabilities",
        "Classify each IMAGE, and each image in a folder, with the model of a checkpoint, of a run's last"
        " checkpoint, or of MLflow's model registry (at MLFLOW_TRACKING_URI, or else in runs/mlflow.db). Images that"
        " cannot be decoded are named and skipped.",
        "pipeline predict runs/digits --best photo.png", "pipeline predict models:/digits@best photos/ --json",
    )  # fmt: skip
    add = parser.add_argument
    add("target", type=path_or_uri, metavar="CHECKPOINT|RUN_DIR|models:/NAME@ALIAS", help="the model to use")
    add("images", nargs="+", type=path_or_uri, metavar="IMAGE", help="image files, or folders of them")
    _add_best(parser)
    add_trust(parser)
    add("--json", action="store_true", help="print JSON")
    help = "also draw the first 64 images with their predicted classes"
    add("--sheet", type=arguments.path, metavar="FILE.png", help=help)


def _predict(options: argparse.Namespace) -> str:
    from pipeline.operate import inputs

    inputs.check_model(options.target)
    inputs.check_images(options.images)
    inputs.check_output("--sheet", options.sheet)
    if options.sheet and options.sheet.suffix != ".png":
        raise RequestError(f"--sheet {options.sheet} is not allowed: give the name of a .png file")

    from pipeline.operate import predict

    return predict.predict(_target(options), options.images, as_json=options.json, sheet=options.sheet)


def _add_plan(commands: Commands) -> None:
    parser = add_command(
        commands, "plan", _plan, "show batch sizes, steps, learning rate and memory of a run, without running it",
        "Print what RECIPE comes to with N processes on M machines: data, batch sizes, steps, learning rate,"
        " validation, checkpoints and memory. Nothing is trained.",
        "pipeline plan resnet50-90 data.root=/data --world 8",
    )  # fmt: skip
    add_recipe(parser)
    add = parser.add_argument
    help = "processes in the whole job (default 1); MIN:MAX: say which numbers divide the batch, and plan the largest"
    add("--world", type=count_or_range, default="1", metavar="N", help=help)
    add("--nodes", type=positive_int, default=1, metavar="M", help="machines in the whole job (default 1)")
    add_gpu_speed(parser)
    add("--json", action="store_true", help="print JSON: the contents of a run's plan.json, and the rows below them")


def _plan(options: argparse.Namespace) -> str:
    from pipeline.config.load import load
    from pipeline.data.sources import class_counts, data_size
    from pipeline.plan import divisors, fsdp_slices, make_plan
    from pipeline.plan_table import balance_rows, effective_counts, gathered_row, memory_row, table

    config = load(options.recipe, options.overrides)
    this_machine = world.World(cpus=machine.available_cpus(), has_gpu=machine.has_gpu())
    low, size = options.world
    title = config.recipe
    if low:
        if low % options.nodes or size % options.nodes:
            raise RequestError(f"--world {low}:{size} does not divide by --nodes {options.nodes}")
        allowed = divisors(config, range(low, size + 1, options.nodes))
        title += f"\n  divides among   {', '.join(map(str, allowed))} processes, of {low} to {size}"
        size = allowed[-1]
    here = this_machine.resized(size, options.nodes)
    plan = make_plan(config, here, data_size(config))
    counts = class_counts(config) if plan.balance != "none" else {}

    from pipeline.model.architectures import meta_model  # imports torch: last, so that errors come at once

    model = meta_model(config.model, plan.num_classes)
    parameters = sum(param.numel() for param in model.parameters())
    rows = [memory_row(config, parameters, plan)]
    if options.gpu_images_per_s:
        rows.append(_loader_row(config, plan, here, options.gpu_images_per_s))
    if config.parallel == "fsdp" and plan.world > 1:
        from pipeline.parallel.fsdp import gathered_bytes

        slices, is_bf16 = fsdp_slices(config, plan), config.train.precision == "bf16"
        pass_bytes = gathered_bytes(model, slices, is_bf16=is_bf16)
        rows.append(gathered_row(config, parameters, plan, pass_bytes))
    if options.json:
        texts = dict(row.split(maxsplit=1) for row in rows)
        effective = dict(zip(counts, effective_counts(plan, [*counts.values()]), strict=True))
        return json.dumps({**plan.to_dict(), "parameters": parameters, **texts, "effective_counts": effective})
    if plan.balance != "none" and not counts:
        rows.append("  classes        not counted before the digits are made")
    elif counts:
        rows += ["  classes        by their number of images", *balance_rows(plan, counts)]
    return "\n".join([title, table(plan), *rows])


def _loader_row(config: "Config", plan: "Plan", here: world.World, gpu_images_per_s: int) -> str:
    """Return the table's row about the cores that feed the GPUs, which it measures here."""
    from pipeline.preflight.machine import check_loader_feeds_gpus
    from pipeline.preflight.request import open_data
    from pipeline.record.folder import RunFolder

    uncached = config.replacing("data", cache=None)  # a check must not write to it
    source = open_data(uncached, RunFolder(config.run_dir))
    try:
        line = check_loader_feeds_gpus(config, plan, source, here, gpu_images_per_s)
    except RequestError as error:
        line = f"too few cores: {error}"
    return f"  loader         {line}"


def _add_verify(commands: Commands) -> None:
    parser = add_command(
        commands, "verify", _verify, "repeat a run from its receipt and compare the weights",
        "Train the run in RUN_DIR again from its receipt, in a temporary folder, and compare weights and"
        " checkpoints. Prints 'identical: …' (exit 0), or 'differs: …' (exit 1) with the first step and tensor that"
        " differ. With --against it trains nothing and compares two receipts: exit 1 if nothing explains a difference.",
        "pipeline verify runs/digits --steps 50", "pipeline verify runs/digits --steps 84-112",
        "pipeline verify runs/digits --against docs/receipts",
    )  # fmt: skip
    parser.add_argument("run_dir", type=arguments.path, metavar="RUN_DIR", help="the run's folder")
    kind = parser.add_mutually_exclusive_group()
    help = "repeat only the first N steps (default: all); A-B repeats from the checkpoint of step A, which is trusted"
    kind.add_argument("--steps", type=step_range, metavar="N|A-B", default=(0, None), help=help)
    help = "compare with the receipt of the same configuration in FOLDER, a run's folder or a folder of them"
    kind.add_argument("--against", type=arguments.path, metavar="FOLDER", help=help)
    help = "with --against: a text, which the result names if it has the digest of the weights"
    parser.add_argument("--page", type=arguments.path, metavar="FILE", help=help)
    add_trust(parser)


def _verify(options: argparse.Namespace) -> int:
    if options.against:
        from pipeline.operate.against import against

        return against(options.run_dir, options.against, options.page)
    if options.page:
        raise RequestError("--page needs --against", "give both, or leave --page out")
    handle(signal.default_int_handler)  # SIGTERM ends the repeated training and removes its folder, as Ctrl-C does

    from pipeline.operate import verify

    start, steps = options.steps
    return verify.verify(options.run_dir, steps, start)


def _add_report(commands: Commands) -> None:
    parser = add_command(
        commands, "report", _report, "draw a run's learning curves, confusions and mistakes",
        "Draw the learning curves, confusions and mistakes of a run into its folder report/, and write"
        " report/index.html, a web page of the run in one file. Works during the run, after it, and on another"
        " machine.",
        "pipeline report runs/digits",
    )  # fmt: skip
    parser.add_argument("run_dir", type=arguments.path, metavar="RUN_DIR", help="the run's folder")


def _report(options: argparse.Namespace) -> str:
    from pipeline.operate.report import report

    return report(options.run_dir)


def _add_export(commands: Commands) -> None:
    parser = add_command(
        commands, "export", _export, "write the trained model in another format and check it on validation images",
        "Write the model of a checkpoint, or of a run's last checkpoint, to export/ in the run's folder."
        " torch.export and onnx map pixels from 0 to 255 to probabilities; safetensors holds only the weights.",
        "pipeline export runs/digits --best --to onnx",
    )  # fmt: skip
    add = parser.add_argument
    add("target", type=path_or_uri, metavar="RUN_DIR|CHECKPOINT", help=_TARGET_HELP)
    add_overrides(parser)
    _add_best(parser)
    add_trust(parser)
    add("--to", required=True, choices=("torch.export", "onnx", "safetensors"), help="format of the exported file")
    add("--out", type=arguments.path, metavar="FILE", help="write to this file instead")


def _export(options: argparse.Namespace) -> str:
    from pipeline.operate import export

    return export.export(Path(_target(options)), options.to, options.out, options.overrides)


def _add_sync(commands: Commands) -> None:
    parser = add_command(
        commands, "sync", _sync, "send to MLflow the part of a run's journal that it does not have yet",
        "Send to MLflow what it does not have yet of the run in RUN_DIR, after its server could not be reached."
        " MLFLOW_TRACKING_URI names the server; otherwise it is the run's own (track.uri).",
        "pipeline sync runs/digits",
    )  # fmt: skip
    add = parser.add_argument
    add("run_dir", type=arguments.path, metavar="RUN_DIR", help="the run's folder")
    add("--follow", action="store_true", help="keep sending until standard input ends; training runs use this")
    add_trust(parser)


def _sync(options: argparse.Namespace) -> str:
    from pipeline.operate.inputs import check_run_folder
    from pipeline.record.mlflow.sync import sync

    check_run_folder(options.run_dir)
    if options.follow:  # the end of standard input ends it
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sync(options.run_dir, follow=options.follow)
    return f"everything in {options.run_dir} has been sent to MLflow"
