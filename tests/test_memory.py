"""A pass that does not fit: smaller ones make the same batch, all processes alike; what would change bits is refused."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pipeline.config.load import load
from pipeline.data.order import Order
from pipeline.errors import RequestError
from pipeline.group import Group
from pipeline.guards.memory import fit_passes, make_try_pass
from pipeline.plan import DataSize, Plan, make_plan
from pipeline.world import World


class Roomy(Group):
    """One of two processes; the other has room for so many images a pass."""

    def __init__(self, room_of_the_other: int, tried: list[int]) -> None:
        super().__init__(World(size=2, local_size=2), torch.device("cpu"))
        self._room, self._tried = room_of_the_other, tried

    def any_rank(self, *flags: bool) -> tuple[bool, ...]:
        return tuple(flag or self._tried[-1] > self._room for flag in flags)


def fitted(room: int, *words: str, other: int = 1000) -> tuple[Plan, Plan, list[int], list[str]]:
    """(the plan before, the plan that fits, passes tried, lines said)."""
    config = load("digits", ["batch.global=96", *words])
    plan = make_plan(config, World(size=2, local_size=2), DataSize(1437, 360, 10))
    tried: list[int] = []
    said: list[str] = []

    def attempt(images: int) -> None:
        tried.append(images)
        if images > room:
            raise torch.OutOfMemoryError

    return plan, fit_passes(config, plan, Roomy(other, tried), attempt, said.append), tried, said


def test_a_pass_that_fits_changes_nothing() -> None:
    plan, fits, tried, said = fitted(48)
    assert (fits, tried, said) == (plan, [48], [])


def test_passes_become_more_and_smaller_until_they_fit_everybody() -> None:
    plan, fits, tried, said = fitted(20, other=12)
    assert tried == [48, 24, 16, 12]
    assert fits == replace(plan, accumulate=4, micro_batch=12)
    assert said == ["a pass of 48 images does not fit into the memory of cpu: 4 passes of 12 make the same batch"
                    " (batch.accumulate=4)"]  # fmt: skip
    for step in (0, 13, 14):
        assert Order(plan, 0).ids(step).tolist() == Order(fits, 0).ids(step).tolist()


def test_pairs_that_are_mixed_stay_together() -> None:
    _, fits, tried, _ = fitted(9, "augment.mixup=0.2", "batch.accumulate=2")
    assert (tried, fits.micro_batch, fits.accumulate) == ([24, 12, 8], 8, 6)


@pytest.mark.parametrize(
    ("room", "words", "line"),
    [(0, (), "not even a pass of 1 of 32 px fits into the memory of cpu"),
     (24, ("run.deterministic=true",), "fewer at once would change the bits: batch.accumulate=2 fits"),
     (4, ("run.exact=true",), "fewer at once would change the bits: exact.shards=24 fits")],
)  # fmt: skip
def test_what_cannot_be_helped_is_refused(room: int, words: tuple[str, ...], line: str) -> None:
    with pytest.raises(RequestError, match=line):
        fitted(room, *words)


def test_a_tried_pass_leaves_no_gradient_behind() -> None:
    config = load("digits", ["model.arch=squeezenet1_1", "train.ema=0.9"])
    plan = make_plan(config, World(), DataSize(1437, 360, 10))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
    attempt: Callable[[int], None] = make_try_pass(model, config, plan, torch.device("cpu"))
    attempt(2)
    assert all(one.grad is None for one in model.parameters())
