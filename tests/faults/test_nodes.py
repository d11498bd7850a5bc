"""A cluster's faults, in the nodes of a Job: power loss, eviction, suspension, loss at the end."""

import hashlib
import random
import time
from pathlib import Path

import pytest
from harness import SHARING, SMALL, Job, command_line, read_rows
from manifests import Document

from faults.cluster import assert_same
from faults.ledger import Notes
from faults.pods import Pod, Pods, missing, rendered
from pipeline.record.checkpoint_files import step_of

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

STEPS = 60


def manifests(digits: Path) -> list[Document]:
    length = ("train.epochs=100", f"train.max_steps={STEPS}", "evaluate.every=1000 epochs")
    return rendered(digits, *SMALL, *length, "checkpoint.every=7 steps")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Job:
    with Pods(manifests(digits), tmp_path_factory.mktemp("undisturbed") / "job") as pods:
        assert pods.start().wait() == 0, pods.logs()
        return pods.run


@pytest.mark.full
@pytest.mark.fault("L1", ci=1, long=5)
@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_frozen_node_is_replaced_and_writes_nothing_when_it_thaws(
    tmp_path: Path, digits: Path, undisturbed: Job, node: int, seed: int, notes: Notes
) -> None:
    draw = random.Random(100 * node + seed)
    with Pods(manifests(digits), tmp_path / "job") as pods:
        end = pods.start_and_watch(900)
        pods.wait_for_step(draw.randint(3, STEPS - 20))
        time.sleep(draw.uniform(0, 0.3))
        survivors = pods[1 - node].trainers()
        old = pods.freeze(node)
        seconds = pods.wait_until(
            lambda: not {*survivors} & {*pods[1 - node].trainers()}, "end of the other ranks", 75
        )
        notes.note("L1", seconds=seconds)
        pods.replace_lost(node)
        if thaws_early := seed % 2 == 1:
            pods.wait_until(lambda: len(pods.run.starts()) == 2, "start")
            _assert_ends_alone(pods, old)
        assert end() == 0, pods.logs()
        assert_same(pods.run, undisturbed)
        if not thaws_early:
            before = _contents(pods.run.folder)
            _assert_ends_alone(pods, old)
            assert _contents(pods.run.folder) == before


@pytest.mark.full
@pytest.mark.fault("L2", ci=1, long=10)
def test_a_suspended_job_resumes_with_the_same_bits(
    tmp_path: Path, digits: Path, undisturbed: Job, seed: int, notes: Notes
) -> None:
    draw = random.Random(seed)
    with Pods(manifests(digits), tmp_path / "job") as pods:
        end = pods.start_and_watch(600)
        for first, last in ((2, STEPS // 3), (STEPS // 2, STEPS - 15)):
            pods.wait_for_step(draw.randint(first, last))
            seconds = pods.suspend()
            notes.note("L2", seconds=seconds)
            assert seconds < 10 * SHARING
            assert step_of(pods.run.checkpoints()[-1]) == pods.run.step(), "the last step is saved"
            pods.resume()
        assert end() == 0, pods.logs()
        assert_same(pods.run, undisturbed)


@pytest.mark.full
@pytest.mark.fault("L3", ci=2, long=10)
def test_a_peer_lost_at_the_end_does_not_keep_the_job_from_completing(
    tmp_path: Path, digits: Path, undisturbed: Job, seed: int, notes: Notes
) -> None:
    """Odd seeds lose pod 1 in the 3 s before rank 0's end, even ones in the second after it."""
    draw = random.Random(seed)
    with Pods(manifests(digits), tmp_path / "job") as pods:
        end = pods.start_and_watch(300)
        if seed % 2:
            expected_end = _expected_end(pods, undisturbed)
            time.sleep(max(0, expected_end - draw.uniform(0, 3) - time.monotonic()))
        else:
            pods.wait_until(lambda: _is_finished(pods.run), "end of rank 0")
            time.sleep(draw.uniform(0, 1))
        lost = time.monotonic()
        if seed % 4 == 2:
            pods.freeze(1)
        else:
            pods[1].kill()
        assert end() == 0, pods.logs()
        notes.note("L3", seconds=time.monotonic() - lost)
        assert_same(pods.run, undisturbed)


@pytest.mark.long
@pytest.mark.fault("L3")
def test_without_a_success_policy_the_replacement_of_a_lost_peer_looks_for_node_0(
    tmp_path: Path, digits: Path
) -> None:
    with Pods(manifests(digits), tmp_path / "job") as pods:
        del pods.spec["successPolicy"]
        pods.start_and_watch(600)
        pods.wait_until(lambda: _is_finished(pods.run), "end of rank 0")
        pods.freeze(1)
        pods.wait_until(lambda: pods.succeeded == {0}, "end of pod 0")
        pods.replace_lost(1)
        pods.wait_until(lambda: (1, 75) in pods.failures, "exit of the replacement", 120)
        assert "the host name trainer-0.trainer does not resolve" in pods.logs()


@pytest.mark.full
@pytest.mark.fault("L4", ci=1, long=3)
@pytest.mark.parametrize("phase", ["preflight", "no name", "silent peer", "rendezvous"])
def test_a_pod_evicted_before_training_is_gone_in_seconds(
    tmp_path: Path, digits: Path, phase: str, seed: int, notes: Notes
) -> None:
    """Evict pod 1 in preflight, while pod 0's name does not resolve, or while pod 0 is silent.

    In the phase "rendezvous" evict pod 0, which hosts the rendezvous and waits there for pod 1.
    Pod 1 has not started: no other pod waits.
    """
    pod = 0 if phase == "rendezvous" else 1
    with Pods(manifests(digits), tmp_path / "job") as pods:
        if phase == "silent peer":
            pods.start_pod(0)
            pods.freeze(0)
        pods.start_pod(pod)
        words = "pipeline doctor" if phase in ("preflight", "no name") else "torchrun"
        pods.wait_until(lambda: any(words in command_line(pid) for pid in pods[pod].processes()), words)
        time.sleep(random.Random(seed).uniform(*(8, 12) if phase == "no name" else (0, 6)))
        seconds = pods.evict(pod, is_replaced=False)
        notes.note("L4", seconds=seconds)
        assert seconds < 5 * SHARING, pods.logs()
        assert pods[pod].code != 0, "it must not count as a success"


def _expected_end(pods: Pods, undisturbed: Job) -> float:
    """Return when rank 0 should write its FINISHED row, on the clock of `time.monotonic`.

    The pace of the first quarter gives the end of the last step. The time from there to the row,
    with the last checkpoint, is that of the undisturbed run. Two undisturbed runs wrote the row
    0.6 s and 0.7 s before the instant that this function had returned.
    """
    first = pods.wait_for_step(2)
    began = time.monotonic()
    last = pods.wait_for_step(STEPS // 4)
    now = time.monotonic()
    pace = (now - began) / (last - first)
    journal = read_rows(undisturbed.folder / "journal.jsonl")
    (finished,) = [row["time"] for row in journal if row.get("status") == "FINISHED"]
    last_step = max(row["time"] for row in journal if "train/loss" in row.get("metrics", {}))
    return now + pace * (STEPS - last) + (finished - last_step) / 1000


def _is_finished(run: Job) -> bool:
    return any(row.get("status") == "FINISHED" for row in read_rows(run.folder / "journal.jsonl"))


def _assert_ends_alone(pods: Pods, old: Pod) -> None:
    pods.thaw(old)
    pods.wait_until(lambda: not old.processes(), "end of the thawed pod's processes", 10 * SHARING)


def _contents(folder: Path) -> dict[str, tuple[str, int]]:
    """Return the hash and the time of each file."""
    return {str(path.relative_to(folder)):
            (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
            for path in folder.rglob("*") if path.is_file()}  # fmt: skip
