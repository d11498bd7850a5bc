"""The command report: make a run's report/ from its folder, during or after it, on any machine."""

import os
import sys
from pathlib import Path

from pipeline.cli import arguments
from pipeline.cli.arguments import Commands, add_command
from pipeline.errors import RequestError, StorageError

STARTED_BY_RUN = "PIPELINE_STARTED_BY_RUN"
"""Environment variable of `pipeline report` if a run starts it: it then writes for that run."""


def add_commands(commands: Commands) -> None:
    parser = add_command(
        commands, "report", lambda options: report(options.run_dir),
        "draw a run's learning curves, confusions and mistakes",
        "Draw the learning curves, confusions and mistakes of a run into its folder report/, and write"
        " report/index.html, a web page of the run in one file. Works during the run, after it, and on"
        " another machine.",
        "pipeline report runs/digits",
    )  # fmt: skip
    parser.add_argument("run_dir", type=arguments.path, metavar="RUN_DIR", help="the run's folder")


def report(path: Path) -> str:
    """Draw the pictures of a run and write its web page; return a line that names the files."""
    from pipeline.addons.models.inputs import check_run_folder
    from pipeline.addons.report.figures import draw_report
    from pipeline.addons.report.page import write_page
    from pipeline.record.folder import RunFolder

    check_run_folder(path)
    folder = RunFolder(path)
    if STARTED_BY_RUN in os.environ:
        folder.lock.join_holder()
    if not folder.journal.exists():
        remedy = "give one, such as runs/digits"
        raise RequestError(f"{path} is not the folder of a run that has started", remedy)
    try:
        pictures = draw_report(folder, lambda line: print(line, file=sys.stderr))
        page = write_page(folder)
    except OSError as error:
        raise StorageError(f"{folder.report} cannot be written: {error.strerror}") from None
    return f"{folder.report}: {', '.join(path.name for path in [page, *pictures])}"
