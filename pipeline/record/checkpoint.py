"""Writing checkpoints: a checkpoint that loads is complete.

Rank 0 alone writes: to a temporary file, which is synced and renamed; then the folder is synced.
The first 16 hex digits of the file's SHA-256 are in its name and are compared at every load. A
torch.save file does not protect itself: 400 of 400 random bit flips loaded without an error and
with other weights (only truncation is detected). Hashing costs 0.05 s per 100 MiB. Files hold plain
tensors, numbers and strings: `checkpoint_contents` reads them.

The training loop waits only while the state is copied; a thread writes the file. A save that fails
(a full disk, say) costs no step: it is reported, earlier files stay, and the next save may succeed.
After five failures in a row, and ten minutes, the run ends with exit code 4.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import StorageError
from pipeline.files import FULL, sync_folder, temporary_sibling
from pipeline.model.weights import map_tensors
from pipeline.record.checkpoint_files import FORMAT, list_checkpoints, step_of
from pipeline.record.folder import RunFolder

MAX_FAILURES = 5
MAX_FAILING_S = 600
"""A run ends after both: whoever saves often has as long to free disk space as others."""
_RETRY_S = 5


def copy_to_host(value: Any) -> Any:
    """Return a copy of a nested state whose tensors are in CPU memory and share no storage."""
    return map_tensors(value, lambda tensor: tensor.detach().to("cpu", copy=True))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if this process's parts of the tensors hold no NaN and no infinity.

    It waits for a device once, and never for another process.
    """
    # FSDP's have `to_local`; to import their class takes a second
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    found = [torch.isfinite(tensor).all() for tensor in local if tensor.is_floating_point()]
    return not found or bool(torch.stack(found).all())


class CheckpointWriter:
    """The writer of one run's checkpoints, on rank 0."""

    def __init__(
        self, folder: RunFolder, keep: int, log: Callable[[str], None], on_saved: Callable[[Path], None]
    ) -> None:
        """on_saved: called in the writing thread with each file that is complete."""
        self._run, self._folder = folder, folder.checkpoints
        self._keep, self._log, self._on_saved = keep, log, on_saved
        self._thread: threading.Thread | None = None
        self.failures = 0
        """Saves that have failed since the last one that did not."""
        self._failing_since = 0.0

    def save(self, contents: dict[str, Any], step: int, best_step: int | None, patience_s: float = 0) -> None:
        """Copy the state and start writing it, after the previous write has ended.

        patience_s: time for which a save that fails is tried again.
        """
        self.wait()
        work = (copy_to_host({"format": FORMAT, **contents}), step, best_step, patience_s)
        self._thread = threading.Thread(target=self._save, args=work, name="checkpoint-writer")
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def should_give_up(self) -> bool:
        """True if saves have failed MAX_FAILURES times and for MAX_FAILING_S."""
        is_long = time.monotonic() - self._failing_since >= MAX_FAILING_S
        return self.failures >= MAX_FAILURES and (is_long or self.is_folder_removed)

    @property
    def is_folder_removed(self) -> bool:
        """True if the folder has been removed or renamed since the start."""
        return not self._folder.is_dir()

    def error(self, problem: str) -> StorageError:
        """Return the error of a run that ends because saves fail."""
        if self.is_folder_removed:
            removed = f"run.dir={self._run.path} was removed or renamed during the run"
            return StorageError(f"{removed}: {problem}", "leave it where it is until the run ends")
        return StorageError(problem, "free disk space")

    def _save(self, snapshot: dict[str, Any], step: int, best_step: int | None, patience_s: float) -> None:
        end = time.monotonic() + patience_s
        while True:
            try:
                saved = self._write(snapshot, step)
                break
            except (OSError, RuntimeError) as error:  # torch.save raises its own for a full disk
                self._log_failure(error, step)
            if self.is_folder_removed or time.monotonic() + _RETRY_S >= end:
                return
            time.sleep(_RETRY_S)
        self.failures = 0
        self._prune(best_step)
        self._on_saved(saved)

    def _write(self, snapshot: dict[str, Any], step: int) -> Path:
        """Return the file once it is on the disk."""
        temporary = temporary_sibling(self._folder / f"step-{step:08d}", shared=True)
        self._run.check_ours()
        try:
            with open(temporary, "wb") as file:
                torch.save(snapshot, file)
                file.flush()
                os.fsync(file.fileno())
            with open(temporary, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            self._run.check_ours()
            saved = self._folder / f"step-{step:08d}.{digest[:16]}.pt"
            os.rename(temporary, saved)
            sync_folder(self._folder)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        return saved

    def _log_failure(self, error: BaseException, step: int) -> None:
        if not self.failures:
            self._failing_since = time.monotonic()
        self.failures += 1
        # torch.save raises an error about the file's position instead of the system's
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        reason = f"{self._folder} was removed or renamed" if self.is_folder_removed else str(cause or error)
        if cause is not None and cause.errno in FULL:
            reason = f"{cause.strerror}: free disk space"
        self._log(
            f"checkpoint of step {step} was not saved: {reason}; failure {self.failures}, the run ends after"
            f" {MAX_FAILURES} in a row and {MAX_FAILING_S // 60} min"
        )

    def _prune(self, best_step: int | None) -> None:
        """Delete all but the newest `keep` and the best."""
        kept: list[int] = []
        with suppress(OSError):  # of a listing: the next save tries again
            for path in list_checkpoints(self._folder):
                step = step_of(path)
                # of two with the same step the newer stays: it was saved after the evaluation
                if step not in kept and (len(kept) < self._keep or step == best_step):
                    kept.append(step)
                    continue
                self._run.check_ours()
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    self._log(f"{path} is old and could not be removed: {error.strerror}: remove it yourself")
