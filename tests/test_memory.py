"""A pass that does not fit into memory is split on all ranks, unless that would change the bits."""

import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness import Job, MakeJob, before_each, plan_of

from pipeline.addons.models.memory import explain_shortage, fit_passes
from pipeline.config.load import load
from pipeline.data.order import Order
from pipeline.errors import RequestError
from pipeline.group import Group
from pipeline.plan import Plan
from pipeline.world import World

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class GroupOfTwo(Group):
    """One of two processes; the other runs out of memory above `limit` images in a pass."""

    def __init__(self, limit: int, tried: list[int]) -> None:
        super().__init__(World(size=2, local_size=2), torch.device("cpu"))
        self._limit, self._tried = limit, tried

    def any_rank(self, *flags: bool) -> tuple[bool, ...]:
        return tuple(flag or self._tried[-1] > self._limit for flag in flags)


def fit(
    limit: int, *words: str, other_limit: int = 1000, error: Exception = OUT_OF_MEMORY
) -> tuple[Plan, Plan, list[int], list[str]]:
    """Return (the plan before, the plan that fits, sizes of the passes tried, lines logged)."""
    # CUDA graphs are of one process
    size = 1 if "train.compile=reduce-overhead" in words else 2
    config, plan = plan_of("batch.global=96", *words, size=size, has_gpu=size == 1)
    tried: list[int] = []
    lines: list[str] = []

    def attempt(*arguments: Any) -> None:
        tried.append(arguments[-1])
        if tried[-1] > limit:
            raise error

    with patch("pipeline.addons.models.memory.try_pass", attempt):
        fits = fit_passes(config, plan, GroupOfTwo(other_limit, tried), torch.nn.Identity(), lines.append)
    return plan, fits, tried, lines


def test_passes_become_smaller_until_they_fit_on_all_ranks() -> None:
    plan, fits, tried, lines = fit(48)
    assert (fits, tried, lines) == (plan, [48], [])
    shortage = explain_shortage(OUT_OF_MEMORY, load("digits", ["train.compile=reduce-overhead"]), plan, 0)
    assert "needs one pass; lower batch.global" in str(shortage)
    shortage = explain_shortage(OUT_OF_MEMORY, load("digits", []), plan, first_step=3)
    assert "with more processes" in str(shortage), "a resumed run keeps its passes"
    plan, fits, tried, lines = fit(20, other_limit=12)
    assert tried == [48, 24, 16, 12]
    assert fits == replace(plan, accumulate=4, micro_batch=12)
    assert ["batch.accumulate=4" in line for line in lines] == [True]
    for step in (0, 13, 14):
        assert Order(plan, 0).ids(step).tolist() == Order(fits, 0).ids(step).tolist()
    _, fits, tried, _ = fit(9, "augment.mixup=0.2", "batch.accumulate=2")
    assert (tried, fits.micro_batch, fits.accumulate) == ([24, 12, 8], 8, 6), "pairs stay in one pass"


@pytest.mark.parametrize("error", [
    RuntimeError("GET was unable to find an engine to execute this computation"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    torch.AcceleratorError("CUDA error: out of memory"),
])  # fmt: skip
def test_a_library_that_is_out_of_memory_counts_and_another_error_does_not(error: Exception) -> None:
    assert fit(24, error=error)[2] == [48, 24]
    with pytest.raises(RequestError, match=f"nor does one of 1 .{re.escape(str(error))}"):
        fit(0, error=error)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        fit(24, error=RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.parametrize(("step", "code"), [(1, 2), (5, 1)])
def test_a_shortage_in_the_first_steps_ends_it(job: MakeJob, step: int, code: int) -> None:
    prelude = before_each(
        "pipeline.train.step:Step.apply_gradients", "import torch",
        f"if calls == {step}: raise torch.OutOfMemoryError('CUDA out of memory')",
    )  # fmt: skip
    run = job(prelude=prelude)
    result = run.run_in_forks()
    says = "the first steps do not fit into memory (CUDA out of memory): raise batch.accumulate, which is 1"
    assert (result.code, says in result.err) == (code, code == 2), result.err
    if code == 2:
        assert says in Job(run.folder, run.arguments).run_in_forks(code=2).error


@pytest.mark.parametrize(
    ("limit", "words", "line"),
    [(0, (), "nor does one of 1"),
     (24, ("run.deterministic=true",), "would change the bits; batch.accumulate=2 fits"),
     (4, ("run.exact=true",), "would change the bits; exact.shards=24 fits"),
     (24, ("train.compile=reduce-overhead", "run.deterministic=true"), "=reduce-overhead needs one pass")],
)  # fmt: skip
def test_a_batch_that_cannot_be_split_is_refused(limit: int, words: tuple[str, ...], line: str) -> None:
    with pytest.raises(RequestError, match=line):
        fit(limit, *words)
