"""FSDP2: each process keeps a shard of the weights, and gathers a block only while it runs.

`torch.distributed.fsdp.fully_shard` (Zhao et al., "PyTorch FSDP", 2023; the second version) does
the work: one unit for each block of the model, so that a block's weights are sent while another one
runs, and one unit for the rest. Gradients are summed in torch's own order, which a resumed run
repeats: no warm-up pass is needed.

- A checkpoint is the one complete file that DDP writes: all processes gather each tensor in turn,
  and rank 0 keeps it. On resume every process reads it whole and keeps its shard.
- Running statistics are no weights: each process has its own complete ones, as under DDP, and rank
  0's are saved.
- With several passes a step, gradients stay unsharded until the last pass: `batch.accumulate` costs
  their memory.
- Validation runs on shards too, so a process that has no batch left passes a blank image to take
  part in each block.
- With train.precision=bf16, weights that autocast would cast anyway are cast before they are
  gathered: half the bytes and the same bits. Norms and other weights that autocast leaves in fp32
  are gathered in fp32, and gradients are summed in fp32: a sum over many processes in bf16 would
  lose what one of them adds.
- fsdp.shard=node divides weights among the processes of a machine, and each machine has a copy:
  only gradients leave a machine.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from pipeline.addons.shard.plan import fsdp_slices
from pipeline.addons.shard.sharded import ShardedStrategy, join_one_of
from pipeline.config.schema import Config
from pipeline.errors import RequestError
from pipeline.group import Group
from pipeline.model.ema import make_ema
from pipeline.model.weights import map_tensors, replace_tensors
from pipeline.plan import Plan
from pipeline.train.optimizer import parameter_groups

_CAST_BY_AUTOCAST = {
    kind.forward for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
}
"""Forward functions that use weights only as autocast casts them, to bf16."""


class FSDPStrategy(ShardedStrategy):
    notice = f"parallel=fsdp: {ShardedStrategy.notice}"

    def __init__(self, config: Config, plan: Plan, model: nn.Module, group: Group) -> None:
        super().__init__(config, plan, model, group)
        if config.model.channels_last:
            model.to(memory_format=torch.contiguous_format)  # torch 2.14 shards no other weights
            self.notice += "; model.channels_last applies to images and activations only"
        # torch cannot copy a sharded model
        self._ema = make_ema(model) if config.train.ema is not None else None
        mesh = _make_mesh(config, plan, group)
        for root in (model, self._ema) if self._ema is not None else (model,):
            _shard_model(root, mesh, is_bf16=config.train.precision == "bf16")

    @contextmanager
    def gradient_sync(self, micro: int) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(micro == self._passes - 1)
        yield

    def on_gradients_computed(self, callback: Callable[[], None]) -> None:
        # FSDP2 accumulates no gradient into a sharded parameter, so its hooks never run. The
        # gradient of the first layer's output comes next to last: of this process's work only that
        # layer's own weights are left.
        layers = (module for module in self.model.modules() if not any(True for _ in module.children()))
        first = next(layer for layer in layers if any(weight.requires_grad for weight in layer.parameters()))

        def watch(module: nn.Module, inputs: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: callback())  # type: ignore[no-untyped-call]

        first.register_forward_hook(watch)

    def make_ema(self) -> nn.Module:
        assert self._ema is not None
        return self._ema

    def make_predictor(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        def predict(pixels: Tensor) -> Tensor:
            if not len(pixels):
                return predict(pixels.new_zeros((1, *pixels.shape[1:])))[:0]
            # if the very first forward pass ran in inference mode, FSDP2's unsharded weights would
            # be inference tensors, which no backward pass can use (torch 2.14)
            with torch.inference_mode(False), torch.no_grad():
                logits: Tensor = model(pixels)
            return logits

        return predict

    def broadcast_buffers(self, model: nn.Module) -> None:
        self.group.broadcast(list(model.buffers()))

    def full_state(self, states: dict[str, Any]) -> dict[str, Any]:
        def gather(tensor: Tensor) -> Tensor | None:
            if isinstance(tensor, DTensor):
                tensor = (
                    tensor.full_tensor()
                )  # a collective: all processes gather, whichever keeps the result
            return tensor.detach().cpu() if self.group.is_main else None

        full: dict[str, Any] = map_tensors(states, gather)
        return full if self.group.is_main else {key: {} for key in states}

    def local_state(self, states: dict[str, Any]) -> dict[str, Any]:
        weights = self.model.state_dict()
        parameters = [parameter for group in parameter_groups(self.model, 0) for parameter in group["params"]]
        moments = {
            number: {name: _shard(value, parameters[number]) for name, value in moments_of_one.items()}
            for number, moments_of_one in states["optimizer"]["state"].items()
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


def _make_mesh(config: Config, plan: Plan, group: Group) -> DeviceMesh:
    """Return the mesh of processes: with several copies of the weights a row for each copy.

    Raises RequestError in all processes if fsdp.shard=node, and the processes of a row are not
    those of one machine.
    """
    if config.fsdp.shard == "all":
        return init_device_mesh(group.device.type, (group.size,))
    slices, hosts = fsdp_slices(config, plan), group.hosts
    rows = [hosts[first : first + slices] for first in range(0, group.size, slices)]
    is_unset = slices == 1 and len(set(hosts)) < len(hosts)  # LOCAL_WORLD_SIZE
    if len(set(group.all_gather(slices))) > 1 or is_unset or any(len(set(row)) > 1 for row in rows):
        raise RequestError(
            "fsdp.shard=node needs machines with the same number of processes each, consecutive ranks and"
            f" LOCAL_WORLD_SIZE, not ranks on {', '.join(hosts[:16])}",
            "start with torchrun, or use fsdp.shard=all",
        ).collective()
    ranks = torch.arange(group.size).view(-1, slices)
    subgroups = [join_one_of(part.tolist(), group) for part in (ranks.T, ranks)]
    return DeviceMesh.from_group(subgroups, group.device.type, ranks, mesh_dim_names=("replicate", "shard"))


def _shard_model(model: nn.Module, mesh: DeviceMesh, *, is_bf16: bool) -> None:
    """Cut the weights of each unit, and then the rest, into slices."""
    for modules, dtype in units(model, is_bf16=is_bf16):
        # FSDP casts no inputs: autocast does. With fp32 the policy changes nothing.
        policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(modules, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)


def units(model: nn.Module, *, is_bf16: bool) -> list[tuple[list[nn.Module], torch.dtype]]:
    """Return the modules of each FSDP unit but the last, the rest, and the dtype that it gathers.

    A unit gathers weights of one dtype. So with bf16 the norms of all blocks are a unit in fp32. A
    block that has other weights which autocast leaves in fp32, as ConvNeXt's, stays in fp32 whole.
    """
    norms: list[nn.Module] = []
    found: list[tuple[list[nn.Module], torch.dtype]] = []
    for block in blocks(model):
        kept = _fp32_modules(block)
        if not is_bf16 or any(param.ndim >= 2 for module in kept for param in module.parameters()):
            found.append(([block], torch.float32))
            continue
        norms += kept
        if block not in kept:  # otherwise the block itself is a norm
            found.append(([block], torch.bfloat16))
    return [(norms, torch.float32), *found] if norms else found


def check_can_shard(model: nn.Module) -> None:
    """Raise RequestError if the model has a parameter that is a single number (torch 2.14)."""
    scalars = [name for name, param in model.named_parameters() if param.ndim == 0]
    if scalars:
        raise RequestError(
            f"parallel=fsdp cannot cut {scalars[0]}, a parameter without dimensions (the model has {len(scalars)})",
            "use parallel=ddp, or another model.arch",
        )


def _fp32_modules(block: nn.Module) -> list[nn.Module]:
    """Return the modules with weights of their own that autocast does not cast, such as norms."""
    return [
        module
        for module in block.modules()
        if any(True for _ in module.parameters(recurse=False))
        and type(module).forward not in _CAST_BY_AUTOCAST
    ]


def _shard(full: Any, like: Tensor) -> Any:
    """Return this process's shard of `full`, sharded as `like`; anything else as it is."""
    if not (isinstance(full, Tensor) and isinstance(like, DTensor) and full.shape == like.shape):
        return full
    return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
