"""Kill it anywhere, start it again: the same bits, the same samples, the same history."""

import random
import signal
import time
from pathlib import Path

import pytest
from harness import SMALL, Job, assert_each_sample_once, kill, read_rows

KINDS = ("one rank", "all ranks", "launcher", "inside a save")
QUICK = {
    2: ["one rank", "launcher"],
    3: ["all ranks", "inside a save"],
}  # each kind once; with --full all at each world


def job(folder: Path, digits: Path, world: int, *, tracked: bool) -> Job:
    uri = f"sqlite:///{folder.parent}/{folder.name}.db" if tracked else "none"
    return Job(
        folder,
        ["digits", f"data.root={digits}", *SMALL, "train.epochs=2", "checkpoint.every=7 steps", "data.workers=2",
         f"track.uri={uri}"],
        nproc=world,
    )  # fmt: skip


@pytest.mark.fuller
@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_killed_at_random_instants_it_ends_with_the_same_bits(
    tmp_path: Path, digits: Path, world: int, rounds: int, first_seed: int, full: bool
) -> None:
    tracked = full or world == 2  # at the others the journal, which is all that MLflow is fed from
    whole = job(tmp_path / "whole", digits, world, tracked=tracked)
    expected = whole.run().done
    last = int(expected["step"])
    for seed in range(first_seed, first_seed + rounds):
        draw = random.Random(1000 * world + seed)
        print(f"world {world}, --seed {seed}")  # shown with a failure, to replay it
        hurt = job(tmp_path / f"hurt-{seed}", digits, world, tracked=tracked)
        kinds = draw.sample(KINDS, len(KINDS)) if full else QUICK[world]
        for number, kind in enumerate(kinds):
            hurt.start()
            hurt.wait_for_step(
                draw.randint(number * last // (len(kinds) + 1) + 1, (number + 1) * last // (len(kinds) + 1))
            )
            _hurt(hurt, kind, draw)
            hurt.wait_gone(5)  # neither an orphan that trains on nor one that writes
        assert hurt.run().done == expected
        trace = read_rows(hurt.folder / "trace.jsonl")
        assert_each_sample_once(trace, 48)
        assert trace == read_rows(whole.folder / "trace.jsonl")
        assert hurt.journal("train/", "val/") == whole.journal("train/", "val/")
        if tracked:
            assert _history(hurt) == _history(whole)


@pytest.mark.full
def test_resumed_with_other_numbers_of_processes_the_samples_are_the_same(tmp_path: Path, digits: Path) -> None:
    whole = job(tmp_path / "whole", digits, 2, tracked=False)
    whole.arguments.append("train.epochs=4")
    assert whole.run().code == 0
    run = job(tmp_path / "run", digits, 4, tracked=False)
    run.arguments.append("train.epochs=4")
    for world, until in ((4, 25), (2, 50), (3, 75)):
        run.nproc = world
        run.start().wait_for_step(until)
        for rank in run.ranks():
            kill(rank, signal.SIGKILL)
        run.wait_gone(5)
    run.nproc = 1
    result = run.run()
    assert result.code == 0
    assert "going on with 1 process in place of 3" in result.err
    trace = read_rows(run.folder / "trace.jsonl")
    assert_each_sample_once(trace, 48)
    assert trace == read_rows(whole.folder / "trace.jsonl")
    assert result.done["weights"] not in whole.folder.with_suffix(".out").read_text(), "which is what exact mode is for"
    losses = [[value for step, key, value in one.journal("train/loss") if step <= 100] for one in (whole, run)]
    # not nearer than this: batch norm sees 12 to 48 images a pass, as the number of processes has it
    assert sum(losses[1]) == pytest.approx(sum(losses[0]), rel=0.05)


def _hurt(run: Job, kind: str, draw: random.Random) -> None:
    delay = draw.uniform(0, 0.3)
    assert run.process
    if kind == "inside a save":
        run.wait_until(run.saving, "save", pause=0.0005)
        delay = draw.uniform(0, 0.05)
    time.sleep(delay)
    ranks = run.ranks()
    victims = {"one rank": [draw.choice(ranks)], "launcher": [run.process.pid]}.get(kind, ranks)
    for pid in victims:
        kill(pid, signal.SIGKILL)


def _history(run: Job) -> tuple[str, dict[str, list[tuple[int, float]]]]:
    """Status and points of the one MLflow run."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{run.folder.parent}/{run.folder.name}.db")
    (experiment,) = [found for found in client.search_experiments() if found.name == "digits"]
    (tracked,) = client.search_runs([experiment.experiment_id])
    keys = [key for key in tracked.data.metrics if key.startswith(("train/", "val/"))]
    return tracked.info.status, {
        key: sorted((point.step, point.value) for point in client.get_metric_history(tracked.info.run_id, key))
        for key in keys
    }
