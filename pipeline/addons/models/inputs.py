"""Checks of what a command reads and writes, before it imports torch."""

import os
import re
from pathlib import Path

from pipeline.config.schema import MODEL_URI_PREFIX
from pipeline.data.access import storage_outage
from pipeline.errors import RequestError
from pipeline.files import target_of

_MODEL_URI = re.escape(MODEL_URI_PREFIX) + r"[^/@]+([@/][^/@]+)?"
_TARGET = "give a run's folder or a file step-….pt"


def check_target(target: str | Path) -> None:
    """Check that `target` is a run's folder or a checkpoint."""
    if str(target).startswith(MODEL_URI_PREFIX):
        raise RequestError(
            f"{target} is a model in MLflow, which only 'pipeline predict' takes", "give a run's folder"
        )
    check_exists(target, _TARGET)
    if os.path.isfile(target) and Path(target).suffix != ".pt":
        raise RequestError(f"{target} is not a checkpoint", _TARGET)


def check_model(target: str) -> None:
    """Check that `target` is a run's folder, a checkpoint or the URI of a model in MLflow."""
    if not target.startswith(MODEL_URI_PREFIX):
        check_target(target)
    elif not re.fullmatch(_MODEL_URI, target):
        raise RequestError(
            f"{target!r} is not the URI of a model", "give models:/NAME@ALIAS or models:/NAME/VERSION"
        )


def check_run_folder(folder: Path) -> None:
    """Check that a run's folder exists."""
    check_exists(folder, "give a run's folder")


def check_exists(path: str | Path, remedy: str) -> None:
    """Check that a file or folder exists. remedy: what to give instead."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(f"{path} does not exist", remedy) from None
    except OSError as error:
        raise storage_outage(path, error) or RequestError(
            f"{path} cannot be read: {error.strerror}"
        ) from None


def check_output(flag: str, file: Path | None) -> None:
    """Check that a file can be written: its folder exists, and what is there is a regular file."""
    try:
        target = target_of(file) if file else None
    except OSError as error:
        raise RequestError(
            f"{flag} {file} cannot be written: {error.strerror}", "give the name of a new file"
        ) from None
    if target and not os.path.isdir(target.parent):
        raise RequestError(
            f"{flag} {file} cannot be written: {target.parent} is not a folder", "name one that exists"
        )
