"""`pipeline k8s watch` says how a Job goes and ends with it. kubectl is a script with answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import Result, quick

KUBECTL = """\
#!/bin/bash
cd "$(dirname "$0")"
[ "$1 $2" = "--namespace vision" ] || exit 9
if [ "$3" = logs ]; then echo "the log of $4"; exit; fi
set -- *.json
[ $# != 0 ] && [ -e "$1" ] || { echo no route to the cluster >&2; exit 1; }
cat "$1"
[ $# = 1 ] || rm "$1"
"""
SOONER = "from pipeline.addons.deploy import watch; watch._POLL_S, watch._PATIENCE_S = 0.05, 1"


def job(end: str = "", message: str = "") -> dict[str, Any]:
    suspended = {"type": "Suspended", "status": "False"}
    conditions = [suspended, {"type": end, "status": "True", "message": message}] if end else None
    metadata = {"name": "trainer", "creationTimestamp": "0"}
    return {"kind": "Job", "metadata": metadata, "status": {"conditions": conditions}}


def pod(name: str, created: int, preflight: Any, trainer: Any = None, **more: Any) -> dict[str, Any]:
    """Return a pod of index 0 or 1, as its name says, with the states of its containers."""
    labels = {"batch.kubernetes.io/job-completion-index": name.split("-")[1]}
    trainer = trainer or {"waiting": {"reason": "PodInitializing"}}
    statuses = {"initContainerStatuses": [{"name": "preflight", "state": preflight}],
                "containerStatuses": [{"name": "trainer", "state": trainer}]}  # fmt: skip
    metadata = {"name": name, "creationTimestamp": str(created), "labels": labels}
    return {"kind": "Pod", "metadata": metadata, "status": {"phase": "Pending", **statuses, **more}}


def ended(code: int, message: str = "", reason: str = "Error") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


RUNS, DONE = {"running": {}}, ended(0)


def watch(folder: Path, *answers: list[dict[str, Any]]) -> Result:
    (folder / "kubectl").write_text(KUBECTL)
    (folder / "kubectl").chmod(0o755)
    for number, answer in enumerate(answers):
        (folder / f"{number}.json").write_text(json.dumps({"items": answer}))
    command = ("k8s", "watch", "--namespace", "vision")
    return quick(*command, prelude=SOONER, timeout=60, PATH=f"{folder}:/usr/bin:/bin")


def test_it_follows_pod_0_and_its_replacement_until_the_job_is_complete(tmp_path: Path) -> None:
    unscheduled = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                                   "message": "0/3 nodes have a GPU"}]}  # fmt: skip
    first, peer = pod("trainer-0-a", 1, DONE, RUNS), pod("trainer-1-b", 1, DONE, RUNS)
    lost = pod("trainer-0-a", 1, DONE, ended(137, reason="OOMKilled"))
    result = watch(
        tmp_path,
        [job(), pod("trainer-0-a", 1, RUNS), pod("trainer-1-b", 1, {}, **unscheduled)],
        [job(), first, pod("trainer-1-b", 1, {"waiting": {"reason": "ErrImagePull", "message": "no tag"}})],
        [job(), first, peer],
        [job(), peer, lost, pod("trainer-0-c", 2, DONE, RUNS)],
        [job("Complete"), peer, lost, pod("trainer-0-c", 2, DONE, DONE, phase="Succeeded")],
    )
    shown = result.ended_with(0).out.splitlines()
    logs = [line for line in dict.fromkeys(shown) if "log" in line]
    assert logs == ["the log of trainer-0-a", "the log of trainer-0-c"]
    assert shown[-1] == "the Job trainer is complete"
    assert result.err.splitlines() == [
        "trainer-0-a: preflight runs", "trainer-1-b: Pending: Unschedulable: 0/3 nodes have a GPU",
        "trainer-0-a: trainer runs", "trainer-1-b: preflight waits: ErrImagePull: no tag",
        "trainer-1-b: trainer runs", "trainer-0-a: trainer ended with exit code 137: OOMKilled",
        "trainer-0-c: trainer runs", "trainer-0-c: trainer is done",
    ]  # fmt: skip


@pytest.mark.parametrize("code", [2, 1])
def test_a_failed_job_ends_it_with_its_code_and_line(tmp_path: Path, code: int) -> None:
    rule = f"Container preflight for pod vision/trainer-1-b failed with exit code {code} matching FailJob"
    message = rule if code > 1 else "Job has reached the specified backoff limit"
    bad = pod("trainer-1-b", 1, ended(code, "ok  data\npipeline: /data is empty\nmore\n"), phase="Failed")
    result = watch(tmp_path, [job(), pod("trainer-0-a", 1, RUNS)], [job("Failed", message), bad])
    assert (result.code, message in result.error) == (code, True)
    line = f"trainer-1-b: preflight ended with exit code {code}: pipeline: /data is empty"
    assert line in result.err.splitlines()


def test_without_a_cluster_or_a_job_it_ends_with_75(tmp_path: Path) -> None:
    for answers, says in ([], "no route to the cluster"), ([[]], "apply the manifests"):
        assert says in watch(tmp_path, *answers).ended_with(75).error
