"""The loss guard: nothing of a step whose loss is not finite is kept.

Promise: nothing of a step whose loss is not finite is reported, evaluated or saved, and the run
ends with a line that names the step and the rank. On a CPU the loss is checked before the update,
in the exchange in which the processes agree on everything else. On a GPU that check would wait for
the device, so the device checks: the flag is summed over the processes on its stream, a fused
optimizer skips the update where `found_inf` is 1 (torch made that for its GradScaler), and the host
reads the flag one step later. An optimizer that is not fused (SGD on sharded weights, LAMB, Muon)
makes the update. Nothing leaves the process before `sync` has asked about the last step,
so no result of a skipped or a bad update is ever seen.
"""

import torch
from torch import Tensor

from pipeline.data.batch import Batch, format_sample_ids
from pipeline.errors import NotFiniteError
from pipeline.parallel.strategy import Strategy
from pipeline.timing import StepTimer


class LossGuard:
    """Checks each loss on the host, before the update."""

    def __init__(self, strategy: Strategy, timer: StepTimer, start_again: str) -> None:
        """start_again: how to start the run again, for the error."""
        self._strategy, self._timer, self._start_again = strategy, timer, start_again
        self._step = 0
        self._loss: Tensor | None = None
        self._ids: list[Tensor] = []  # not the batches: their memory would stay in use for a step

    def check(self, step: int, loss: Tensor, batches: list[Batch]) -> bool:
        """Return True if a loss of this process is known to be bad.

        Called after the backward passes of each step.
        """
        self._step, self._loss, self._ids = step, loss, [batch.ids for batch in batches]
        return not bool(torch.isfinite(loss)) or bool(self._strategy.has_overflow())

    def skip_bad_update(self, optimizer: torch.optim.Optimizer, *, has_scaler: bool) -> None:
        """Have the device leave the next update out if the loss was bad: here the host has checked.

        has_scaler: a GradScaler decides about the update.
        """

    def sync(self) -> None:
        """Raise NotFiniteError in all processes if the last step's loss was bad."""

    def error(self) -> NotFiniteError:
        """Return the error that names the first rank with a bad loss; called in all processes."""
        assert self._loss is not None
        bad = None
        if not bool(torch.isfinite(self._loss)):
            bad = float(self._loss), [sample for ids in self._ids for sample in ids.tolist()]
        problem = f"a gradient at step {self._step} is not finite, or larger than exact mode can sum"
        found = [(rank, bad) for rank, bad in enumerate(self._strategy.group.all_gather(bad)) if bad]
        if found:
            rank, (value, ids) = found[0]
            problem = f"the loss is {value} at step {self._step} on rank {rank} ({format_sample_ids(ids)})"
        return NotFiniteError(
            problem,
            "the step is not saved; lower optimizer.lr, lengthen schedule.warmup, set train.clip or lower"
            f" exact.fraction_bits, and {self._start_again}",
        )


class DeviceLossGuard(LossGuard):
    """Checks each loss on the device; the host reads the result one step later."""

    def __init__(self, strategy: Strategy, timer: StepTimer, start_again: str) -> None:
        super().__init__(strategy, timer, start_again)
        device = strategy.group.device
        is_cuda = device.type == "cuda"
        self._is_bad = torch.zeros((), device=device)
        """[] float32: 1 if the loss of this step was bad in any process."""
        # pinned: a copy to other memory would wait for the device
        self._flag = torch.zeros((), pin_memory=is_cuda)
        # blocking: the host sleeps while it waits; without it, it spins, which takes a core per GPU
        self._copied = torch.cuda.Event(blocking=True) if is_cuda else None  # type: ignore[no-untyped-call]

    def check(self, step: int, loss: Tensor, batches: list[Batch]) -> bool:
        bad = (loss - loss).ne(0)  # not finite; two kernels in place of the four of isfinite
        overflow = self._strategy.has_overflow()
        if isinstance(overflow, Tensor):
            bad |= overflow
        ranks = bad.to(torch.int64)
        if summing := self._strategy.group.all_reduce_async(ranks):
            summing.wait()  # the stream waits, the host does not
        self._is_bad.copy_(ranks).clamp_(max=1)
        if self._was_bad():
            return True  # `error` then names the step before
        self._step, self._loss, self._ids = step, loss, [batch.ids for batch in batches]
        self._flag.copy_(self._is_bad, non_blocking=True)
        if self._copied:
            self._copied.record()
        return False

    def skip_bad_update(self, optimizer: torch.optim.Optimizer, *, has_scaler: bool) -> None:
        if has_scaler:  # it skips the update if it finds a NaN in any gradient
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            first = next(parameter.grad for parameter in parameters if parameter.grad is not None)
            first.masked_fill_(self._is_bad > 0, torch.nan)
        elif optimizer.defaults.get("fused"):  # its kernel skips the update where this is 1
            optimizer.found_inf = self._is_bad  # type: ignore[attr-defined]

    def sync(self) -> None:
        with self._timer.charge("communication"):
            if self._was_bad():
                raise self.error()

    def _was_bad(self) -> bool:
        """Return True if the loss of the previous step was bad."""
        if self._copied:
            self._copied.synchronize()  # it has normally completed: no wait
        return bool(self._flag)


def make_loss_guard(strategy: Strategy, timer: StepTimer, start_again: str) -> LossGuard:
    """Return the guard that never makes the host wait for the device."""
    kind = DeviceLossGuard if strategy.group.device.type == "cuda" else LossGuard
    return kind(strategy, timer, start_again)
