"""FSDP2: each process keeps a shard of the weights, and gathers a block only while it runs.

`torch.distributed.fsdp.fully_shard` (Zhao et al., "PyTorch FSDP", 2023; the second version) does
the work: one unit for each block of the model, so that a block's weights are sent while another one
runs, and one unit for the rest. Gradients are summed in torch's own order, which a resumed run
repeats: no warm-up pass is needed.

- A checkpoint is the one complete file that DDP writes: all processes gather each tensor in turn,
  and rank 0 keeps it, so rank 0 has the whole state in host memory during a save. On resume every
  process reads it whole and keeps its shard.
- Running statistics are no weights: each process has its own complete ones, as under DDP, and rank
  0's are saved.
- With several passes a step, gradients stay unsharded until the last pass: `batch.accumulate` costs
  their memory.
- Validation runs on shards too, so a process that has no batch left passes a blank image to take
  part in each block.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from pipeline.config.schema import Config
from pipeline.group import Group
from pipeline.model.architectures import parameter_groups
from pipeline.model.ema import make_ema
from pipeline.parallel.strategy import Strategy, map_tensors
from pipeline.plan import Plan


class FSDPStrategy(Strategy):
    is_replicated = False
    can_skip_update = False
    notice = (
        "parallel=fsdp: rank 0 holds the whole state in host memory during a save, and every process on resume; the"
        " processes share no weights that run.watch could compare"
    )

    def __init__(self, config: Config, plan: Plan, model: nn.Module, group: Group) -> None:
        super().__init__(config, plan, model, group)
        if config.model.channels_last:
            model.to(memory_format=torch.contiguous_format)  # torch 2.14 shards no other weights
            self.notice += "; model.channels_last applies to images and activations only"
        # torch cannot copy a sharded model
        self._ema = make_ema(model) if config.train.ema is not None else None
        mesh = init_device_mesh(group.device.type, (group.size,))
        for root in (model, self._ema) if self._ema is not None else (model,):
            for block in blocks(root):
                fully_shard(block, mesh=mesh)
            fully_shard(root, mesh=mesh)

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

    def replicated_tensors(self) -> dict[str, Tensor]:
        return {}

    def full_state(self, states: dict[str, Any]) -> dict[str, Any]:
        def gather(tensor: Tensor) -> Tensor | None:
            if isinstance(tensor, DTensor):
                tensor = tensor.full_tensor()  # a collective: all processes gather, whichever keeps the result
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
            local[key] = states[key] and {name: _shard(full, weights[name]) for name, full in states[key].items()}
        return local


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the FSDP units of a model: the members of its outermost `nn.Sequential`s."""
    for child in model.children():
        if type(child) is nn.Sequential:
            for member in child:
                if type(member) is nn.Sequential:
                    yield from blocks(nn.Sequential(member))
                elif any(True for _ in member.parameters()):
                    yield member
        else:
            yield from blocks(child)


def _shard(full: Any, like: Tensor) -> Any:
    """Return this process's shard of `full`, sharded as `like`; anything else as it is."""
    if not (isinstance(full, Tensor) and isinstance(like, DTensor) and full.shape == like.shape):
        return full
    return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
