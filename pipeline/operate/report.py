"""`pipeline report`: draw a run's report/ from its folder, during or after it, on any machine."""

import sys
from pathlib import Path

from pipeline.errors import RequestError, StorageError
from pipeline.operate.inputs import check_run_folder
from pipeline.record.figures import draw_report
from pipeline.record.folder import RunFolder


def report(path: Path) -> str:
    """Draw the pictures of a run; return a line that names them."""
    check_run_folder(path)
    folder = RunFolder(path)
    try:
        folder.journal.stat()
    except OSError as error:
        raise RequestError(f"{path} is not a run's folder: {folder.journal.name}: {error.strerror}") from None
    try:
        pictures = draw_report(folder, lambda line: print(line, file=sys.stderr))
    except OSError as error:
        raise StorageError(f"{folder.report} cannot be written: {error.strerror}") from None
    return f"{folder.report}: {', '.join(picture.name for picture in pictures) or 'nothing to draw yet'}"
