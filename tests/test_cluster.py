"""The rendered Job without a cluster: its pods in network namespaces, killed, cut off and given wrong requests."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from harness import assert_each_sample_once, kill, read_rows
from manifests import Document
from pods import Cluster, missing

from pipeline.operate.render import Request, render

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


def documents(digits: Path, *words: str, nodes: int = 2) -> list[Document]:
    small = ("model.arch=shufflenet_v2_x0_5", "batch.global=48", "run.deterministic=true", "run.trace=true",
             "data.workers=1", "checkpoint.every=5 steps", "evaluate.every=1000 epochs", f"data.root={digits}")  # fmt: skip
    request = Request(nodes=nodes, gpus=0, overrides=(*small, *words))
    return [document for text in render(request).values() for document in yaml.safe_load_all(text)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Callable[..., Cluster]:
    """The undisturbed run of so many nodes and words, made once."""
    made: dict[tuple[object, ...], Cluster] = {}

    def make(nodes: int, *words: str) -> Cluster:
        key = (nodes, *words)
        if key not in made:
            with Cluster(documents(digits, *words, nodes=nodes), tmp_path_factory.mktemp("whole")) as cluster:
                assert cluster.start().wait() == 0, cluster.logs()
            made[key] = cluster
        return made[key]

    return make


def done(cluster: Cluster) -> str:
    (line,) = {
        row["line"] for row in read_rows(cluster.run.folder / "journal.jsonl") if row.get("status") == "FINISHED"
    }
    return line


def assert_same(cluster: Cluster, undisturbed: Cluster) -> None:
    assert done(cluster) == done(undisturbed)
    trace = read_rows(cluster.run.folder / "trace.jsonl")
    assert_each_sample_once(trace, 48)
    assert trace == read_rows(undisturbed.run.folder / "trace.jsonl")


FAULTS = ("node 0", "node 1", "rank", "cut")


@pytest.mark.fuller
@pytest.mark.parametrize("nodes", [2, pytest.param(3, marks=pytest.mark.full)])
def test_what_is_lost_comes_back_by_itself_with_the_same_bits(
    tmp_path: Path, digits: Path, whole: Callable[..., Cluster], nodes: int, rounds: int, first_seed: int, full: bool
) -> None:
    faults = FAULTS if full else FAULTS[:1]
    draw = random.Random(1000 * nodes + first_seed)
    print(f"{nodes} nodes, --seed {first_seed}")
    count = rounds * len(faults)
    words = (f"train.max_steps={20 + 12 * count}", "train.epochs=100")
    undisturbed = whole(nodes, *words)
    with Cluster(documents(digits, *words, nodes=nodes), tmp_path / "hurt") as cluster:
        limit = cluster.job["spec"]["backoffLimit"]
        cluster.job["spec"]["backoffLimit"] = max(limit, 2 * nodes * count)  # this many losses are no bad luck any more
        cluster.start()
        waiting = _in_background(cluster)
        for number in range(count):
            fault = faults[number % len(faults)]
            cluster.wait_for_step(12 * number + draw.randint(6, 12))
            time.sleep(draw.uniform(0, 0.3))
            before, at = cluster.step(), time.monotonic()
            starts = cluster.starts()
            match fault:
                case "rank":
                    cluster.kill_rank(draw.randrange(nodes))
                case "cut":
                    pod = draw.randrange(nodes)
                    cluster.partition(pod)
                    time.sleep(5)
                    cluster.heal(pod)
                case _:
                    cluster.kill_pod(0 if fault == "node 0" else draw.randrange(1, nodes))
            cluster.wait_for_step(before + 1 + (fault == "cut"), timeout=240)
            if fault != "cut":
                _wait_for(lambda n=starts: cluster.starts() > n, "start", cluster)
                cluster.wait_for_step(before + 1, timeout=240)
            else:
                assert cluster.starts() == starts, "a cut of 5 s goes unnoticed"
            print(f"{fault}: {time.monotonic() - at:.1f} s until there was progress again")
        assert waiting() == 0, cluster.logs()
        assert_same(cluster, undisturbed)


@pytest.mark.full
def test_a_cut_for_good_ends_both_sides_with_one_writer(tmp_path: Path, digits: Path) -> None:
    limit = 15
    words = ("train.max_steps=5000", "train.epochs=1000", f"run.timeout={limit}")
    with Cluster(documents(digits, *words), tmp_path / "cut") as cluster:
        cluster.start()
        cluster.wait_for_step(8)
        cluster.partition(1)
        cut = time.monotonic()
        old = {pod: cluster.trainers(pod) for pod in (0, 1)}
        while any(set(pids) & set(cluster.trainers(pod)) for pod, pids in old.items()):
            assert time.monotonic() - cut < limit + 15, "nobody trains on beyond the time-out"
            time.sleep(0.2)
        step = cluster.step()
        time.sleep(3)
        assert cluster.step() == step, "neither side goes on alone"


def test_a_wrong_recipe_fails_the_job_at_once(tmp_path: Path, digits: Path) -> None:
    with Cluster(documents(digits, "batch.accumulate=7"), tmp_path / "wrong") as cluster:
        started = time.monotonic()
        assert cluster.start().wait() == 2
        assert time.monotonic() - started < 30
        assert len(cluster.failures) == 1
        assert "batch.global=48 does not divide by 2 processes" in cluster.logs()


@pytest.mark.full
def test_a_missing_peer_does_not(tmp_path: Path, digits: Path) -> None:
    words = ("train.max_steps=4",)
    with Cluster(documents(digits, *words), tmp_path / "late") as cluster:
        cluster.name_all(without=(0,))
        cluster._start(1)
        time.sleep(4)
        cluster.name_all()
        cluster._start(0)
        assert cluster.wait() == 0, cluster.logs()
        assert cluster.failures == []


def test_a_loss_that_is_not_finite_fails_the_job_after_one_attempt(tmp_path: Path, digits: Path) -> None:
    words = ("optimizer.lr=1e6", "schedule.warmup=0")
    with Cluster(documents(digits, *words), tmp_path / "nan") as cluster:
        assert cluster.start().wait() == 3
        assert cluster.starts() == 1, "no restart burnt on it"
        assert "not finite" in cluster.logs() or "the loss is" in cluster.logs()


@pytest.mark.full
def test_two_jobs_in_one_run_folder_are_one_too_many(tmp_path: Path, digits: Path) -> None:
    from harness import pipeline

    words = ("train.max_steps=5000", "train.epochs=1000")
    with Cluster(documents(digits, *words), tmp_path / "first") as cluster:
        cluster.start()
        cluster.wait_for_step(3)
        recipe = cluster.folder / "recipe/recipe.yaml"
        container = cluster.job["spec"]["template"]["spec"]["containers"][0]
        overrides = [word for word in container["command"][5:] if not word.startswith("run.dir")]
        second = pipeline("train", str(recipe), *overrides, "batch.accumulate=1", f"run.dir={cluster.run.folder}")
        assert second.code == 75
        assert "is held by process" in second.error
        for pod in (0, 1):
            for pid in cluster.processes(pod):
                kill(pid, 9)


def _in_background(cluster: Cluster) -> Callable[[], int]:
    import threading

    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(cluster.wait(1800)), daemon=True)
    thread.start()

    def join() -> int:
        thread.join(600)
        assert codes, cluster.logs()
        return codes[0]

    return join


def _wait_for(condition: Callable[[], bool], what: str, cluster: Cluster) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end, f"no {what}:\n{cluster.logs()}"
        time.sleep(0.1)
