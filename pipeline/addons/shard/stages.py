"""Pipeline stages: each process has some of the layers, and micro-batches pass through them.

`torch.distributed.pipelining` moves activations and gradients (GPipe: Huang et al., 2019; 1F1B:
Narayanan et al., "PipeDream", 2019). `stages.count` neighbouring processes hold one copy of the
model. More processes hold several copies, whose stages average their gradients after the last pass.

To the rest of the program a process looks as under DDP: it loads its own share of the global batch
and counts its own images. The first stage of a copy collects the pixels of all its processes, the
last stage collects their targets, and sends the logits to all of them. So order, trace, loss and
accuracy are those of any other strategy. A checkpoint is the one complete file that DDP writes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from pipeline.addons.shard.partition import StageModule, remove_layers, split_into_stages
from pipeline.config.schema import Config
from pipeline.config.sections import Optimizer
from pipeline.group import Group, flatten, split_like
from pipeline.model.loss import Targets, classification_loss
from pipeline.model.weights import map_tensors, replace_tensors
from pipeline.parallel.strategy import Strategy, autocast
from pipeline.plan import Plan
from pipeline.train.optimizer import parameter_groups


class StagesStrategy(Strategy):
    is_replicated = False

    def __init__(self, config: Config, plan: Plan, model: nn.Module, group: Group) -> None:
        super().__init__(config, plan, model, group)
        self._count, self._classes, self._eval_batch = plan.stages, plan.num_classes, plan.eval_batch
        self._copies = group.size // plan.stages
        self._copy, self._stage = divmod(group.rank, plan.stages)
        # a copy's stages are neighbours; the same stage of all copies averages its gradients
        ranks = torch.arange(group.size).view(self._copies, self._count)
        timeout = group.device_timeout
        self._pp_group: Any = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout)[0]
        self._dp_group: Any = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout)[0]
        state = model.state_dict()
        self._whole_state = replace_tensors(state, dict.fromkeys(state))  # names and versions only
        whole = _optimizer_names(model)
        layers = split_into_stages(model, config.model.arch, plan.stages, plan.image_size)
        self._layers = layers.pop(self._stage)
        for others in layers:
            remove_layers(model, others)
        # a parameter's number in this optimizer -> that in an optimizer of the whole model
        self._numbers = {number: whole.index(name) for number, name in enumerate(_optimizer_names(model))}
        self._autocast = partial(autocast, group.device, config.train.precision)
        stage = StageModule(model, self._layers, self._autocast)
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[config.stages.schedule]
        # the loss is divided here, for all passes of a step; torch would also divide what earlier
        # passes left
        self._schedule = kind(self._pipeline(stage), plan.micro_batches, self._part_loss, scale_grads=False)
        self._loss_parts = plan.micro_batches * plan.accumulate
        self._targets: Targets | None = None

    def forward_backward(self, micro: int, pixels: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        images = self._collect(pixels, 0)
        self._targets = _map_targets(targets, lambda tensor: self._collect(tensor, self._count - 1))
        # torch hands each micro-batch its own rows: the indices of its images
        rows = torch.arange(self._count * len(pixels), device=pixels.device)
        logits = self._run_schedule(self._schedule, images, len(pixels), rows)
        if micro == self._passes - 1 and self._copies > 1:
            self._average_gradients()
        with torch.no_grad(), self._autocast():
            return classification_loss(logits, targets, self._options, self.class_weights), logits

    def clip_gradients(self, max_norm: float) -> None:
        square = torch.nn.utils.get_total_norm(self._gradients()).square()
        dist.all_reduce(square, group=self._pp_group)
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, square.sqrt())

    def make_predictor(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        # each process's batch is one micro-batch, and all have one size
        schedule = ScheduleGPipe(self._pipeline(StageModule(model, self._layers)), self._count)

        def predict(pixels: Tensor) -> Tensor:
            padded = pixels.new_zeros((self._eval_batch, *pixels.shape[1:]))
            padded[: len(pixels)] = pixels
            return self._run_schedule(schedule, self._collect(padded, 0), self._eval_batch)[: len(pixels)]

        return predict

    def broadcast_buffers(self, model: nn.Module) -> None:
        for buffer in model.buffers():
            dist.broadcast(buffer, group=self._dp_group, group_src=0)

    def full_state(self, states: dict[str, Any]) -> dict[str, Any]:
        elsewhere: dict[str, Any] = {key: {} for key in states}
        if self._copy:
            return elsewhere
        part = map_tensors(states, lambda tensor: tensor.detach().cpu())
        if "optimizer" in part:
            part["optimizer"] = _renumber(part["optimizer"], self._numbers)
        parts: list[Any] = [None] * self._count
        dist.gather_object(part, parts if self._stage == 0 else None, group=self._pp_group, group_dst=0)
        if self._stage:
            return elsewhere
        full: dict[str, Any] = {}
        for key in states:
            join = _join_optimizers if key == "optimizer" else self._join_weights
            full[key] = join([part[key] for part in parts])
        return full

    def local_state(self, states: dict[str, Any]) -> dict[str, Any]:
        local: dict[str, Any] = {}
        for key in ("model", "average"):
            full = states[key] or {}
            mine = {name: full[name] for name in self.model.state_dict() if name in full}
            local[key] = states[key] and replace_tensors(full, mine)
        here = {whole: number for number, whole in self._numbers.items()}
        return {**local, "optimizer": _renumber(states["optimizer"], here)}

    def _join_weights(self, parts: list[Any]) -> dict[str, Tensor] | None:
        tensors = {name: tensor for part in parts for name, tensor in (part or {}).items()}
        ordered = {name: tensors[name] for name in self._whole_state} if tensors else None
        return ordered and replace_tensors(self._whole_state, ordered)

    def _pipeline(self, stage: StageModule) -> PipelineStage:
        return PipelineStage(stage, self._stage, self._count, self.group.device, group=self._pp_group)

    def _run_schedule(self, schedule: Any, images: Tensor, share: int, rows: Tensor | None = None) -> Tensor:
        """Run one pass of a copy. Return this process's logits, [share, classes] float32."""
        logits = torch.empty((self._count * share, self._classes), device=self.group.device)
        if self._stage == 0:
            schedule.step(images)
        elif self._stage == self._count - 1:
            logits.copy_(schedule.step(target=rows).detach())
        else:
            schedule.step()
        dist.broadcast(logits, group=self._pp_group, group_src=self._count - 1)
        return logits[self._stage * share : (self._stage + 1) * share]

    def _collect(self, tensor: Tensor, stage: int) -> Tensor:
        """Return a copy's tensors [B, …] as [count × B, …] at one stage; elsewhere [0, …]."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self._count)] if stage == self._stage else None
        dist.gather(tensor, parts, group=self._pp_group, group_dst=stage)
        return torch.cat(parts) if parts else tensor[:0]

    def _part_loss(self, logits: Tensor, rows: Tensor) -> Tensor:
        assert self._targets is not None
        targets = _map_targets(self._targets, lambda tensor: tensor[rows])
        with self._autocast():
            loss = classification_loss(logits, targets, self._options, self.class_weights)
        return loss / self._loss_parts

    def _average_gradients(self) -> None:
        gradients = self._gradients()
        flat = flatten(gradients)
        dist.all_reduce(flat, group=self._dp_group)
        flat /= self._copies
        for gradient, mean in zip(gradients, split_like(flat, gradients), strict=True):
            gradient.copy_(mean)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]


def _map_targets(targets: Targets, change: Callable[[Tensor], Tensor]) -> Targets:
    parts = (targets.labels, targets.partners, targets.own_share, targets.teacher)
    return Targets(*(part if part is None else change(part) for part in parts))  # type: ignore[arg-type]


def _optimizer_names(model: nn.Module) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, Optimizer())
    return [names[id(parameter)] for group in groups for parameter in group["params"]]


def _renumber(optimizer: dict[str, Any], numbers: dict[int, int]) -> dict[str, Any]:
    """Return an optimizer's state with other numbers, without parameters that have none."""
    return {
        "state": {numbers[old]: moments for old, moments in optimizer["state"].items() if old in numbers},
        "param_groups": [
            {**group, "params": [numbers[old] for old in group["params"] if old in numbers]}
            for group in optimizer["param_groups"]
        ],
    }


def _join_optimizers(parts: list[dict[str, Any]]) -> dict[str, Any]:
    moments = {number: moment for part in parts for number, moment in part["state"].items()}
    return {
        "state": dict(sorted(moments.items())),
        "param_groups": [
            {**groups[-1], "params": sorted(number for group in groups for number in group["params"])}
            for groups in zip(*(part["param_groups"] for part in parts), strict=True)
        ],
    }
