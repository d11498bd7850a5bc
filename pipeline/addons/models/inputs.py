"""Checks of what a command reads and writes, before it imports torch."""

import errno
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from pipeline.addons.ops.credentials import show
from pipeline.config.load import from_yaml
from pipeline.config.schema import Config
from pipeline.errors import RequestError, storage_outage

MODEL_URI_PREFIX = "models:/"
"""Prefix of a model's URI in MLflow's registry."""
_MODEL_URI = re.escape(MODEL_URI_PREFIX) + r"[^/@]+([@/][^/@]+)?"
_TARGET = "give a run's folder or a file step-….pt"


def check_target(target: str | Path) -> None:
    """Check that `target` is a run's folder or a checkpoint."""
    if str(target).startswith(MODEL_URI_PREFIX):
        raise RequestError(f"{target} is a model in MLflow, which only 'pipeline predict' takes", _TARGET)
    check_exists(target, _TARGET)
    if os.path.isfile(target) and Path(target).suffix != ".pt":
        raise RequestError(f"{target} is not a checkpoint", _TARGET)


def check_model(target: str) -> None:
    """Check that `target` is a run's folder, a checkpoint or the URI of a model in MLflow."""
    if not target.startswith(MODEL_URI_PREFIX):
        check_target(target)
    elif not re.fullmatch(_MODEL_URI, target):
        remedy = "give models:/NAME@ALIAS or models:/NAME/VERSION"
        raise RequestError(f"{target!r} is not the URI of a model", remedy)


def check_run_folder(folder: Path) -> None:
    """Check that a run's folder exists."""
    check_exists(folder, "give a run's folder")


def check_exists(path: str | Path, remedy: str) -> None:
    """Check that a file or folder exists. remedy: what to give instead."""
    try:
        os.stat(path)
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}"
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            problem = f"{path} does not exist"
        raise storage_outage(path, error) or RequestError(problem, remedy) from None


def check_output(file: Path | None) -> None:
    """Check that --out can be written: its folder exists, and what is there is a regular file."""
    try:
        if file and not target_of(file).parent.is_dir():
            raise RequestError(f"--out {file} cannot be written: its folder does not exist", "name another")
    except OSError as error:
        problem = f"--out {file} cannot be written: {error.strerror}"
        raise RequestError(problem, "give the name of a new file") from None


def for_evaluation(text: str, path: str, overrides: list[str]) -> tuple[Config, Config]:
    """Return the configuration in the checkpoint `path`, and the same with overrides on top.

    Another data.source takes no place of the data and no split from the training. Raises
    RequestError if the overrides change the model.
    """
    trained = from_yaml(text, path)
    sources = [word for word in overrides if word.startswith("data.source=")]
    if sources and sources[-1] != f"data.source={trained.data.source}":
        others = "data.root=auto", "data.cache=none", "data.table=none", "data.split_by=class"
        overrides = [*others, *overrides]
    now = from_yaml(text, path, overrides)
    before, after = trained.model.model_dump(exclude={"channels_last"}), now.model.model_dump()
    changed = [f"model.{key}={show(after[key])}" for key in before if before[key] != after[key]]
    if changed:
        problem = f"{', '.join(changed)} cannot be set, because {path} fixes the model"
        raise RequestError(problem, "leave model.* out")
    return trained, now


def target_of(path: Path) -> Path:
    """Return the file that replaces what a user named: `path`, or the target of a link there.

    Raises OSError for a device, a named pipe and so on, which are there to be written to.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return Path(os.path.realpath(path))
