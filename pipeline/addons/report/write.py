"""`pipeline report`: make a run's report/ from its folder, during or after it, on any machine."""

import os
import sys
from pathlib import Path

from pipeline.addons.models.inputs import check_run_folder
from pipeline.addons.report.figures import draw_report
from pipeline.addons.report.page import write_page
from pipeline.errors import RequestError, StorageError
from pipeline.record.folder import STARTED_BY_RUN, RunFolder


def report(path: Path) -> str:
    """Draw the pictures of a run and write its web page; return a line that names the files."""
    check_run_folder(path)
    folder = RunFolder(path)
    if STARTED_BY_RUN in os.environ:
        folder.join_holder()
    try:
        folder.journal.stat()
    except OSError as error:
        problem = f"{path} is not the folder of a run that has started ({folder.journal.name}: {error.strerror})"
        raise RequestError(f"{problem}: give a run's folder, such as runs/digits") from None
    try:
        pictures = draw_report(folder, lambda line: print(line, file=sys.stderr))
        page = write_page(folder)
    except OSError as error:
        raise StorageError(f"{folder.report} cannot be written: {error.strerror}") from None
    return f"{folder.report}: {', '.join(path.name for path in [page, *pictures])}"
