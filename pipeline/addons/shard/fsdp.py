"""FSDP2: each process keeps a shard of the weights, and gathers a block only while it runs.

`torch.distributed.fsdp.fully_shard` (Zhao et al., "PyTorch FSDP", 2023; the second version) does
the work: one unit for each block of the model, so that a block's weights are sent while another one
runs, and one unit for the rest. Gradients are summed in torch's own order, which a resumed run
repeats. A checkpoint is the one complete file that DDP writes, and on resume every process reads it
whole and keeps its shard. Running statistics are no weights: each process has its own complete
ones, as under DDP, and rank 0's are saved.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from pipeline.addons.shard.plan import fsdp_slices
from pipeline.config.schema import Config
from pipeline.errors import RequestError
from pipeline.group import Group
from pipeline.model.ema import make_ema
from pipeline.model.weights import map_tensors, replace_tensors
from pipeline.parallel.strategy import Strategy
from pipeline.plan import Plan
from pipeline.train.optimizer import parameter_groups


class FSDPStrategy(Strategy):
    is_replicated = False

    def __init__(self, config: Config, plan: Plan, model: nn.Module, group: Group) -> None:
        super().__init__(config, plan, model, group)
        if config.model.channels_last:
            model.to(memory_format=torch.contiguous_format)  # torch 2.14 shards no other weights
        self._optimizer = config.optimizer
        # torch cannot copy a sharded model
        self._ema = make_ema(model) if config.train.ema is not None else None
        mesh = self._mesh = _make_mesh(config, plan, group)
        for module in (*blocks(model), model):
            fully_shard(module, mesh=mesh)
        if self._ema is not None:
            for module in (*blocks(self._ema), self._ema):
                # no backward pass follows, for which torch keeps the weights of the root whole
                fully_shard(module, mesh=mesh, reshard_after_forward=True)

    @contextmanager
    def gradient_sync(self, micro: int) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(micro == self._passes - 1)
        yield

    def clip_gradients(self, max_norm: float) -> None:
        # torch's own way takes the root of a DTensor's norm by x ** 0.5, which depends on the CPU
        gradients = [p.grad.to_local() for p in self.model.parameters() if isinstance(p.grad, DTensor)]
        square = torch.nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(square, group=self._mesh.get_group(self._mesh.ndim - 1))
        norm = DTensor.from_local(square.sqrt(), self._mesh)
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), max_norm, norm)

    def make_ema(self) -> nn.Module:
        assert self._ema is not None
        return self._ema

    def make_predictor(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        def predict(pixels: Tensor) -> Tensor:
            if not len(pixels):  # a blank image, to take part in each block
                return predict(pixels.new_zeros((1, *pixels.shape[1:])))[:0]
            # if the very first forward pass ran in inference mode, FSDP2's unsharded weights would
            # be inference tensors, which no backward pass can use (torch 2.14)
            with torch.inference_mode(False), torch.no_grad():
                logits: Tensor = model(pixels)
            return logits

        return predict

    def full_state(self, states: dict[str, Any]) -> dict[str, Any]:
        def gather(tensor: Tensor) -> Tensor | None:
            if isinstance(tensor, DTensor):  # a collective: all gather, whichever keeps the result
                tensor = tensor.full_tensor()
            return tensor.detach().cpu() if self.group.is_main else None

        full: dict[str, Any] = map_tensors(states, gather)
        return full if self.group.is_main else {key: {} for key in states}

    def local_state(self, states: dict[str, Any]) -> dict[str, Any]:
        weights = self.model.state_dict()
        groups = parameter_groups(self.model, self._optimizer)
        parameters = [parameter for group in groups for parameter in group["params"]]
        moments = {
            number: {name: _shard(value, parameters[number]) for name, value in saved.items()}
            for number, saved in states["optimizer"]["state"].items()
        }
        local: dict[str, Any] = {"optimizer": {**states["optimizer"], "state": moments}}
        for key in ("model", "average"):
            shards = {name: _shard(full, weights[name]) for name, full in (states[key] or {}).items()}
            local[key] = states[key] and replace_tensors(states[key], shards)
        return local


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model: the members with weights of its outermost `nn.Sequential`s."""
    for child in module.children():
        is_member = type(module) is nn.Sequential and type(child) is not nn.Sequential
        if is_member and any(True for _ in child.parameters()):
            yield child
        else:
            yield from blocks(child)


def check_can_shard(model: nn.Module) -> None:
    """Raise RequestError if the model has a parameter that is a single number (torch 2.14)."""
    scalar = next((name for name, param in model.named_parameters() if param.ndim == 0), None)
    if scalar:
        problem = f"parallel=fsdp cannot cut {scalar}, a parameter without dimensions"
        raise RequestError(problem, "use parallel=ddp, or another model.arch")


def _make_mesh(config: Config, plan: Plan, group: Group) -> DeviceMesh:
    """Return the mesh of processes: with several copies of the weights a row for each copy.

    Raises RequestError in all processes if fsdp.shard=node, and the processes of a row are not
    those of one machine.
    """
    if config.fsdp.shard == "all":
        return init_device_mesh(group.device.type, (group.size,))
    slices, hosts = fsdp_slices(config, plan), group.hosts
    rows = [hosts[first : first + slices] for first in range(0, group.size, slices)]
    is_even = len(set(group.all_gather(slices))) == 1 and group.size % slices == 0
    is_unset = slices == 1 and len(set(hosts)) < len(hosts)  # LOCAL_WORLD_SIZE
    if not is_even or is_unset or any(len(set(row)) > 1 for row in rows):
        needed = "machines with the same number of processes each, consecutive ranks and LOCAL_WORLD_SIZE"
        problem = f"fsdp.shard=node needs {needed}, not ranks on {', '.join(hosts[:16])}"
        raise RequestError(problem, "start with torchrun, or use fsdp.shard=all").collective()
    ranks = torch.arange(group.size).view(-1, slices)
    # not init_device_mesh: its subgroups would have torch's timeout
    subgroups: list[Any] = [
        dist.new_subgroups_by_enumeration(part.tolist(), group.device_timeout)[0] for part in (ranks.T, ranks)
    ]
    return DeviceMesh.from_group(subgroups, group.device.type, ranks, mesh_dim_names=("replicate", "shard"))


def _shard(full: Any, like: Tensor) -> Any:
    """Return this process's shard of `full`, sharded as `like`; anything else as it is."""
    if not (isinstance(full, Tensor) and isinstance(like, DTensor) and full.shape == like.shape):
        return full
    return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
