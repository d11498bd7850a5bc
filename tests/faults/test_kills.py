"""A killed run resumes with the same bits, the same samples and the same metrics.

The same assertions apply to processes and network namespaces.
"""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from harness import SHARING, SMALL, Job, assert_each_sample_once, environment, kill

from faults import pods
from faults.cluster import Cluster, Namespaces, Processes, assert_same
from faults.ledger import Notes
from pipeline.record.checkpoint_files import step_of

Make = Callable[[Path], Cluster]
Uninterrupted = Callable[[str, Make], Job]
# each once in `make test`
QUICK = {2: ("one rank", "launcher"), 3: ("all ranks", "inside a save", "loader worker")}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    """Return a function that makes a run without faults once per name."""
    runs: dict[str, Job] = {}

    def run_once(name: str, make: Make) -> Job:
        if name not in runs:
            with closing(make(tmp_path_factory.mktemp("uninterrupted") / "run")) as cluster:
                cluster.run_undisturbed()
            runs[name] = cluster.run
        return runs[name]

    return run_once


@pytest.mark.fault("A1", "A2", "A3", "A4", "A5", ci=1, long=15)
@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_killed_processes_end_with_the_same_bits(
    tmp_path: Path,
    digits: Path,
    uninterrupted: Uninterrupted,
    world: int,
    seed: int,
    full: bool,
    notes: Notes,
) -> None:
    # in the other cases the journal, from which MLflow gets its data, is enough
    tracked = world == 2 and seed == 0

    def make(folder: Path, tracked: bool = world == 2) -> Cluster:
        uri = f"sqlite:///{folder.parent}/{folder.name}.db" if tracked else "none"
        return Processes(folder, digits, world, "train.epochs=2", f"track.uri={uri}")

    draw = random.Random(1000 * world + seed)
    # Each fault except the loss of a worker twice, with 4 processes once: restarts take long.
    repeated = ("one rank", "all ranks", "launcher", "inside a save") if world < 4 else ()
    kinds = [*Processes.kinds, *repeated] if full else QUICK[world]
    expected = uninterrupted(f"processes {world}", make)
    with closing(make(tmp_path / "faulty", tracked)) as cluster:
        _assert_survives(cluster, expected, draw.sample(kinds, len(kinds)), draw, notes)
        if tracked:
            assert _mlflow_history(cluster.run) == _mlflow_history(expected)


@pytest.mark.fault("A3")
def test_a_rank_whose_agent_died_before_its_first_check_does_not_train(tmp_path: Path, digits: Path) -> None:
    namespace = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system gives no process namespace")
    run = Job(tmp_path / "run", ["digits", f"data.root={digits}", *SMALL, "checkpoint.every=1 steps"])
    command = [sys.executable, "-m", "pipeline", *run.train_words()]
    (tmp_path / "agent").write_text(
        f"import subprocess\nwith open('err', 'w') as err:\n    subprocess.Popen({command}, stderr=err)\n"
    )
    (tmp_path / "start").write_text(f"{sys.executable} agent\ntouch left\nexec sleep 60\n")
    env = environment(RANK="0", WORLD_SIZE="1", TORCHELASTIC_RUN_ID="1")
    container = subprocess.Popen([*namespace, "sh", "start"], cwd=tmp_path, env=env, start_new_session=True)
    try:
        while not (tmp_path / "left").exists():
            assert container.poll() is None
            time.sleep(0.01)
        end = time.monotonic() + 5 * SHARING
        while run.processes():
            assert time.monotonic() < end, (tmp_path / "err").read_text()
            time.sleep(0.05)
    finally:
        kill(container.pid, signal.SIGKILL)
        container.wait()
    assert (tmp_path / "err").read_text() == "pipeline: the torchrun agent of this rank has died\n"
    assert not run.folder.exists()


@pytest.mark.skipif(pods.missing() is not None, reason=pods.missing() or "")
@pytest.mark.fault("A1", "G1", "G3", ci=1, long=20)
@pytest.mark.parametrize("nodes", [2, pytest.param(3, marks=pytest.mark.full)])
def test_lost_pods_are_replaced_and_end_with_the_same_bits(
    tmp_path: Path, digits: Path, uninterrupted: Uninterrupted, nodes: int, seed: int, full: bool,
    notes: Notes, pytestconfig: pytest.Config,
) -> None:  # fmt: skip
    kinds = list(Namespaces.kinds) if full else ["node 0"]
    if pytestconfig.getoption("--faults") == "ci":
        # each once; with three nodes those that leave several alive
        kinds = ["one rank", "node 0"] if nodes == 2 else ["another node", "cut"]

    def make(folder: Path) -> Cluster:
        steps = 16 + 16 * len(kinds)
        return Namespaces(folder, digits, nodes, "train.epochs=100", f"train.max_steps={steps}")

    draw = random.Random(1000 * nodes + seed)
    expected = uninterrupted(f"pods {nodes}", make)
    with closing(make(tmp_path / "faulty")) as cluster:
        _assert_survives(cluster, expected, draw.sample(kinds, len(kinds)), draw, notes)


@pytest.mark.full
@pytest.mark.fault("F2")
def test_a_run_resumed_with_other_numbers_of_processes_has_the_same_samples(
    tmp_path: Path, digits: Path
) -> None:
    words = ["digits", f"data.root={digits}", *SMALL]
    first = Job(tmp_path / "first", [*words, "train.epochs=1"])
    assert first.run_in_forks().code == 0
    # Fine-tuning with frozen batch norm: otherwise each process has the statistics of its own part
    # of the batch, which changes the loss by up to 7 %.
    words += [f"model.init={first.folder}", "model.freeze=backbone"]
    words += ["train.epochs=4", "checkpoint.every=7 steps", "data.workers=2"]
    expected = Job(tmp_path / "uninterrupted", words, nproc=2)
    assert expected.run_in_forks().code == 0
    run = Job(tmp_path / "run", words)
    for world, until in ((4, 25), (2, 50), (3, 75)):
        run.nproc = world
        run.start().wait_for_step(until)
        for rank in run.ranks():
            kill(rank, signal.SIGKILL)
        run.wait_gone(5)
    run.nproc = 1
    result = run.run()
    assert result.code == 0
    assert "resuming with 1 process instead of 3" in result.err
    assert_each_sample_once(run.trace(), 48)
    assert run.trace() == expected.trace()
    assert result.done["weights"] not in expected.output(), "only exact mode promises the same weights"
    # of a step that was trained again, the last row counts
    found = [{step: value for step, _, value in job.journal("train/loss")} for job in (expected, run)]
    losses = [[value for step, value in steps.items() if step <= 100] for steps in found]
    assert losses[0][-1] < 0.9 * losses[0][0], "the loss falls"
    assert sum(losses[1]) == pytest.approx(sum(losses[0]), rel=0.01)


@pytest.mark.full
@pytest.mark.fault("J1", ci=2, long=7)
def test_a_run_killed_before_its_first_save_resumes_from_the_given_checkpoint(
    tmp_path: Path, digits: Path, seed: int, notes: Notes
) -> None:
    words = ["digits", f"data.root={digits}", *SMALL, "evaluate.every=1000 epochs", "train.max_steps=40"]
    first = Job(tmp_path / "first", [*words[:-1], "train.max_steps=10"])
    assert first.run_in_forks().code == 0
    words += [f"run.resume={first.folder}", "checkpoint.every=1000 epochs"]
    expected = Job(tmp_path / "uninterrupted", words)
    assert expected.run_in_forks().code == 0
    draw = random.Random(seed)
    run = Job(tmp_path / "run", words, by_torchrun=True, env={"PET_MAX_RESTARTS": "3"}).start()
    for kind in draw.sample(("one rank", "one rank", "launcher"), 3):
        run.wait_for_step(draw.randint(11, 39))
        assert run.process
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


@pytest.mark.full
@pytest.mark.fault("B4", ci=1, long=20)
def test_a_run_killed_in_the_save_after_sigterm_resumes_from_the_previous_checkpoint(
    tmp_path: Path, digits: Path, uninterrupted: Uninterrupted, seed: int
) -> None:
    def make(folder: Path) -> Cluster:
        words = ("train.epochs=2", "checkpoint.every=1000 steps", "evaluate.every=1000 steps")
        return Processes(folder, digits, 2, *words)

    draw = random.Random(seed)
    expected = uninterrupted("one save", make)
    with closing(make(tmp_path / "faulty")) as cluster:
        cluster.start()
        run = cluster.run
        run.wait_for_step(draw.randint(3, 40))
        kill(draw.choice(run.ranks()), signal.SIGTERM)
        run.wait_until(run.is_saving, "save", pause=0.0002)
        assert run.process
        for pid in (*run.ranks(), run.process.pid):
            kill(pid, signal.SIGKILL)
        run.wait_gone(5)
        assert len(run.checkpoints()) <= 1, "complete or absent"
        assert all(step_of(path) == run.step() for path in run.checkpoints())
        cluster.start()
        cluster.wait()
        assert_same(run, expected)


def _assert_survives(
    cluster: Cluster, expected: Job, kinds: list[str], draw: random.Random, notes: Notes
) -> None:
    """Inject each kind at instants spread over the run; assert that it ends as `expected`."""
    share = expected.step() // (len(kinds) + 1)
    cluster.start()
    for number, kind in enumerate(kinds):
        cluster.wait_for_step(draw.randint(number * share + 1, (number + 1) * share))
        seconds = cluster.inject(kind, draw)
        print(f"{kind}: {seconds:.1f} s until the next training step")
        assert seconds < 60
        notes.note(cluster.kinds[kind], seconds=seconds)
    cluster.wait()
    assert_same(cluster.run, expected)


def _mlflow_history(run: Job) -> tuple[str, dict[str, list[tuple[int, float]]]]:
    """Return status and metrics of the only MLflow run."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{run.folder.parent}/{run.folder.name}.db")
    (experiment,) = [found for found in client.search_experiments() if found.name == "digits"]
    (tracked,) = client.search_runs([experiment.experiment_id])
    history = {}
    for key in tracked.data.metrics:
        if key.startswith(("train/", "val/")):
            points = client.get_metric_history(tracked.info.run_id, key)
            history[key] = sorted((point.step, point.value) for point in points)
    return tracked.info.status, history
