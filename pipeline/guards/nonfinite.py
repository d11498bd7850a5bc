"""Whether the loss of each step is finite, which all processes must know before it reaches the weights.

Promise: a loss that is not finite updates no weights at any process, and the run ends naming the step and the rank. On a
CPU the loss is looked at before the update, and the processes agree on it with all else that they agree on. To look at it
on a GPU is to wait for the device, so there the device keeps the promise: the flag is summed over the processes on its
stream, a fused optimizer leaves the weights alone where `found_inf` is 1 (which torch made for its GradScaler), and the
host reads the flag a step later, at no wait. Nothing is reported, judged or saved before `settle` has asked about the last
step, so nobody ever sees what came of it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.data.batch import Batch, format_sample_ids
from pipeline.errors import NotFiniteError
from pipeline.parallel import Strategy


@dataclass
class _Step:
    """What an account of a failure needs."""

    number: int
    loss: Tensor
    used: list[Batch]


class Losses:
    """Looked at in their own step, before the update."""

    guard: Tensor | None = None
    """[] float32 on the device: 1 where this step must not update anything. None: then there is no update at all."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._last: _Step | None = None

    def look(self, number: int, loss: Tensor, used: list[Batch]) -> bool:
        """After the passes of step `number`: whether what is known by now of this process's losses is bad."""
        self._last = _Step(number, loss, used)
        return not bool(torch.isfinite(loss)) or self._strategy.out_of_range()

    def settle(self) -> None:
        """NotFiniteError, at all processes, if the last step's loss was bad and nobody has said so yet."""

    def failure(self) -> NotFiniteError:
        """Who saw it: the first rank, its loss and its samples. Called by all processes."""
        last, group = self._last, self._strategy.group
        assert last is not None
        mine = None
        if not bool(torch.isfinite(last.loss)):
            mine = float(last.loss), [sample for batch in last.used for sample in batch.ids.tolist()]
        seen_by = {rank: seen for rank, seen in enumerate(group.all_gather(mine)) if seen}
        if not seen_by:
            return NotFiniteError(
                f"a gradient at step {last.number} is not finite, or larger than exact mode can sum: nothing was"
                " updated; lower optimizer.lr, lengthen schedule.warmup, or lower exact.fraction_bits, and start again with"
                " run.resume=never"
            )
        rank, (value, ids) = min(seen_by.items())
        return NotFiniteError(
            f"the loss is {value} at step {last.number} on rank {rank} ({format_sample_ids(ids)}): nothing was updated; lower"
            " optimizer.lr, lengthen schedule.warmup or set train.clip, and start again with run.resume=never"
        )


class GuardedLosses(Losses):
    """Looked at by the device in their own step, and by the host in the next."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        device = strategy.group.device
        self._is_cuda = device.type == "cuda"
        self.guard = torch.zeros((), device=device)
        self._seen = torch.zeros((), pin_memory=self._is_cuda)  # else its copy would wait for the device
        self._arrived = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]

    def look(self, number: int, loss: Tensor, used: list[Batch]) -> bool:
        assert self.guard is not None
        bad = (~torch.isfinite(loss)).to(torch.int64)
        self._strategy.group.all_reduce_async(bad).wait()  # the stream waits, the host does not
        self.guard.copy_(bad.clamp_(max=1))
        if self._is_bad():
            return True  # it is the step before that is then told of
        self._last = _Step(number, loss, used)
        self._seen.copy_(self.guard, non_blocking=True)
        if self._arrived:
            self._arrived.record()
        return False

    def settle(self) -> None:
        if self._is_bad():
            raise self.failure()

    def _is_bad(self) -> bool:
        """Of the step before: when that was is long ago for the device, which has had another since."""
        if self._arrived:
            self._arrived.synchronize()
        return bool(self._seen)


def watch_losses(strategy: Strategy) -> Losses:
    """By the device where looking would wait for it and the strategy's sums need no look of their own."""
    return GuardedLosses(strategy) if strategy.can_guard and strategy.group.device.type == "cuda" else Losses(strategy)
