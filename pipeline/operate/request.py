"""Checks of a request: a start runs them in order, `doctor` runs all and reports each.

A check returns a line for the user or what it loaded, or raises the RunError that a start would end
with. None imports torch or communicates with other ranks: a node that replaces a lost one is
checked while the others train. None changes anything, but missing digits are made.
"""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline import machine
from pipeline.config.load import from_yaml
from pipeline.config.schema import Config
from pipeline.data.interface import Source
from pipeline.errors import RequestError, RunError, from_exit_code
from pipeline.files import parse_json
from pipeline.lazy import addon
from pipeline.operate.torch_settings import FIXED_ORDER_ALGORITHM
from pipeline.plan import Plan
from pipeline.planning import make_plan, request_digest
from pipeline.record.failure import FAILURE
from pipeline.record.folder import RunFolder
from pipeline.world import World


@dataclass(frozen=True)
class Checked:
    """A request that has passed all checks that need no torch."""

    config: Config
    source: Source
    plan: Plan


def check(config: Config, here: World, folder: RunFolder) -> Checked:
    """Run every check of a request that needs no torch. Raises RunError if one fails."""
    check_run_folder_is_writable(config, folder)
    check_previous_start_did_not_fail(config, here, folder)
    check_device(config, here)
    source: Source = addon("datasets.place").open_data(config, folder)
    plan = make_plan(config, here, source.size)
    check_config_is_compatible(config, folder)
    return Checked(config, source, plan)


def check_run_folder_is_writable(config: Config, folder: RunFolder) -> str:
    """Check that the run's folder, and the tracker's database next to it, can be written."""
    check_writable(folder)
    root = addon("datasets.sources").data_root(config)
    is_data = os.path.realpath(root) == os.path.realpath(config.run_dir)
    if config.data.source != "synthetic" and is_data:
        raise RequestError(f"run.dir={config.run_dir} is data.root, too", "give another folder")
    uri = addon("mlflow.uri").tracking_uri(config, folder)
    if config.track.required:
        addon("mlflow.tracker").check_database_is_writable(uri)
    return f"{folder.path} can be written"


def check_writable(folder: RunFolder) -> None:
    """Raise RequestError if nothing can be written in the folder. Creates nothing.

    Raises TemporaryError if the storage is out of reach.
    """
    try:
        folder.path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # what exists above it says whether it can be created
    except OSError as error:  # such as a name that is too long
        raise folder.write_error(error) from None
    place = nearest_existing(folder.path)
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        raise folder.not_writable(f"{place} is read-only" if place.is_dir() else f"{place} is a file")


def nearest_existing(path: Path) -> Path:
    """Return a path, or its nearest ancestor that exists."""
    return next(place for place in (path, *path.absolute().parents) if os.path.exists(place))


def check_previous_start_did_not_fail(config: Config, here: World, folder: RunFolder) -> str:
    """Raise the error of the previous start of this request if it failed permanently."""
    failure = _load_failure(folder.path, request_digest(config, here))
    if failure and config.run.resume == "auto":
        advice = folder.advice_after_failure(config)
        print(f"the previous start of this request failed with the error below: {advice}", file=sys.stderr)
        raise failure
    return "previous start did not fail"


def _load_failure(folder: Path, request: str) -> RunError | None:
    """Return the permanent error that the last start of this request (its digest) ended with."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        saved = parse_json((folder / FAILURE).read_bytes())
        if saved["request"] == request:
            return from_exit_code(saved["code"])(saved["problem"], saved["remedy"])
    return None


def check_device(config: Config, here: World) -> str:
    """Check that this machine has a GPU if the request needs one, and NCCL's order of sums."""
    if config.run.device == "cuda" and not here.has_gpu:
        raise machine.no_gpu_error()
    has_sums_on_gpus = here.size > 1 and here.uses_gpu(config.run.device)
    if config.model.batchnorm == "sync" and here.size > 1 and not has_sums_on_gpus:
        raise RequestError(
            "model.batchnorm=sync: torch synchronises batch norm on GPUs only", "use local or average"
        )
    algorithm = os.environ.get("NCCL_ALGO") or FIXED_ORDER_ALGORITHM
    needs_fixed_order = has_sums_on_gpus and config.run.deterministic and not config.run.exact
    if needs_fixed_order and algorithm.lower() != FIXED_ORDER_ALGORITHM.lower():
        raise RequestError(
            f"NCCL_ALGO={algorithm} in the environment contradicts run.deterministic=true",
            f"unset it, or set NCCL_ALGO={FIXED_ORDER_ALGORITHM}, whose sums have a fixed order",
        )
    return f"run.device={config.run.device}"


def check_config_is_compatible(config: Config, folder: RunFolder) -> None:
    """Check that no key that a resumed run must keep has changed."""
    if folder.has_checkpoints() and config.run.resume == "auto":
        before = previous_config(folder)
        if before:  # otherwise `operate.resume.find` compares with the configuration in the checkpoint
            addon("ops.fixed_keys").refuse_changes(before, config)


def previous_config(folder: RunFolder) -> Config | None:
    """Return the configuration that the last start saved, or None if it cannot be read."""
    try:
        return from_yaml(folder.config.read_text(encoding="utf-8", errors="replace"), str(folder.config))
    except (OSError, RunError):
        return None
