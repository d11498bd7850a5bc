"""Pipeline stages: each process has some of the model's layers, and micro-batches pass through them one after another.

`torch.distributed.pipelining` moves activations and gradients (GPipe: Huang et al., 2019; 1F1B: Narayanan et al.,
"PipeDream", 2019). `stages.count` neighbouring processes hold one copy of the model; with more processes there are several
copies, whose stages average their gradients as DDP does: the older guides' hybrid of model and data parallelism.

To everything else a process looks as under DDP: it loads its own share of the global batch and counts its own images. A
copy's first stage collects the pixels of all its processes, the last one their targets, and tells all of them the logits.
So order, trace, loss and accuracy stay what they are at any strategy, and no image is decoded twice.

- Batch norm sees one micro-batch at a time, and running statistics take one step a micro-batch.
- A checkpoint is the one whole file that DDP writes: the stages of the first copy send rank 0 what they have, so that the
  whole state is in its host memory at a save. At a resumption every process reads it whole and keeps its part.
- Gradients of the copies meet in one sum after the last pass, not while the backward pass runs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from pipeline.config.schema import Config
from pipeline.group import Group
from pipeline.model.architectures import parameter_groups
from pipeline.model.partition import Part, cut, drop
from pipeline.parallel.strategy import Objective, Strategy, Targets, map_tensors
from pipeline.plan import Plan


class Stages(Strategy):
    is_replicated = False
    can_guard = False
    note = (
        "parallel=stages: batch norm sees one micro-batch at a time; rank 0 holds the whole state in host memory while it"
        " is saved, and every process while it is resumed; run.watch compares nothing"
    )

    def __init__(self, model: nn.Module, group: Group, plan: Plan, config: Config) -> None:
        super().__init__(model, group, plan)
        self._count, self._classes, self._eval_batch = plan.stages, plan.num_classes, plan.eval_batch
        self._copies = group.size // plan.stages
        self._copy, self._stage = divmod(group.rank, plan.stages)
        world, limit = range(group.size), timedelta(seconds=config.run.timeout)
        self._line = _join([world[first : first + plan.stages] for first in world[:: plan.stages]], limit)
        self._twins = _join([world[stage :: plan.stages] for stage in range(plan.stages)], limit)
        self._names = list(model.state_dict())
        self._groups = _numbered(model)
        parts = cut(model, config.model.arch, plan.stages, plan.image_size)
        self._links = parts.pop(self._stage)
        for links in parts:
            drop(model, links)
        self._own_groups = _numbered(model)
        self._part = _Under(model, self._links)
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[config.stages.schedule]
        # a pass's loss is divided here, for all passes of a step; torch would divide what earlier ones left as well
        self._schedule = kind(self._at(self._part), plan.micro_batches, self._loss_of, scale_grads=False)
        self._shares = plan.micro_batches * plan.accumulate
        self._objective: Objective | None = None
        self._targets: Targets = ()

    def forward_backward(
        self, micro: int, pixels: Tensor, targets: Targets, objective: Objective
    ) -> tuple[Tensor, Tensor]:
        images = self._collect(pixels, 0)
        self._targets = tuple(self._collect(one, self._count - 1) for one in targets)
        self._objective, self._part.autocast = objective, objective.autocast
        rows = torch.arange(self._count * len(pixels), device=pixels.device)
        mine = self._through(self._schedule, images, len(pixels), rows)
        if micro == self.divisor - 1 and self._copies > 1:
            self._average_gradients()
        with torch.no_grad(), objective.autocast():
            return objective.mean_loss(mine, targets), mine

    def clip(self, limit: float) -> None:
        parameters = [one for one in self.model.parameters() if one.grad is not None]
        square = torch.nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None]).square()
        dist.all_reduce(square, group=self._line)
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, square.sqrt())

    def predictor(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        # each process's batch is a micro-batch, and all are of one size
        schedule = ScheduleGPipe(self._at(Part(model, self._links)), self._count)

        def predict(images: Tensor) -> Tensor:
            padded = images.new_zeros((self._eval_batch, *images.shape[1:]))
            padded[: len(images)] = images
            return self._through(schedule, self._collect(padded, 0), self._eval_batch)[: len(images)]

        return predict

    def replicated_tensors(self) -> dict[str, Tensor]:
        return {}

    def share_buffers(self, model: nn.Module) -> None:
        for buffer in model.buffers():
            dist.broadcast(buffer, group=self._twins, group_src=0)

    def full_state(self, contents: dict[str, Any]) -> dict[str, Any]:
        if self._copy:
            return {key: {} for key in contents}
        part = map_tensors(contents, lambda tensor: tensor.detach().cpu())
        if "optimizer" in part:
            numbers = _renumbering(self._own_groups, self._groups)
            part["optimizer"]["state"] = {numbers[own]: state for own, state in part["optimizer"]["state"].items()}
        parts: list[Any] = [None] * self._count
        dist.gather_object(part, parts if self._stage == 0 else None, group=self._line, group_dst=0)
        if self._stage:
            return {key: {} for key in contents}
        whole: dict[str, Any] = {}
        for key in contents:
            if key == "optimizer":
                state = {number: of_one for each in parts for number, of_one in each[key]["state"].items()}
                whole[key] = {"state": dict(sorted(state.items())), "param_groups": self._regrouped(part, self._groups)}
            else:
                united = {name: tensor for each in parts for name, tensor in (each[key] or {}).items()}
                whole[key] = {name: united[name] for name in self._names} if united else None
        return whole

    def local_state(self, contents: dict[str, Any]) -> dict[str, Any]:
        mine = set(self.model.state_dict())
        own: dict[str, Any] = {}
        for key, whole in contents.items():
            if key == "optimizer":
                numbers = _renumbering(self._groups, self._own_groups)
                state = {numbers[one]: of_one for one, of_one in whole["state"].items() if one in numbers}
                own[key] = {"state": state, "param_groups": self._regrouped(contents, self._own_groups)}
            else:
                own[key] = whole and {name: tensor for name, tensor in whole.items() if name in mine}
        return own

    def _regrouped(self, contents: dict[str, Any], groups: list[dict[str, int]]) -> list[dict[str, Any]]:
        """The optimizer's groups with the parameters that they have in `groups`."""
        settings = contents["optimizer"]["param_groups"]
        return [{**one, "params": list(numbers.values())} for one, numbers in zip(settings, groups, strict=True)]

    def _at(self, part: Part) -> PipelineStage:
        return PipelineStage(part, self._stage, self._count, self.group.device, group=self._line)

    def _through(self, schedule: Any, images: Tensor, share: int, rows: Tensor | None = None) -> Tensor:
        """One pass of a copy; this process's logits, [share, classes] float32. rows: which image a target is of."""
        logits = torch.empty((self._count * share, self._classes), device=self.group.device)
        if self._stage == 0:
            schedule.step(images)
        elif self._stage == self._count - 1:
            logits.copy_(schedule.step(target=rows).detach())
        else:
            schedule.step()
        dist.broadcast(logits, group=self._line, group_src=self._count - 1)
        return logits[self._stage * share : (self._stage + 1) * share]

    def _collect(self, tensor: Tensor, stage: int) -> Tensor:
        """The copy's tensors [B, …] in the order of its processes, [count × B, …], at one stage; empty elsewhere."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self._count)] if stage == self._stage else None
        dist.gather(tensor, parts, group=self._line, group_dst=stage)
        return torch.cat(parts) if parts else tensor[:0]

    def _loss_of(self, logits: Tensor, rows: Tensor) -> Tensor:
        assert self._objective is not None
        with self._objective.autocast():
            loss = self._objective.mean_loss(logits, tuple(one[rows] for one in self._targets))
        return loss / self._shares

    def _average_gradients(self) -> None:
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        together = torch.cat([one.reshape(-1) for one in gradients])
        dist.all_reduce(together, group=self._twins)
        together /= self._copies
        for one, mean in zip(gradients, torch.split(together, [one.numel() for one in gradients]), strict=True):
            one.copy_(mean.view(one.shape))


class _Under(Part):
    """A stage whose forward pass has the precision of training."""

    autocast: Callable[[], AbstractContextManager[None]] = nullcontext

    def forward(self, x: Tensor) -> Tensor:
        with self.autocast():
            return super().forward(x)


def _join(groups: list[range], limit: timedelta) -> dist.ProcessGroup:
    """The one of these groups that this process is in; all processes form them all."""
    mine, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups], limit)
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def _numbered(model: nn.Module) -> list[dict[str, int]]:
    """For each group of the optimizer: name of a parameter -> its number there."""
    names = {id(one): name for name, one in model.named_parameters()}
    groups: list[dict[str, int]] = []
    for group in parameter_groups(model, 0):
        first = sum(map(len, groups))
        groups.append({names[id(one)]: first + at for at, one in enumerate(group["params"])})
    return groups


def _renumbering(before: list[dict[str, int]], after: list[dict[str, int]]) -> dict[int, int]:
    """Number in `before` -> number in `after`, of the parameters that are in both."""
    numbers = {name: number for group in after for name, number in group.items()}
    return {number: numbers[name] for group in before for name, number in group.items() if name in numbers}
