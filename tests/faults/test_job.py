"""The rendered Job without a cluster: its pods run in network namespaces and meet faults there."""

import json
import time
from pathlib import Path

import pytest
from harness import read_rows

from faults.pods import Pods, missing, rendered

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


WORDS = ("model.arch=shufflenet_v2_x0_5", "batch.global=48", "run.deterministic=true", "run.trace=true",
         "checkpoint.every=5 steps", "evaluate.every=1000 epochs")  # fmt: skip


@pytest.mark.full
@pytest.mark.fault("G2", ci=1, long=20)
def test_a_permanent_network_cut_ends_both_sides(tmp_path: Path, digits: Path) -> None:
    limit = 15
    words = ("train.max_steps=5000", "train.epochs=1000", f"run.timeout={limit}")
    with Pods(rendered(digits, *WORDS, *words), tmp_path / "cut") as pods:
        pods.start()
        pods.wait_for_step(8)
        pods[1].set_network("down")
        before = {pid for pod in (0, 1) for pid in pods[pod].trainers()}
        pods.wait_until(
            lambda: not before & {pid for pod in (0, 1) for pid in pods[pod].trainers()},
            "end of both sides", limit + 15,
        )  # fmt: skip
        step = pods.run.step()
        time.sleep(3)
        assert pods.run.step() == step, "neither side continues alone"


@pytest.mark.parametrize(
    ("code", "words", "edited", "says"),
    [(2, (), ("batch.global=48", "batch.global=47"), "batch.global=47 does not divide by 2 processes"),
     pytest.param(
         2, (), ("model.arch=shufflenet_v2_x0_5", "model.arch=resnet999"),
         "model.arch=resnet999 is not a classification model", marks=pytest.mark.full,
     ),
     pytest.param(3, ("optimizer.lr=1e6", "schedule.warmup=0"), ("", ""), "lower optimizer.lr",
                  marks=[pytest.mark.full, pytest.mark.fault("I1")])],
)  # fmt: skip
def test_a_failure_that_a_restart_would_repeat_fails_the_job_at_once(
    tmp_path: Path, digits: Path, code: int, words: tuple[str, ...], edited: tuple[str, str], says: str
) -> None:
    # `render` refuses wrong words, so somebody has edited the manifests
    wrong = [json.loads(json.dumps(item).replace(*edited)) for item in rendered(digits, *WORDS, *words)]
    with Pods(wrong, tmp_path / "wrong") as pods:
        assert pods.start().wait() == code
        assert code == 3 or len(pods.failures) == 1, "nothing is started again"
        assert len(pods.run.starts()) <= 1, "a start that repeats the failure does not train"
        assert says in pods.logs()


@pytest.mark.full
@pytest.mark.fault("G3", ci=1, long=10)
def test_a_late_peer_does_not_fail_the_job(tmp_path: Path, digits: Path) -> None:
    words = ("train.max_steps=4",)
    with Pods(rendered(digits, *WORDS, *words), tmp_path / "late") as pods:
        pods.name_all(without=(0,))
        pods.start_pod(1)
        time.sleep(4)
        pods.name_all()
        pods.start_pod(0)
        assert pods.wait() == 0, pods.logs()
        assert pods.failures == []


@pytest.mark.full
@pytest.mark.fault("L3", ci=1, long=5)
def test_node_0_lost_after_the_last_step_does_not_keep_the_job_from_completing(
    tmp_path: Path, digits: Path
) -> None:
    """Pod 1 may have succeeded for good: the preflight of the new pod 0 finds the finished run."""
    with Pods(rendered(digits, *WORDS, "train.max_steps=6"), tmp_path / "end") as pods:
        end = pods.start_and_watch(300)
        journal = pods.run.folder / "journal.jsonl"
        pods.wait_until(
            lambda: any(row.get("status") == "FINISHED" for row in read_rows(journal)), "end of rank 0"
        )
        pods[0].kill()
        assert end() == 0, pods.logs()
        log = (pods.folder / "pod-0.log").read_text()
    assert "the run is already finished" in log
    assert "\ndone step=6 " in log
