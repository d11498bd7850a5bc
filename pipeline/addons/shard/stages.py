"""Pipeline stages: each process has some of the layers, and micro-batches pass through them.

`torch.distributed.pipelining` moves activations and gradients (GPipe: Huang et al., 2019; 1F1B:
Narayanan et al., "PipeDream", 2019). `stages.count` neighbouring processes hold one copy of the
model. More processes hold several copies, whose stages average their gradients as DDP does: the
hybrid of model and data parallelism in the older guides.

To the rest of the program a process looks as under DDP: it loads its own share of the global batch
and counts its own images. The first stage of a copy collects the pixels of all its processes, the
last stage collects their targets, and sends the logits to all of them. So order, trace, loss and
accuracy are those of any other strategy, and no image is decoded twice.

- Batch norm sees one micro-batch at a time, and running statistics are updated once per
  micro-batch.
- A checkpoint is the one complete file that DDP writes: the stages of the first copy send rank 0
  their parts, so rank 0 has the whole state in host memory during a save. On resume every process
  reads it whole and keeps its part.
- The gradients of the copies are averaged after the last pass, not during the backward pass.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from pipeline.addons.shard.partition import StageModule, remove_layers, split_into_stages
from pipeline.config.schema import Config
from pipeline.group import Group, flatten, split_like
from pipeline.model.loss import Targets, classification_loss
from pipeline.model.weights import map_tensors, replace_tensors
from pipeline.parallel.strategy import Strategy, autocast
from pipeline.plan import Plan
from pipeline.train.optimizer import parameter_groups


class StagesStrategy(Strategy):
    is_replicated = False
    notice = (
        "parallel=stages: batch norm sees one micro-batch at a time; rank 0 holds the whole state in host memory during"
        " a save, and every process on resume; run.watch compares nothing"
    )

    def __init__(self, config: Config, plan: Plan, model: nn.Module, group: Group) -> None:
        super().__init__(config, plan, model, group)
        self._count, self._classes, self._eval_batch = plan.stages, plan.num_classes, plan.eval_batch
        self._copies = group.size // plan.stages
        self._copy, self._stage = divmod(group.rank, plan.stages)
        ranks, timeout = range(group.size), group.device_timeout
        # a copy's stages are neighbours; the same stage of all copies averages its gradients
        self._pp_group = _join_one_of([ranks[first : first + plan.stages] for first in ranks[:: plan.stages]], timeout)
        self._dp_group = _join_one_of([ranks[stage :: plan.stages] for stage in range(plan.stages)], timeout)
        state = model.state_dict()
        self._whole_state = replace_tensors(state, dict.fromkeys(state))  # names and versions only
        self._names = _optimizer_names(model)
        parts = split_into_stages(model, config.model.arch, plan.stages, plan.image_size)
        self._links = parts.pop(self._stage)
        for links in parts:
            remove_layers(model, links)
        self._local_names = _optimizer_names(model)
        self._autocast = partial(autocast, group.device, config.train.precision)
        part = StageModule(model, self._links)
        part.autocast = self._autocast
        schedule = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[config.stages.schedule]
        # the loss is divided here, for all passes of a step; torch would also divide what earlier
        # passes left
        self._schedule = schedule(self._pipeline(part), plan.micro_batches, self._micro_batch_loss, scale_grads=False)
        self._loss_parts = plan.micro_batches * plan.accumulate
        self._targets: Targets | None = None
        self._computed: Callable[[], None] | None = None

    def forward_backward(self, micro: int, pixels: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        images = self._collect(pixels, 0)
        self._targets = _map_targets(targets, lambda tensor: self._collect(tensor, self._count - 1))
        rows = torch.arange(self._count * len(pixels), device=pixels.device)
        logits = self._run_schedule(self._schedule, images, len(pixels), rows)
        if micro == self._passes - 1 and self._copies > 1:
            self._average_gradients()
        with torch.no_grad(), self._autocast():
            return classification_loss(logits, targets, self._options), logits

    def on_gradients_computed(self, callback: Callable[[], None]) -> None:
        self._computed = callback

    def clip_gradients(self, max_norm: float) -> None:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        square = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square, group=self._pp_group)
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, square.sqrt())

    def make_predictor(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        # each process's batch is one micro-batch, and all have one size
        schedule = ScheduleGPipe(self._pipeline(StageModule(model, self._links)), self._count)

        def predict(pixels: Tensor) -> Tensor:
            padded = pixels.new_zeros((self._eval_batch, *pixels.shape[1:]))
            padded[: len(pixels)] = pixels
            return self._run_schedule(schedule, self._collect(padded, 0), self._eval_batch)[: len(pixels)]

        return predict

    def broadcast_buffers(self, model: nn.Module) -> None:
        for buffer in model.buffers():
            dist.broadcast(buffer, group=self._dp_group, group_src=0)

    def full_state(self, states: dict[str, Any]) -> dict[str, Any]:
        if self._copy:
            return {key: {} for key in states}
        part = map_tensors(states, lambda tensor: tensor.detach().cpu())
        if "optimizer" in part:
            part["optimizer"]["state"] = _by_name(part["optimizer"]["state"], self._local_names)
        parts: list[Any] = [None] * self._count
        dist.gather_object(part, parts if self._stage == 0 else None, group=self._pp_group, group_dst=0)
        if self._stage:
            return {key: {} for key in states}
        full: dict[str, Any] = {}
        for key in states:
            if key == "optimizer":
                moments = {name: value for part in parts for name, value in part[key]["state"].items()}
                full[key] = _optimizer_state(moments, part[key]["param_groups"], self._names)
            else:
                tensors = {name: tensor for part in parts for name, tensor in (part[key] or {}).items()}
                whole = {name: tensors[name] for name in self._whole_state} if tensors else None
                full[key] = whole and replace_tensors(self._whole_state, whole)
        return full

    def local_state(self, states: dict[str, Any]) -> dict[str, Any]:
        names = set(self.model.state_dict())
        local: dict[str, Any] = {}
        for key, full in states.items():
            if key == "optimizer":
                moments = _by_name(full["state"], self._names)
                local[key] = _optimizer_state(moments, full["param_groups"], self._local_names)
            else:
                part = {name: tensor for name, tensor in (full or {}).items() if name in names}
                local[key] = full and replace_tensors(full, part)
        return local

    def _pipeline(self, part: StageModule) -> PipelineStage:
        return PipelineStage(part, self._stage, self._count, self.group.device, group=self._pp_group)

    def _run_schedule(self, schedule: Any, images: Tensor, share: int, rows: Tensor | None = None) -> Tensor:
        """Run one pass of a copy. Return this process's logits, [share, classes] float32.

        rows: of a training pass, [count × share] int64, the indices of the images; torch hands each
        micro-batch its own.
        """
        logits = torch.empty((self._count * share, self._classes), device=self.group.device)
        if self._stage == 0:
            schedule.step(images)
        elif self._stage == self._count - 1:
            logits.copy_(schedule.step(target=rows).detach())
        else:
            schedule.step()
        if self._computed and rows is not None:
            self._computed()
        dist.broadcast(logits, group=self._pp_group, group_src=self._count - 1)
        return logits[self._stage * share : (self._stage + 1) * share]

    def _collect(self, tensor: Tensor, stage: int) -> Tensor:
        """Return a copy's tensors [B, …] as [count × B, …] at one stage; elsewhere [0, …]."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self._count)] if stage == self._stage else None
        dist.gather(tensor, parts, group=self._pp_group, group_dst=stage)
        return torch.cat(parts) if parts else tensor[:0]

    def _micro_batch_loss(self, logits: Tensor, rows: Tensor) -> Tensor:
        assert self._targets is not None
        targets = _map_targets(self._targets, lambda tensor: tensor[rows])
        with self._autocast():
            return classification_loss(logits, targets, self._options) / self._loss_parts

    def _average_gradients(self) -> None:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        flat = flatten(gradients)
        dist.all_reduce(flat, group=self._dp_group)
        flat /= self._copies
        for gradient, mean in zip(gradients, split_like(flat, gradients), strict=True):
            gradient.copy_(mean)


def _join_one_of(groups: list[range], timeout: timedelta | None) -> dist.ProcessGroup:
    """Return the group that this process is in, of those that all processes create together."""
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in groups], timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _map_targets(targets: Targets, change: Callable[[Tensor], Tensor]) -> Targets:
    partners, own_share = targets.partners, targets.own_share
    return Targets(
        change(targets.labels),
        None if partners is None else change(partners),
        None if own_share is None else change(own_share),
    )


def _optimizer_names(model: nn.Module) -> list[list[str]]:
    """Return the parameter names of each optimizer group, in the order of torch's numbers."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in parameter_groups(model, 0)]


def _by_name(moments: dict[int, Any], names: list[list[str]]) -> dict[str, Any]:
    """Return an optimizer's numbered moments by the names of their parameters."""
    flat = [name for group in names for name in group]
    return {flat[number]: moment for number, moment in moments.items()}


def _optimizer_state(moments: dict[str, Any], settings: list[dict[str, Any]], names: list[list[str]]) -> dict[str, Any]:
    """Return the state dict of an optimizer over the parameters `names`.

    settings: its `param_groups`.
    """
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    return {
        "state": {number: moments[name] for name, number in numbers.items() if name in moments},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group_names]}
            for group, group_names in zip(settings, names, strict=True)
        ],
    }
