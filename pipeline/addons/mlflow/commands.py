"""The command sync."""

import argparse
import signal

from pipeline.cli import arguments
from pipeline.cli.arguments import Commands, add_command, add_trust
from pipeline.lazy import addon


def add_commands(commands: Commands) -> None:
    parser = add_command(
        commands, "sync", _sync, "send to MLflow the part of a run's journal that it does not have yet",
        "Send to MLflow what it does not have yet of the run in RUN_DIR, after its server could not be"
        " reached. MLFLOW_TRACKING_URI names the server; otherwise it is the run's own (track.uri).",
        "pipeline sync runs/digits",
    )  # fmt: skip
    add = parser.add_argument
    add("run_dir", type=arguments.path, metavar="RUN_DIR", help="the run's folder")
    add("--follow", action="store_true", help="keep sending until standard input ends; trainings use this")
    add_trust(parser)


def _sync(options: argparse.Namespace) -> str:
    addon("models.inputs").check_run_folder(options.run_dir)
    if options.follow:  # the end of standard input ends it
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    addon("mlflow.sync").sync(options.run_dir, follow=options.follow)
    return f"everything in {options.run_dir} has been sent to MLflow"
