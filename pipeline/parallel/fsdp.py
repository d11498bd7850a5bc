"""FSDP2: each process keeps a slice of every weight, gradient and moment, and has a block whole only while it computes it.

`torch.distributed.fsdp.fully_shard` (Zhao et al., "PyTorch FSDP", 2023; the second version) does the work: a unit for each
block of the model, so that one block's weights travel while another computes, and one for the rest. Gradients meet as sums
of slices, in torch's own order, which a resumption repeats: no warm-up pass is needed.

- A checkpoint is the one whole file that DDP writes: each tensor in turn is put together at every process, and kept by
  rank 0, in whose host memory the whole state is at a save. At a resumption every process reads it whole and keeps a slice.
- Running statistics are no weights: each process has its own whole ones, as under DDP, and rank 0's are saved.
- Over several passes a step, gradients are whole until the last, which slices them: `batch.accumulate` costs their memory.
- Validation runs on slices too, so a process that has no batch left passes a blank picture, for its part of each block.
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


class FullyShard(Strategy):
    is_replicated = False
    can_guard = False
    note = (
        "parallel=fsdp: rank 0 holds the whole state in host memory while it is saved, and every process while it is"
        " resumed; the processes have no weights in common that run.watch could compare"
    )

    def __init__(self, model: nn.Module, group: Group, plan: Plan, config: Config) -> None:
        super().__init__(model, group, plan)
        if config.model.channels_last:
            model.to(memory_format=torch.contiguous_format)  # torch slices no other weights (2.14)
            self.note += "; model.channels_last orders images and activations alone"
        # torch copies no sliced model
        self._average = make_ema(model) if config.train.ema is not None else None
        mesh = init_device_mesh(group.device.type, (group.size,))
        for each in (model, self._average) if self._average else (model,):
            for block in blocks(each):
                fully_shard(block, mesh=mesh)
            fully_shard(each, mesh=mesh)

    @contextmanager
    def accumulating(self, micro: int) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(micro == self.divisor - 1)
        yield

    def make_ema(self) -> nn.Module:
        assert self._average is not None
        return self._average

    def predictor(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        def predict(images: Tensor) -> Tensor:
            if not len(images):
                return predict(images.new_zeros((1, *images.shape[1:])))[:0]
            # in inference mode, the first forward pass of all would make FSDP2's whole weights inference tensors, which
            # no backward pass can use (torch 2.14)
            with torch.inference_mode(False), torch.no_grad():
                logits: Tensor = model(images)
            return logits

        return predict

    def replicated_tensors(self) -> dict[str, Tensor]:
        return {}

    def share_buffers(self, model: nn.Module) -> None:
        self.group.broadcast(list(model.buffers()))

    def full_state(self, contents: dict[str, Any]) -> dict[str, Any]:
        def gathered(tensor: Tensor) -> Tensor | None:
            if isinstance(tensor, DTensor):
                tensor = tensor.full_tensor()  # by all processes, whoever keeps it
            return tensor.detach().cpu() if self.group.is_main else None

        whole: dict[str, Any] = map_tensors(contents, gathered)
        return whole if self.group.is_main else {key: {} for key in contents}

    def local_state(self, contents: dict[str, Any]) -> dict[str, Any]:
        weights = self.model.state_dict()
        parameters = [one for part in parameter_groups(self.model, 0) for one in part["params"]]
        moments = {
            number: {name: _like(one, parameters[number]) for name, one in of_one.items()}
            for number, of_one in contents["optimizer"]["state"].items()
        }
        own: dict[str, Any] = {"optimizer": {**contents["optimizer"], "state": moments}}
        for key in ("model", "average"):
            own[key] = contents[key] and {name: _like(one, weights[name]) for name, one in contents[key].items()}
        return own


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Where a model is taken apart: the members of its outermost `nn.Sequential`s, which are called whole, one by one."""
    for child in model.children():
        if type(child) is nn.Sequential:
            for member in child:
                if type(member) is nn.Sequential:
                    yield from blocks(nn.Sequential(member))
                elif any(True for _ in member.parameters()):
                    yield member
        else:
            yield from blocks(child)


def _like(whole: Any, slice_of: Tensor) -> Any:
    """This process's slice of a tensor that is shaped as a sliced weight is; anything else as it is."""
    if not (isinstance(whole, Tensor) and isinstance(slice_of, DTensor) and whole.shape == slice_of.shape):
        return whole
    return distribute_tensor(whole.to(slice_of.device), slice_of.device_mesh, slice_of.placements, src_data_rank=None)
