"""A killed run resumes with the same bits, the same samples and the same metrics.

`test_nodes.py` has the same for nodes.
"""

import random
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest
from harness import SLOW, SMALL, Job, assert_same, before_each, environment, kill, wait_until

from faults.ledger import Notes

EVERY = 7
ROWS = {"one rank": "A1", "all ranks": "A2", "launcher": "A3", "inside a save": "A4", "loader worker": "A5",
        "save after SIGTERM": "B4"}  # fmt: skip


def job(folder: Path, digits: Path, world: int, *, is_tracked: bool) -> Job:
    uri = f"sqlite:///{folder}.db" if is_tracked else "none"
    words = ["digits", f"data.root={digits}", *SLOW, f"checkpoint.every={EVERY} steps", "data.workers=2",
             "train.epochs=2", f"track.uri={uri}"]  # fmt: skip
    return Job(folder, words, nproc=world)


@pytest.fixture(scope="module", params=[2, *(pytest.param(size, marks=pytest.mark.full) for size in (3, 4))])
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Job:
    world = request.param
    return job(tmp_path_factory.mktemp("expected") / "run", digits, world, is_tracked=world == 2).finished()


@pytest.mark.fault("A1", "A2", "A3", "A4", "A5", "B4", ci=1, long=15)
def test_killed_processes_end_with_the_same_bits(
    tmp_path: Path, digits: Path, expected: Job, seed: int, full: bool, notes: Notes
) -> None:
    world = expected.nproc
    # in the other cases the journal, from which MLflow gets its data, is enough
    is_tracked = world == 2 and seed == 0
    draw = random.Random(1000 * world + seed)
    kinds = [*ROWS] * (2 if full and world < 4 else 1)  # with 4 processes restarts take long
    run = job(tmp_path / "faulty", digits, world, is_tracked=is_tracked).start()
    share = expected.step() // (len(kinds) + 1)
    try:
        for number, kind in enumerate(draw.sample(kinds, len(kinds))):
            run.wait_for_step(draw.randint(number * share + 1, (number + 1) * share))
            notes.note(ROWS[kind], seconds=_inject(run, kind, draw))
        result = run.wait()
    finally:
        run.clean()
    assert result.code == 0, result.err
    assert_same(run, expected)
    if is_tracked:
        assert _mlflow_history(run) == _mlflow_history(expected)


def _inject(run: Job, kind: str, draw: random.Random) -> float:
    """Kill, and repeat the command if that ends the run; return the seconds until a step."""
    before, starts, began = run.step(), len(run.starts()), time.monotonic()
    time.sleep(_wait_for_save(run, draw) if kind == "inside a save" else draw.uniform(0, 0.3))
    ranks = run.ranks()
    victims = ranks
    match kind:
        case "launcher":
            victims = [run.process.pid]
        case "one rank":
            victims = [draw.choice(ranks)]
        case "loader worker":
            victims = [draw.choice(run.workers(draw.choice(ranks)))]
        case "save after SIGTERM":
            kill(draw.choice(ranks), signal.SIGTERM)
            run.wait_until(run.is_saving, "save", pause=0.0002)
            victims = [*ranks, run.process.pid]
    for pid in victims:
        kill(pid, signal.SIGKILL)
    if kind == "loader worker":
        run.wait_for_step(run.step() + 2)
        assert len(run.starts()) == starts, "its rank makes another one"
    else:
        run.wait_gone(5)  # no orphan may train or write
        run.start().wait_for_start()
        resumed = run.starts()[-1]["step"]
        # one interval, and the steps made while the last checkpoint was written, or before the kill
        assert before - resumed <= 2 * EVERY, f"{kind}: from step {before} back to {resumed}"
        run.wait_for_step(resumed + 1)
    return time.monotonic() - began


def _wait_for_save(run: Job, draw: random.Random) -> float:
    """Wait for a temporary file, or for its renaming; return the delay before the kill in s.

    After the renaming the run deletes older checkpoints, so that the kill may hit that, too.
    """
    if draw.random() < 0.5:
        run.wait_until(run.is_saving, "save", pause=0.0005)
        return draw.uniform(0, 0.05)
    before = set(run.checkpoints())
    run.wait_until(lambda: set(run.checkpoints()) - before, "saved file", pause=0.0002)
    return 0


@pytest.mark.fault("A3")
def test_a_rank_whose_agent_died_before_its_first_check_does_not_train(tmp_path: Path, digits: Path) -> None:
    namespace = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system gives no process namespace")
    run = Job(tmp_path / "run", ["digits", f"data.root={digits}", *SLOW, "checkpoint.every=1 steps"])
    train = shlex.join([sys.executable, "-m", "pipeline", *run.train_words()])
    (tmp_path / "agent").write_text(f"{train} 2>err &\n")
    (tmp_path / "start").write_text("sh agent\ntouch left\nexec sleep 60\n")
    env = environment(RANK="0", WORLD_SIZE="1", TORCHELASTIC_RUN_ID="1")
    container = subprocess.Popen([*namespace, "sh", "start"], cwd=tmp_path, env=env, start_new_session=True)
    try:
        wait_until((tmp_path / "left").exists, "end of the agent")
        wait_until(lambda: not run.processes(), "end of the rank", 60)
    finally:
        kill(container.pid, signal.SIGKILL)
        container.wait()
    (line,) = (tmp_path / "err").read_text().splitlines()
    assert "agent" in line
    assert not run.folder.exists()


@pytest.mark.full
@pytest.mark.fault("F2")
def test_a_run_resumed_at_another_world_size_has_the_same_samples(tmp_path: Path, digits: Path) -> None:
    words = ["digits", f"data.root={digits}", *SLOW]
    first = Job(tmp_path / "first", [*words, "train.epochs=1"]).finished()
    # Fine-tuning with frozen batch norm: otherwise each process has the statistics of its own part
    # of the batch, which changes the loss by up to 7 %.
    words += [f"model.init={first.folder}", "model.freeze=backbone"]
    words += ["train.epochs=4", "checkpoint.every=7 steps", "data.workers=2"]
    expected = Job(tmp_path / "uninterrupted", words, nproc=2).finished()
    run = Job(tmp_path / "run", words)
    for world, until in ((4, 25), (2, 50), (3, 75)):
        run.nproc = world
        run.start().kill_at(until)
    run.nproc = 1
    result = run.run(code=0)
    assert "resuming with 1 process instead of 3" in result.err
    run.assert_each_sample_once()
    assert run.trace() == expected.trace()
    assert result.done["weights"] not in expected.output(), "only exact mode promises the same weights"
    # of a step that was trained again, the last row counts
    found = [{step: value for step, _, value in made.journal("train/loss")} for made in (expected, run)]
    losses = [[value for step, value in steps.items() if step <= 100] for steps in found]
    assert losses[0][-1] < 0.9 * losses[0][0], "the loss falls"
    assert sum(losses[1]) == pytest.approx(sum(losses[0]), rel=0.01)


@pytest.mark.full
@pytest.mark.fault("J1", ci=2, long=7)
def test_a_run_killed_before_its_first_save_resumes_from_the_given_checkpoint(
    tmp_path: Path, digits: Path, seed: int, notes: Notes
) -> None:
    words = ["digits", f"data.root={digits}", *SLOW, "evaluate.every=1000 epochs"]
    first = Job(tmp_path / "first", [*words, "train.max_steps=10"]).finished()
    words += [f"run.resume={first.folder}", "checkpoint.every=1000 epochs", "train.max_steps=40"]
    expected = Job(tmp_path / "uninterrupted", words).finished()
    draw = random.Random(seed)
    run = Job(tmp_path / "run", words, by_torchrun=True, env={"PET_MAX_RESTARTS": "3"}).start()
    for kind in draw.sample(("one rank", "one rank", "launcher"), 3):
        run.wait_for_step(draw.randint(11, 39))
        kill(run.process.pid if kind == "launcher" else run.ranks()[0], signal.SIGKILL)
        if kind == "launcher":
            run.wait_gone(5)
            run.start()  # the same command
        else:
            run.starts_before += 1  # the launcher restarts the rank
        notes.note("J1")
    assert run.wait().out == expected.output()
    assert [(row["step"], row["resumed"]) for row in run.starts()] == [(10, True)] * 4
    assert run.trace() == expected.trace()
    assert run.journal("train/", "val/") == expected.journal("train/", "val/")


PHASES = {"validation": "evaluate", "save": "save", "first step": "update_once"}
"""Each phase -> its function of the loop."""


@pytest.mark.fault("J2", ci=1, long=20)
@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("stages", marks=pytest.mark.full)])
def test_a_sharded_model_ends_with_the_same_bits_after_each_fault(
    tmp_path: Path, digits: Path, parallel: str, seed: int, full: bool, notes: Notes
) -> None:
    """No process has the full model. The next start begins with the validation, before any step."""
    draw = random.Random(f"{parallel} {seed}")
    cases = [*product(PHASES, (signal.SIGKILL, signal.SIGTERM))] if full else [("validation", signal.SIGTERM)]
    order = draw.sample(cases, len(cases))
    order.sort(key=lambda case: case[0] == "first step")  # the first start is no resume
    # 45 batches are evaluated, which takes long
    words = ["digits", f"data.root={digits}", *(SMALL if parallel == "fsdp" else SLOW),
             f"parallel={parallel}", "data.workers=0", f"train.max_steps={36 if full else 12}",
             "evaluate.every=6 steps", "evaluate.batch=8", "checkpoint.every=4 steps"]  # fmt: skip
    run = Job(tmp_path / "run", words, nproc=2)
    for phase, number in order:
        is_for_all = number == signal.SIGKILL and draw.random() < 0.5
        ranks = "01" if is_for_all else draw.choice("01")
        timer = f"threading.Timer({draw.uniform(0, 0.1)}, os.kill, (os.getpid(), {number:d}))"
        fault = f"if os.environ['RANK'] in {ranks!r}: {timer}.start()"
        run.prelude = before_each(f"pipeline.train.loop.{PHASES[phase]}", fault)
        run.run(code=75 if number == signal.SIGTERM else 1)
        run.wait_gone(5)
        notes.note("J2")
    run.prelude = ""
    assert_same(run.finished(), Job(tmp_path / "undisturbed", words, nproc=2).finished())


def _mlflow_history(run: Job) -> list[list[tuple[object, ...]]]:
    """Return the status of each run in MLflow's database, and the points of its metrics."""
    points = "SELECT key, step, value FROM metrics WHERE key LIKE 'train/%' OR key LIKE 'val/%'"
    with closing(sqlite3.connect(run.folder.with_suffix(".db"))) as tables:
        return [sorted(tables.execute(query)) for query in ("SELECT status FROM runs", points)]
