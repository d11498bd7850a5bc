"""An update that is recorded once and replayed, on a CPU: a recorder stands for the CUDA graph.

Like one, it repeats operations on the tensors that they had, and runs nothing while it records. So
what a recording would freeze (a learning rate, a seed, a batch) shows in the weights.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from streams import make_trainer
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.addons.models import graph_step
from pipeline.data.loader import TrainBatches
from pipeline.errors import NotFiniteError, RequestError
from pipeline.guards.nonfinite import DeviceLossGuard
from pipeline.train import loop
from pipeline.train.loop import Trainer

WORDS = ("model.arch=mobilenet_v3_small", "batch.global=24", "train.ema=0.9", "augment.mixup=0.2",
         "train.class_weights=balanced", "track.every=9 steps", "run.trace=false")  # fmt: skip


class Recorder(TorchDispatchMode):
    """A CUDA graph, and the context in which it is recorded."""

    replays = 0

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[Any] = []
        self._before: dict[int, Any] = {}
        self._random = torch.get_rng_state()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host reads a value of the device")
        for tensor in tree_leaves(args):  # also what a schema does not call written: running statistics
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, result))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for storage, before in self._before.values():
            storage.copy_(before)
        torch.set_rng_state(self._random)

    @torch.no_grad()
    def replay(self) -> None:
        type(self).replays += 1
        for func, args, kwargs, result in self._operations:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture(autouse=True)
def graphs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(Recorder, "replays", 0)


def trained(digits: Path, *words: str, bad_step: int = 0) -> Trainer:
    """Return a trainer after four updates. bad_step: that with a bad loss."""
    trainer = make_trainer(digits, *WORDS, *words)
    job, state, timer = trainer.job, trainer.state, trainer.process.timer
    state.loss_guard = DeviceLossGuard(state.strategy, timer, "start again")
    trainer.step = graph_step.GraphStep(job.config, job.plan, state, timer)
    data = TrainBatches(job.source.train, job.config, job.plan, 0)
    weights, usual = state.strategy.class_weights, state.strategy.class_weights.clone()
    for position in range(4):
        weights.copy_(usual * (torch.nan if position + 1 == bad_step else 1))
        loop.update_once(trainer, iter([data[position]]))
    return trainer


def state_of(trainer: Trainer) -> list[Any]:
    return tree_leaves(trainer.state.to_dict(trainer.state.totals))


@pytest.mark.parametrize("words", [(), ("optimizer.name=adamw", "train.clip=0.1")], ids=["sgd", "adamw"])
def test_replayed_updates_equal_those_that_the_host_starts(
    digits: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    replayed = trained(digits, *words)
    assert Recorder.replays == 3, "the first is made as usual"
    monkeypatch.setattr(graph_step.GraphStep, "_record", lambda step, batch: None)
    plain = trained(digits, *words)
    assert Recorder.replays == 3
    assert replayed.state.totals[2] == 4 * 24
    for ours, theirs in zip(state_of(replayed), state_of(plain), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def test_a_replay_leaves_out_the_update_of_a_bad_loss(digits: Path) -> None:
    with pytest.raises(NotFiniteError, match=r"the loss is nan at step 3 on rank 0 \(sample ids "):
        trained(digits, bad_step=3)
    assert Recorder.replays == 3


def read_value(module: nn.Module, _: object) -> None:
    bool(next(module.parameters(), torch.ones(1)).sum())


def replace_buffer(module: nn.Module, _: object) -> None:
    if isinstance(module, nn.BatchNorm2d):
        module.running_mean = module.running_mean.clone()


@pytest.mark.parametrize(
    ("hook", "reason"),
    [(read_value, "the host reads a value"), (replace_buffer, "the model makes new tensors of its running")],
)
def test_a_model_that_cannot_be_recorded_is_refused(digits: Path, hook: Any, reason: str) -> None:
    with register_module_forward_pre_hook(hook), pytest.raises(RequestError, match=reason) as refused:
        trained(digits)
    assert refused.value.remedy == "set train.compile=on"
