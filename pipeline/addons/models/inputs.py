"""Checks of what a command reads, before it imports torch: a run's folder, a checkpoint, images."""

import os
import re
from pathlib import Path

from pipeline.config.schema import MODEL_URI_PREFIX
from pipeline.data.access import storage_outage
from pipeline.errors import RequestError
from pipeline.files import target_of

_MODEL_URI = re.escape(MODEL_URI_PREFIX) + r"[^/@]+([@/][^/@]+)?"


def check_target(target: str | Path) -> None:
    """Check that `target` is a run's folder or a checkpoint."""
    if str(target).startswith(MODEL_URI_PREFIX):
        raise RequestError(f"{target} is a model in MLflow, which only 'pipeline predict' takes: give a run's folder")
    _check_exists(target, f"{target} does not exist: give a run's folder or a file step-….pt")
    if os.path.isfile(target) and Path(target).suffix != ".pt":
        raise RequestError(f"{target} is not a checkpoint: give a run's folder or a file step-….pt")


def check_model(target: str) -> None:
    """Check that `target` is a run's folder, a checkpoint or the URI of a model in MLflow."""
    if not target.startswith(MODEL_URI_PREFIX):
        check_target(target)
    elif not re.fullmatch(_MODEL_URI, target):
        raise RequestError(f"{target!r} is not the URI of a model: give models:/NAME@ALIAS or models:/NAME/VERSION")


def check_run_folder(folder: Path) -> None:
    """Check that a run's folder exists."""
    _check_exists(folder, f"{folder} does not exist: give a run's folder")


def check_images(paths: list[str]) -> None:
    """Check that image files, or folders with images, exist."""
    for path in paths:
        _check_exists(path, f"{path}: file not found: give image files, or folders with images")


def _check_exists(path: str | Path, if_missing: str) -> None:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(if_missing) from None
    except OSError as error:
        raise storage_outage(path, error) or RequestError(f"{path} cannot be read: {error.strerror}") from None


def check_output(flag: str, file: Path | None) -> None:
    """Check that a file can be written: its folder exists, and what is there is a regular file."""
    if file and file.is_dir():
        raise RequestError(f"{flag} {file} is a folder: give a file in it")
    if file and not os.path.isdir(file.parent):
        raise RequestError(f"{flag} {file} cannot be written: {file.parent} is not a folder: name one that exists")
    try:
        target = target_of(file) if file else None
    except OSError as error:
        raise RequestError(f"{flag} {file} cannot be written: {error.strerror}: give the name of a new file") from None
    if target and not target.parent.is_dir():
        raise RequestError(f"{flag} {file} is a link to {target}, whose folder does not exist: give another file")
