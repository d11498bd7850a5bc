"""Checks of what a command reads, before it imports torch: a run's folder, a checkpoint, images."""

import os
from pathlib import Path

from pipeline.config.schema import MODEL_URI_PREFIX
from pipeline.data.access import raise_if_outage
from pipeline.errors import RequestError


def check_target(target: str | Path) -> None:
    """Check that a run's folder or a checkpoint exists; a model in MLflow is looked up later."""
    if not str(target).startswith(MODEL_URI_PREFIX):
        _check_exists(target, f"{target} does not exist: give a run's folder or a file step-….pt{_run_of(target)}")


def check_run_folder(folder: Path) -> None:
    """Check that a run's folder exists."""
    _check_exists(folder, f"{folder} does not exist: give a run's folder{_run_of(folder)}")


def check_images(paths: list[str]) -> None:
    """Check that image files, or folders with images, exist."""
    for path in paths:
        _check_exists(path, f"{path}: file not found: give image files, or folders with images")


def _run_of(recipe: str | Path) -> str:
    """Return "; did you mean runs/digits?" if the user gave the recipe `digits`, or ""."""
    run = Path("runs", recipe)
    return f"; did you mean {run}?" if os.path.isdir(run) else ""


def _check_exists(path: str | Path, if_missing: str) -> None:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(if_missing) from None
    except OSError as error:
        raise_if_outage(Path(path), error)
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None


def check_sheet(file: Path | None) -> None:
    """Check that the folder of the contact sheet exists."""
    if file and not os.path.isdir(file.parent):
        raise RequestError(f"--sheet {file} cannot be written: {file.parent} is not a folder: name one that exists")
