"""A fake CUDA device: the real training code runs on it without a GPU, and its waits are seen.

Tensors of the device have a dtype, a shape, strides and a device, and no values (torch's
FakeTensorMode). What the host computes is real. An operation on tensors of two devices fails as on
a GPU. An operation that makes the host wait for the device is recorded with the function that asks
for it. DDP's reducer, pipeline stages and compiled kernels are not Python, and are not covered.

The process must run with the library of `fake_cuda.c` in LD_PRELOAD.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pipeline

_PIPELINE = str(Path(pipeline.__file__).parent)
_WAITING = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)


def _gloo(options: Any, _: object) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)


GLOO_FOR_NCCL = dist.Backend._BackendPlugin(_gloo, True)
"""In place of NCCL, which needs a GPU."""


class FakeCuda(TorchDispatchMode):
    """Runs operations on CUDA tensors without values, and all others for real.

    Entered inside `FakeTensorMode(allow_non_fake_inputs=True)`. readable: the functions, by
    qualified name, in which the host may read a value, and the value that it reads there.
    """

    def __init__(self, readable: dict[str, float]) -> None:
        super().__init__()
        self._waits: list[str] | None = None
        self._readable = readable

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # its operations on local tensors come here
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        target = kwargs.get("device")
        is_moved = target is not None and torch.device(target).type == "cuda"
        if not is_moved and not any(isinstance(tensor, fake_tensor.FakeTensor) for tensor in tensors):
            kwargs.pop("pin_memory", None)
            with fake_tensor.unset_fake_temporarily():
                return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and func.namespace == "aten":
            # in inference mode torch hands over composite operations, such as `to`, whole
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        name = func.overloadpacket.__name__
        if name.startswith("_fused_"):
            _check_layouts(*args[:4])  # weights, gradients, and one or two lists of moments
        if _copies_and_waits(name, args, kwargs):
            self.wait()
        try:
            return func(*args, **kwargs)
        except _WAITING:
            return self.wait()

    @contextmanager
    def watch(self, waits: list[str]) -> Iterator[None]:
        """Append the function of each wait in the context, where only `readable` ones may wait."""
        self._waits, FakeEvent.device = waits, self
        try:
            yield
        finally:
            self._waits = None

    def wait(self) -> float:
        """Record a wait, and return the value that the host reads."""
        name = _caller()
        if self._waits is not None:
            self._waits.append(name)
            if name not in self._readable:
                raise RuntimeError(f"the host would wait for the device in {name}")
        return self._readable.get(name, 0.0)


class FakeEvent:
    """An event that has completed. A host that waits for it is recorded."""

    device: FakeCuda | None = None

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._blocking = blocking

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self.device:
            self.device.wait()
        assert self._blocking, "the host would spin while it waits"

    def elapsed_time(self, end: "FakeEvent") -> float:
        return 1.0


class FakeStream:
    """A stream whose work has completed."""

    def __init__(self, device: Any = None, priority: int = 0) -> None: ...

    def wait_stream(self, stream: "FakeStream") -> None: ...

    def record_event(self) -> FakeEvent:
        return FakeEvent()

    def wait_event(self, event: FakeEvent) -> None: ...


class FakeGraph:
    """A CUDA graph, and the context in which it is recorded: nothing may come from the host."""

    is_recording = False
    replays = 0

    def __enter__(self) -> None:
        FakeGraph.is_recording = True

    def __exit__(self, *error: object) -> None:
        FakeGraph.is_recording = False

    def replay(self) -> None:
        FakeGraph.replays += 1


def install() -> None:
    """Replace what torch.cuda cannot do without a GPU, in this process."""
    torch.autograd.set_multithreading_enabled(False)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    for module in (torch.cuda, torch.cuda.streams):
        module.Event, module.Stream = FakeEvent, FakeStream  # type: ignore[misc, assignment]
    torch.cuda.CUDAGraph = FakeGraph  # type: ignore[misc, assignment]
    torch.cuda.graph = lambda graph, **_: graph  # type: ignore[misc, assignment]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment, misc]
    torch.cuda.current_stream = FakeStream  # type: ignore[assignment]
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.current_device = torch.cuda.max_memory_allocated = lambda *device: 0
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H100"  # type: ignore[assignment]
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]
    for overload in ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adamw_.tensor_lr"):
        torch.library.impl(f"aten::{overload}", "Meta")(lambda *args, **kwargs: None)


def _copies_and_waits(name: str, args: Any, kwargs: Any) -> bool:
    """Return True if an operation copies between host and device, and is not asynchronous."""
    asynchronous = kwargs.get("non_blocking")
    if name == "_to_copy":
        other = torch.device(kwargs.get("device") or args[0].device)
    elif name == "copy_":
        other, asynchronous = args[1].device, asynchronous or (len(args) > 2 and args[2])
    else:
        return False
    is_between = args[0].device.type != other.type
    assert not (is_between and FakeGraph.is_recording), "a graph would hold values of the host"
    return is_between and not asynchronous


def _check_layouts(weights: list[Tensor], *gradients_and_moments: list[Tensor]) -> None:
    """Fail if a fused update would read something in another layout than its weight's."""
    for others in filter(None, gradients_and_moments):
        for weight, other in zip(weights, others, strict=True):
            expected, found = _layout(weight), _layout(other)
            if found != expected:
                raise RuntimeError(f"{found} for a weight of {expected}")


def _layout(tensor: Tensor) -> tuple[object, ...]:
    """Return what a fused kernel compares (torch's ATen/native/ForeachUtils.h)."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.device, tensor.dtype, tuple(tensor.shape), strides


def _caller() -> str:
    """Return the qualified name of the innermost function of the pipeline that is running."""
    frame = sys._getframe(1)
    while frame.f_back and not frame.f_code.co_filename.startswith(_PIPELINE):
        frame = frame.f_back
    return frame.f_code.co_qualname.partition(".<locals>")[0]
