"""Evaluate one model with 1, 2, 3 and 4 processes: python evaluate_worlds.py IMAGES OUTPUT.

The processes are forks of one that has imported torch. OUTPUT gets one JSON list: what each world
found, and the logits and labels that one process saw.
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from streams import prepare
from torch import nn

from pipeline.addons.models.evaluator import Evaluator
from pipeline.group import Group
from pipeline.record.terminal import SILENT
from pipeline.train.listener import Evaluated
from pipeline.world import World

WORLDS = (1, 2, 3, 4)


def make_model() -> nn.Module:
    """Return a network whose confidences fill the whole range."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
    with torch.no_grad():
        network[2].weight.mul_(12)
    return network


def evaluate(root: Path, group: Group, model: nn.Module) -> Evaluated:
    """Evaluate the model on the digits in `root`, in batches of 48."""
    config, plan, source = prepare(root, 1, "evaluate.batch=48", "augment.size=32", "data.workers=0")
    evaluator = Evaluator(model, source.val, config, plan, group)
    result = evaluator.evaluate(1, SILENT, lambda: False)
    assert result
    return result


def _run_rank(root: Path, world: World, output: Path) -> None:
    group = Group(world, torch.device("cpu"), 60)
    result = evaluate(root, group, make_model())
    if world.is_main:
        output.write_text(json.dumps(_found(result)))
    group.shutdown()


def _found(result: Evaluated) -> dict[str, Any]:
    return {
        **asdict(result.evaluation),
        "recalls": result.predictions.recalls([f"{label}" for label in range(10)]),
    }


def main(root: Path, output: Path) -> None:
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for size in WORLDS[1:]:
            file = Path(scratch, f"{size}.json")
            children = []
            for rank in range(size):
                child = os.fork()
                if not child:
                    world = World(size, size, rank, rank, init_method=f"file://{scratch}/store-{size}")
                    _run_rank(root, world, file)
                    os._exit(0)
                children.append(child)
            assert not any(os.waitpid(child, 0)[1] for child in children)
            found.append(json.loads(file.read_text()))
    logits: list[torch.Tensor] = []
    model = make_model()
    model.register_forward_hook(lambda _module, _inputs, result: logits.append(result))
    alone = evaluate(root, Group(World(), torch.device("cpu")), model)
    seen = {"logits": torch.cat(logits).tolist(), "labels": alone.predictions.labels.tolist()}
    output.write_text(json.dumps([seen, _found(alone), *found]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
