"""Evaluate one model with several processes, which are forks of this one: it has imported torch."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from harness import in_ranks
from streams import prepare
from torch import nn

from pipeline.addons.models.evaluator import Evaluator
from pipeline.group import Group
from pipeline.record.terminal import SILENT
from pipeline.train.listener import Evaluated
from pipeline.world import World


def make_model() -> nn.Module:
    """Return a network whose confidences fill the whole range."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
    with torch.no_grad():
        network[2].weight.mul_(12)
    return network


def evaluate(root: Path, model: nn.Module, *words: str, group: Group | None = None) -> Evaluated:
    """Evaluate the model on the digits in `root`, in batches of 48."""
    config, plan, source = prepare(root, 1, "evaluate.batch=48", "augment.size=32", "data.workers=0", *words)
    group = group or Group(World(), torch.device("cpu"))
    result = Evaluator(model, source, config, plan, group).evaluate(1, SILENT, lambda: False)
    assert result
    return result


def evaluate_alone(root: Path, *words: str) -> tuple[Evaluated, dict[str, Any], torch.Tensor]:
    logits: list[torch.Tensor] = []
    model = make_model()
    model.register_forward_hook(lambda _module, _inputs, result: logits.append(result))
    found = evaluate(root, model, *words)
    return found, _found(found), torch.cat(logits)


def assert_same_together(root: Path, size: int, expected: dict[str, Any], *words: str) -> None:
    """Assert that `size` processes find what one has found, to the bit."""
    assert not any(in_ranks(_run_rank, size, size, root, expected, words))


def _run_rank(rank: int, address: str, size: int, root: Path, expected: Any, words: tuple[str, ...]) -> None:
    group = Group(World(size, size, rank, rank, init_method=address), torch.device("cpu"), 60)
    result = evaluate(root, make_model(), *words, group=group)
    assert not group.is_main or _found(result) == expected
    group.shutdown()


def _found(result: Evaluated) -> dict[str, Any]:
    by_class = result.predictions.by_class([f"{label}" for label in range(10)])
    return {**asdict(result.evaluation), "by_class": by_class}
