"""The command train."""

import argparse
import faulthandler
import os
import signal

from pipeline import streams, supervision
from pipeline.cli import arguments
from pipeline.cli.arguments import Commands, add_command
from pipeline.guards.signals import StopRequest
from pipeline.lazy import addon


class _HelpWithKeys(argparse.Action):
    """Prints the help of `train` and every key, whose schema is slow to build."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        keys = addon("ops.keys").describe_keys(arguments.help_width())
        print(parser.format_help())
        print(f"Keys of a recipe, with their defaults, by section:\n\n{keys}")
        parser.exit()


def add_commands(commands: Commands) -> None:
    parser = add_command(
        commands, "train", _train, "train a recipe; the same command resumes an interrupted run",
        "Train RECIPE. If its run folder holds checkpoints, training resumes from the newest one. Under"
        " torchrun, this process joins the group; otherwise it trains alone, or starts N processes.",
        "pipeline train digits train.epochs=3 --nproc 2", add_help=False,
    )  # fmt: skip
    add = parser.add_argument
    add("-h", "--help", nargs=0, action=_HelpWithKeys, help="show this help and every key, and exit")
    arguments.add_recipe(
        parser, "name of a recipe in pipeline/recipes/, or a YAML file", "the keys are listed below"
    )
    arguments.add_nproc(parser)
    add("--quiet", action="store_true", help="print only errors and the last line")


def _train(options: argparse.Namespace) -> str | int:
    # prints the traceback of every thread, in ranks and in their loader workers; 2: standard error
    faulthandler.register(signal.SIGUSR1, 2)
    addon("run.streams").lose_unread_log()
    stop = StopRequest()
    stop.listen()
    if supervision.launch_id() is not None:
        addon("deploy.processes").die_with_agent()

    from pipeline.operate import launch

    if options.quiet:
        os.environ[streams.QUIET] = "1"
    return launch.train(options.recipe, options.overrides, options.nproc, stop)
