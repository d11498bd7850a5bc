"""The plan: sizes, steps, workers and rates are known numbers; remainders are refused by name."""

import os
import re
from pathlib import Path
from typing import Any

import harness
import pytest

from pipeline import machine
from pipeline.config.load import load
from pipeline.errors import RequestError
from pipeline.plan import DataSize, Plan
from pipeline.planning import divide_resources
from pipeline.world import World

IMAGENET = DataSize(train_images=1_281_167, val_images=50_000, num_classes=1000)


def plan_of(*words: str, **options: Any) -> Plan:
    return harness.plan_of(*words, **options)[1]


def refused(*words: str, **options: Any) -> str:
    return harness.refused(lambda: plan_of(*words, **options))


def test_the_batch_is_divided_and_the_learning_rate_scales_with_it() -> None:
    plan = plan_of("batch.global=256", "batch.accumulate=4", "train.epochs=90", "schedule.warmup=5 epochs",
                   size=8, data=IMAGENET)  # fmt: skip
    assert (plan.process_batch, plan.micro_batch) == (32, 8)
    assert plan.world * plan.accumulate * plan.micro_batch == plan.global_batch == 256
    assert (plan.steps_per_epoch, plan.total_steps, plan.warmup_steps) == (5004, 450_360, 25_020)
    # Goyal et al. 2017: 0.1 at 256 images, 3.2 at 8,192
    assert plan_of("optimizer.lr=0.1", "batch.global=8192", data=IMAGENET).peak_lr == pytest.approx(3.2)


def test_workers_and_threads_follow_the_cpus_unless_set() -> None:
    for workers, local, expected in ((4, 3, 2), (4, 4, 1), (0, 4, 0), (1, 8, 1)):
        config = load("digits", [f"data.workers={workers}"])
        assert divide_resources(config, World(size=2 * local, local_size=local, cpus=64)).workers == expected
    plan = plan_of("run.portable=false", size=4, cpus=10)
    assert (plan.workers_per_node, plan.workers, plan.threads) == (10, 3, 2)
    # the CPUs must not change the order of sums
    for words, threads in (([], 1), (["run.deterministic=true"], 1), (["run.threads=4"], 4)):
        assert plan_of(*words, cpus=64).threads == threads, "of a portable run"


def test_periodic_work_is_due_at_its_steps_and_at_the_last_which_changes_no_schedule() -> None:
    plan = plan_of("batch.global=48", "train.epochs=10", "schedule.warmup=5 %", "evaluate.every=2 epochs",
                   "checkpoint.every=7 steps", "track.every=0.5 epochs")  # fmt: skip
    assert (plan.steps_per_epoch, plan.total_steps) == (29, 290)
    assert (plan.warmup_steps, plan.evaluate_every, plan.checkpoint_every, plan.log_every) == (14, 58, 7, 14)

    every = ("evaluate.every=6 steps", "checkpoint.every=8 steps", "track.every=9 steps")
    plan = plan_of("schedule.warmup=2 epochs", "train.max_steps=20", *every)
    steps = range(21)
    assert [step for step in steps if plan.evaluates_at(step)] == [6, 12, 18, 20]
    assert [step for step in steps if plan.saves_at(step)] == [8, 16, 20]
    assert [step for step in steps if plan.logs_at(step) and step] == [9, 18, 20]
    complete = plan_of("schedule.warmup=2 epochs", "train.max_steps=1000")
    assert complete.last_step == 168
    assert [plan.learning_rate(step) for step in steps] == [complete.learning_rate(step) for step in steps]


# digits in batches of 96: 14 steps per epoch, 168 steps, 1 epoch of warm-up, peak rate 0.0375
@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("cosine", {14: 0.0375, 91: 0.01875, 168: 0.0}),
     ("linear", {14: 0.0375, 91: 0.01875, 52: 0.0375 * 116 / 154, 168: 0.0}),
     ("step", {14: 0.0375, 41: 0.0375, 42: 0.00375, 83: 0.00375, 84: 0.000375}),
     ("constant", {14: 0.0375, 91: 0.0375, 167: 0.0375})],
)  # fmt: skip
def test_the_learning_rate_at_known_steps(schedule: str, rates: dict[int, float]) -> None:
    plan = plan_of(f"schedule.name={schedule}", "schedule.every=3 epochs", "schedule.warmup=1 epoch")
    for step, rate in ({0: 0.0375 / 14, 6: 0.0375 / 2, 13: 0.0375} | rates).items():
        assert plan.learning_rate(step) == pytest.approx(rate, abs=1e-12), step


def test_a_cooldown_stays_at_the_final_rate() -> None:
    words = ["train.epochs=10", "schedule.warmup=0", "schedule.final=0.1", "schedule.cooldown=2 epochs"]
    plan = plan_of(*words, data=DataSize(960, 100, 10))
    rates = [plan.learning_rate(step) / plan.peak_lr for step in range(plan.total_steps)]
    assert (rates[0], rates[40]) == (1, pytest.approx(0.55))
    assert rates[80:] == pytest.approx([0.1] * 20)
    line = refused("schedule.warmup=9 epochs", "schedule.cooldown=9 epochs")
    assert "longer than the whole training" in line


def test_images_grow_between_epochs_as_in_ffcv() -> None:
    # FFCV's get_resolution with rn50_88_epochs.yaml: 160 px up to epoch 65, 192 px from 76 on,
    # multiples of 32 in between
    growth = ("augment.size=192", "augment.first_size=160")
    plan = plan_of(*growth, "augment.growth=[65 epochs, 76 epochs]", "train.epochs=88", data=IMAGENET)
    sizes = [plan.image_size_at(epoch * plan.steps_per_epoch) for epoch in range(88)]
    assert sizes == [160] * 71 + [192] * 17
    assert plan.image_size_at(71 * plan.steps_per_epoch - 1) == 160
    wide = plan_of("augment.size=120", "augment.first_size=40", "augment.growth=[0, 11 epochs]")
    assert wide.image_sizes == [40, 64, 96, 120]
    for when in ("[5 epochs, 4 epochs]", "[5 epochs, 12 epochs]"):
        assert "is from epoch 5 to" in refused(*growth, f"augment.growth={when}")


def compiled(*words: str, **world: Any) -> str:
    try:
        plan = plan_of("run.portable=false", *words, **world)
    except RequestError as error:
        return f"refused: {error}"
    return f"{plan.compiles} {plan.compile_reason}"


def test_the_plan_says_whether_the_model_is_compiled_and_why() -> None:
    gpu: dict[str, Any] = {"has_gpu": True}
    pair, no_compiler = {**gpu, "size": 2}, {"missing_to_compile": "a compiler"}
    for words, world, says in (
        ([], gpu, "True there is a GPU, unless timed"), (["train.compile=on"], {}, "True train.compile"),
        (["train.compile=off"], gpu, "False train.compile=off"), (["run.device=cpu"], gpu, "False no GPU"),
        (["run.deterministic=true"], gpu, "False the run is deterministic"),
        (["model.batchnorm=sync"], pair, "False model.batchnorm=sync"),
        (["model.batchnorm=sync"], gpu, "True there is a GPU"),  # one process does not
        (["train.compile=reduce-overhead", "run.deterministic=true"], gpu, "True train.compile"),
        ([], gpu | no_compiler, "False torch.compile needs a compiler"),
        (["train.compile=on"], no_compiler, "refused: train.compile=on needs a compiler"),
        (["train.compile=on", "model.batchnorm=sync"], pair, "refused: train.compile=on needs model"),
    ):  # fmt: skip
        assert compiled(*words, **world).startswith(says)
    for word, world, named in (
        ("run.device=cpu", gpu, "one process with a GPU"), ("run.seed=0", pair, "one process with a GPU"),
        ("batch.accumulate=2", gpu, "batch.accumulate"), ("run.exact=true", gpu, "run.exact=true"),
        ("augment.first_size=16", gpu, "augment.first_size"), ("parallel=fsdp", gpu, "parallel=fsdp"),
    ):  # fmt: skip
        line = compiled("train.compile=reduce-overhead", word, **world)
        assert (line.startswith("refused"), named in line) == (True, True), line


@pytest.mark.fault("F4")
def test_a_remainder_is_refused_with_the_nearest_values_that_work() -> None:
    line = refused("batch.global=100", size=3)
    assert line.startswith("batch.global=100 ")
    assert line.endswith("99 or 102; worlds that work are 1, 2, 4, 5, 10, 20")
    line = refused("batch.global=96", "batch.accumulate=5", size=2)
    assert line.endswith("that works is 90 or 100"), "no world works"
    assert refused("batch.global=2", size=4).endswith("that works is 4; worlds that work are 1, 2")
    for size in (1, 3, 12):
        line = refused("batch.global=1001", "batch.accumulate=2", size=size)
        for batch in re.search(r"works is ([\d or]+)", line)[1].split(" or "):  # type: ignore[index]
            assert plan_of(f"batch.global={batch}", "batch.accumulate=2", size=size)


@pytest.mark.fault("E3")
def test_data_smaller_than_one_batch_is_refused_with_the_largest_batch_that_works() -> None:
    line = refused("batch.global=2000", size=4)
    assert "batch.global=2000" in line
    assert line.endswith(" 1436")
    assert plan_of("batch.global=1436", size=4).steps_per_epoch == 1
    assert refused(size=4, data=DataSize(3, 1, 2)).endswith("4 passes need at least one image each")


def test_a_cgroup_and_those_above_it_limit_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, root = len(os.sched_getaffinity(0)), tmp_path / "cgroup"
    monkeypatch.setattr(machine, "_CGROUPS", root)
    monkeypatch.setattr(machine, "_OWN_CGROUP", tmp_path / "own")
    (root / "pod/job").mkdir(parents=True)
    for above, own, cgroup, cpus in (
        ("max 100000", "150000 100000", "0::/pod/job", 1), ("1 1", "1000 1", "1:cpu:/job\n0::/pod/job", 1),
        ("1000 1", "1000 1", "0::/pod/job", None), ("max 1", "1 1", "0::/pod", None),
        ("x", "1 1", "0::/", None), ("1 2", "max 1", "0::/pod", 1),
    ):  # fmt: skip
        (root / "pod/cpu.max").write_text(f"{above}\n")
        (root / "pod/job/cpu.max").write_text(f"{own}\n")
        (tmp_path / "own").write_text(f"{cgroup}\n")
        assert machine.available_cpus() == min(allowed, cpus or allowed)


def test_plan_prints_the_arithmetic_and_writes_nothing(tmp_path: Path) -> None:
    words = ("data.workers=6", "batch.accumulate=2", "--world", "4", "--nodes", "2")
    result = harness.quick("plan", "digits", *words, cwd=tmp_path, code=0)
    for row in (
        "batch          96 = 4 × 2 × 12 (processes × accumulation × images a pass)",
        "workers        3 a process = ⌈6 a node / 2⌉",
        "epoch          14 steps = ⌊1,437 / 96⌋ (93 images left out, different ones each epoch)",
    ):
        assert f"  {row}" in result.out
    assert not list(tmp_path.iterdir())
