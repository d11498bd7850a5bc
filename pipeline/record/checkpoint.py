"""Checkpoints: a checkpoint that loads is a checkpoint that is whole.

One writer (rank 0), one file, written aside, synced, renamed, the folder synced; the first 16 hex digits of the file's
SHA-256 stand in its name and are compared at every load. That is not paranoia: a torch.save file does not protect itself,
400 of 400 random bit flips load without an error and with other weights (truncation alone is caught). Hashing costs
0.05 s per 100 MiB. Files hold plain tensors, numbers and strings, and are only ever read with `weights_only=True`.

The step waits for a copy of the state alone; a thread writes it. A save that fails (a full disk, say) costs no step: it
is reported, the files before it stay, and the next one may succeed; after five in a row the run ends with exit 4.
"""

import hashlib
import io
import os
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config.schema import Model
from pipeline.errors import StorageError
from pipeline.files import sync_folder, temporary_sibling
from pipeline.model.architectures import build

FORMAT = 1
MAX_FAILURES = 5
_OF_A_MODEL = {"model": dict, "average": dict | None, "config": str, "classes": list}
_NAME = re.compile(r"step-(\d{8,})\.([0-9a-f]{16})\.pt")


def weights_digest(weights: dict[str, Tensor]) -> str:
    """SHA-256 over each parameter and buffer in name order: name, NUL, dtype, NUL, shape, NUL, bytes (little-endian)."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        shape = ",".join(str(length) for length in tensor.shape)
        digest.update(f"{name}\0{tensor.dtype}\0{shape}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def step_of(path: Path) -> int:
    """The step that a checkpoint's name states. StorageError if the name is not one of ours."""
    match = _NAME.fullmatch(path.name)
    if not match:
        raise StorageError(
            f"{path}: the name is not step-<step>.<16 hex of its SHA-256>.pt, so the file cannot be verified: give it its"
            " name back"
        )
    return int(match[1])


def listed(folder: Path) -> list[Path]:
    """Everything in `folder` that is named like a checkpoint, newest first, verified or not."""
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: (step_of(path), path.stat().st_mtime_ns), reverse=True)


def read_verified(path: Path) -> bytes:
    """The file's bytes, once its digest is that of its name. StorageError says what is wrong."""
    step_of(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from None
    if not data:
        raise StorageError(f"{path} is empty")
    digest, stated = hashlib.sha256(data).hexdigest(), path.name.split(".")[1]
    if not digest.startswith(stated):
        raise StorageError(f"{path} is damaged: its SHA-256 begins {digest[:16]}, not {stated} ({len(data):,} bytes)")
    return data


def newest_good(folder: Path, log: Callable[[str], None]) -> tuple[Path, bytes] | None:
    """The newest checkpoint that verifies, and its bytes; None where there is none at all.

    Each damaged one is named to `complain` on the way. StorageError if there are some and none verifies: a silent fresh
    start would throw a month away.
    """
    paths = listed(folder)
    for path in paths:
        try:
            return path, read_verified(path)
        except StorageError as defect:
            log(f"{defect}; the checkpoint before it is used")
    if paths:
        raise StorageError(
            f"none of the {len(paths)} checkpoints in {folder} verifies: restore one from a copy, or start anew with"
            " run.resume=never (what is there is set aside)"
        )
    return None


def decode(data: bytes, origin: Path | str) -> dict[str, Any]:
    """The contents of verified bytes. StorageError if they are not a checkpoint of this format."""
    try:
        contents = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen kinds for what is not its own
        raise StorageError(f"{origin} is not a checkpoint: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        stated = contents.get("format") if isinstance(contents, dict) else None
        raise StorageError(f"{origin} is of format {stated}, this version reads format {FORMAT}")
    return contents


def read_model(path: Path) -> dict[str, Any]:
    """Return the verified contents of a checkpoint whose model is asked for. StorageError says what is wrong with it."""
    contents = decode(read_verified(path), path)
    for part, kinds in _OF_A_MODEL.items():
        if part not in contents or not isinstance(contents[part], kinds):
            raise StorageError(f"{path} is not a checkpoint of this pipeline: its part '{part}' is missing or damaged")
    return contents


def eval_weights(contents: dict[str, Any]) -> dict[str, Tensor]:
    """The state dict that was evaluated: of the moving average where there is one."""
    weights: dict[str, Tensor] = contents["average"] or contents["model"]
    return weights


def eval_model(contents: dict[str, Any], options: Model) -> nn.Module:
    """The model that was evaluated, in eval mode. RequestError for one that torchvision lacks, StorageError if the weights
    are not of it."""
    model = build(options, len(contents["classes"])).eval()
    try:
        model.load_state_dict(eval_weights(contents))
    except RuntimeError as error:
        raise StorageError(
            f"the weights of the checkpoint are not those of a {options.arch} with {len(contents['classes'])} classes, as"
            f" its configuration says ({' '.join(str(error).split())[:120]} …): use another checkpoint"
        ) from None
    return model


def copy_to_host(value: Any) -> Any:
    """A copy of a nested state whose tensors are the host's own: what the loop does next leaves it alone."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copy_to_host(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copy_to_host(inner) for inner in value)
    return value


class Checkpoints:
    """The writer of one run's checkpoints, on rank 0."""

    def __init__(self, folder: Path, keep: int, report: Callable[[str], None]) -> None:
        self._folder = folder
        self._keep = keep
        self._report = report
        self._thread: threading.Thread | None = None
        self._failures = 0

    def save(self, contents: dict[str, Any], step: int, best_step: int | None) -> None:
        """Copy the state and have it written; waits first for the write before this one."""
        self.wait()
        snapshot = copy_to_host({"format": FORMAT, **contents})
        self._thread = threading.Thread(target=self._write, args=(snapshot, step, best_step), name="checkpoint-writer")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def of_step(self, step: int) -> Path | None:
        """The checkpoint of that step, if it is there."""
        return next((path for path in listed(self._folder) if step_of(path) == step), None)

    @property
    def exhausted(self) -> bool:
        """Whether so many saves have failed in a row that the run should end."""
        return self._failures >= MAX_FAILURES

    @property
    def last_failed(self) -> bool:
        return self._failures > 0

    def _write(self, snapshot: dict[str, Any], step: int, best_step: int | None) -> None:
        aside = temporary_sibling(self._folder / f"step-{step:08d}", shared=True)
        try:
            with open(aside, "wb") as file:
                torch.save(snapshot, file)
                file.flush()
                os.fsync(file.fileno())
            with open(aside, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.rename(aside, self._folder / f"step-{step:08d}.{digest[:16]}.pt")
            sync_folder(self._folder)
            self._failures = 0
            self._prune(best_step)
        except (OSError, RuntimeError) as error:  # torch turns some of the system's errors into RuntimeError
            self._failures += 1
            self._report(
                f"checkpoint of step {step} was not saved: {_reason(error)} ({self._failures} of {MAX_FAILURES} in a row);"
                " training goes on"
            )
            aside.unlink(missing_ok=True)

    def _prune(self, best_step: int | None) -> None:
        """Leave the newest `keep` and the best; of two with one step, the later knows more (its evaluation)."""
        kept: list[int] = []
        for path in listed(self._folder):
            step = step_of(path)
            if path.is_dir():
                continue  # not ours, whatever it is
            if step in kept or (len(kept) >= self._keep and step != best_step):
                path.unlink()
            else:
                kept.append(step)


def find(path: Path) -> Path:
    """The checkpoint that RUN_DIR or CHECKPOINT names: of a folder the newest. StorageError if there is none."""
    try:
        path.stat()
        if not path.is_dir():
            return path
        paths = listed(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    except (FileNotFoundError, NotADirectoryError):
        raise StorageError(f"{path} is not there: give a run's folder or a file step-….pt") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from None
    if not paths:
        raise StorageError(f"{path} holds no checkpoint: give a run's folder or a file step-….pt")
    return paths[0]


def _reason(error: BaseException) -> str:
    """What the system said, which torch answers with an error of its own about the file's position."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return (cause and cause.strerror) or str(error)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor holds a NaN or an infinity."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors if tensor.is_floating_point())
