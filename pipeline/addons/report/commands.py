"""The command report."""

import argparse

from pipeline.cli import arguments
from pipeline.cli.arguments import Commands, add_command


def add_commands(commands: Commands) -> None:
    _add_report(commands)


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
    from pipeline.addons.report.write import report

    return report(options.run_dir)
