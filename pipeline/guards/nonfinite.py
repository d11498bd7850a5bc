"""The loss guard: nothing of a step whose loss is not finite is kept.

Promise: nothing of a step whose loss is not finite is reported, evaluated or saved, and the run
ends with a line that names the step and the rank. In the same exchange the processes agree on all
else that one of them may know: to stop, bad images, a storage that is out of reach.

On a CPU they agree before the update. On a GPU the host would wait, for the device and for other
hosts. So the device checks the loss: its flag is summed over the processes on its stream, a fused
optimizer skips the update where `found_inf` is 1 (torch made that for its GradScaler), and the
host reads it one step later, as it does the other flags, which travel between the hosts meanwhile
(that exchange also fails at once if a process dies). An optimizer that is not fused (SGD on sharded
weights, LAMB, Muon) makes the update. Nothing leaves the process before `sync` has asked for them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipeline.data.batch import Batch, Defect, format_sample_ids
from pipeline.errors import NotFiniteError
from pipeline.parallel.strategy import Strategy
from pipeline.timing import StepTimer

Agreed = tuple[bool, list[Defect]]  # a process is asked to stop; the bad images of all processes


class LossGuard:
    """Checks each loss on the host, before the update."""

    def __init__(self, strategy: Strategy, timer: StepTimer, start_again: str) -> None:
        """start_again: how to start the run again, for the error."""
        self._strategy, self._timer, self._start_again = strategy, timer, start_again
        self._step, self._loss = 0, torch.zeros(())
        self._batches: list[Batch] = []

    def agree(self, step: int, loss: Tensor, batches: list[Batch], *, is_asked: bool) -> Agreed:
        """Return what the processes agree on after a step's backward passes; on a GPU, the last's.

        is_asked: this process is asked to stop.
        Raises in all processes NotFiniteError if a loss is bad, OutageError if images are missing.
        """
        known = self._keep(step, loss, batches)
        is_bad = not bool(torch.isfinite(loss)) or bool(self._strategy.has_overflow())
        return self._decide(self._strategy.group.any_rank(is_bad, *known, is_asked))

    def skip_bad_update(self, optimizer: torch.optim.Optimizer, *, has_scaler: bool) -> None:
        """Have the device leave the update out if the loss was bad: here the host has checked."""

    def sync(self) -> list[Defect]:
        """Return bad images of the last step that `agree` has not returned. Raises what it does."""
        return []

    def _keep(self, step: int, loss: Tensor, batches: list[Batch]) -> tuple[bool, bool]:
        """Keep what an error names; return True for an outage, and for bad images."""
        self._step, self._loss = step, loss
        # without their images, whose memory would stay in use for a step
        self._batches = [batch._replace(images=batch.ids, mix=batch.ids) for batch in batches]
        return any(batch.outage for batch in batches), any(batch.defects for batch in batches)

    def _decide(self, flags: Sequence[bool]) -> Agreed:
        """Act on the flags of a step, which are the same in all processes."""
        group, batches = self._strategy.group, self._batches
        is_bad, has_outage, has_defects, is_asked = flags
        if has_outage:  # nothing is saved: batch norm has counted images that are none
            group.raise_together(next((batch.outage for batch in batches if batch.outage), None))
        if is_bad:
            raise self._error()
        mine = [defect for batch in batches for defect in batch.defects]
        by_rank = group.all_gather(mine) if has_defects else []
        return is_asked, [defect for of_rank in by_rank for defect in of_rank]

    def _error(self) -> NotFiniteError:
        """Return the error that names the first rank with a bad loss."""
        mine = [sample for batch in self._batches for sample in batch.ids.tolist()]
        bad = None if bool(torch.isfinite(self._loss)) else (float(self._loss), mine)
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
    """Checks each loss on the device; the host reads what is agreed on one step later."""

    def __init__(self, strategy: Strategy, timer: StepTimer, start_again: str) -> None:
        super().__init__(strategy, timer, start_again)
        is_cuda = strategy.group.device.type == "cuda"
        self._is_bad = torch.zeros((), device=strategy.group.device)
        """[] float32: 1 if the loss of this step was bad in any process."""
        # pinned: a copy to other memory would wait for the device
        self._flag = torch.zeros((), pin_memory=is_cuda)
        # blocking: the host sleeps while it waits; without it, it spins, which takes a core per GPU
        self._copied = torch.cuda.Event(blocking=True) if is_cuda else None  # type: ignore[no-untyped-call]
        self._exchange: Callable[[], tuple[bool, ...]] = lambda: (False, False, False)

    def check(self, loss: Tensor) -> None:
        """Have the device find out if a loss is bad, in any process."""
        is_bad = (loss - loss).ne(0)  # not finite; two kernels in place of the four of isfinite
        overflow = self._strategy.has_overflow()
        if isinstance(overflow, Tensor):
            is_bad |= overflow
        ranks = is_bad.to(torch.int64)
        if summing := self._strategy.group.all_reduce_async(ranks):
            summing.wait()  # the stream waits, the host does not
        self._is_bad.copy_(ranks).clamp_(max=1)

    def agree(self, step: int, loss: Tensor, batches: list[Batch], *, is_asked: bool) -> Agreed:
        self.check(loss)
        before = self._decide(self._read())
        self._flag.copy_(self._is_bad, non_blocking=True)
        if self._copied:
            self._copied.record()
        self._exchange = self._strategy.group.ask_ranks(*self._keep(step, loss, batches), is_asked)
        return before

    def skip_bad_update(self, optimizer: torch.optim.Optimizer, *, has_scaler: bool) -> None:
        if has_scaler:  # it skips the update if it finds a NaN in any gradient
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            first = next(parameter.grad for parameter in parameters if parameter.grad is not None)
            first.masked_fill_(self._is_bad > 0, torch.nan)
        elif optimizer.defaults.get("fused"):  # its kernel skips the update where this is 1
            optimizer.found_inf = self._is_bad  # type: ignore[attr-defined]

    def sync(self) -> list[Defect]:
        with self._timer.charge("communication"):
            return self._decide(self._read())[1]

    def _read(self) -> tuple[bool, ...]:
        """Return the flags of the previous step."""
        others = self._exchange()  # it has normally ended, as the copy has
        if self._copied:
            self._copied.synchronize()
        return bool(self._flag), *others


def make_loss_guard(strategy: Strategy, timer: StepTimer, start_again: str) -> LossGuard:
    """Return the guard that never makes the host wait for the device."""
    kind = DeviceLossGuard if strategy.group.device.type == "cuda" else LossGuard
    return kind(strategy, timer, start_again)
