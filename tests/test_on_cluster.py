"""Run tests/on_cluster.py with a fake kubectl: test its commands, checks, evidence and clean-up.

It handles signals, so it runs in a process of its own, with a time limit. A shell starts a command
in the background (`pytest &`) with SIGINT ignored; that process resets it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import on_cluster
import pytest
import yaml
from harness import SHARING
from manifests import one
from real_cluster import LABEL

import pipeline as package

REPOSITORY = Path(package.__file__).parents[1]
NAMESPACE = "ddp-pipeline-test-1"
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv.pop(1))
import on_cluster
from real_cluster import Cluster
from test_on_cluster import rendered
on_cluster.POLL_S, on_cluster.render_texts = 0.0, rendered
exec(sys.argv.pop(1))
sys.exit(on_cluster.main(sys.argv[1:]))
"""
DARK = ("--freeze", "kubectl freeze {node}", "--thaw", "kubectl thaw {node}")


class Fake:
    """The fake cluster: its state, its calls, and a run of on_cluster.py against it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = self.error = ""
        self.set()

    def set(self, namespace: object = None, **quirks: object) -> None:
        state = {
            "namespace": namespace,
            "quirks": quirks,
            "mlflow": 1,
            "sent": [],
            "hash": "journal.jsonl 5a3e",
        }
        (self.folder / "state.json").write_text(json.dumps(state))
        (self.folder / "calls.jsonl").write_text("")

    @property
    def state(self) -> dict[str, Any]:
        return json.loads((self.folder / "state.json").read_text())

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "calls.jsonl").read_text().splitlines()]

    @property
    def verbs(self) -> list[str]:
        """Return the calls as text, without the namespace."""
        return [" ".join(call["arguments"]).removeprefix(f"--namespace {NAMESPACE} ") for call in self.calls]

    def run(self, *words: str, only: str = "", change: str = "") -> dict[str, dict[str, Any]]:
        """Run on_cluster.py; return its results by case, and its exit code as `code`.

        change: statements that change the module `on_cluster` or the class `Cluster` before.
        """
        file = self.folder / "results.json"
        cases = [word for name in only.split() for word in ("--only", name)]
        fixed = (
            "--image",
            "registry.example/t:1",
            "--mlflow-image",
            "registry.example/m:1",
            "--namespace",
            NAMESPACE,
        )
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(REPOSITORY / "tests"), change, *fixed, "--limit", "20", *cases, *words,
             "--json", str(file)],
            cwd=self.folder, capture_output=True, text=True, timeout=30 * SHARING, check=False, start_new_session=True,
            stdin=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        )  # fmt: skip
        self.out, self.error = done.stdout, done.stderr
        assert file.exists(), done.stderr
        return {"code": {"code": done.returncode}} | {
            result["case"]: result for result in json.loads(file.read_text())
        }


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Return a fake cluster, whose manifests are those of k8s/ instead of rendered ones."""
    program = tmp_path / "bin/kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {REPOSITORY}/tests/fake_kubectl.py "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("FAKE_CLUSTER", str(tmp_path))
    return Fake(tmp_path)


def rendered(*words: str) -> list[str]:
    """Return the manifests of k8s/ in the test's namespace, changed as `words` ask."""
    if "--sync" in words:
        metadata = f"{{name: sync-{words[-1]}, namespace: {NAMESPACE}}}"
        return [f"apiVersion: batch/v1\nkind: Job\nmetadata: {metadata}\n"]
    found = [
        d
        for path in sorted((REPOSITORY / "k8s").glob("*.yaml"))
        for d in yaml.safe_load_all(path.read_text())
    ]
    job = one(found, "Job", "trainer")["spec"]
    if words[-2:] == ("--nodes", "1"):
        job["completions"] = job["parallelism"] = 1
    if words[-2:] == ("--nodes", "1:2"):
        one(found, "ConfigMap", "trainer")["data"]["PET_NNODES"] = "1:2"
    return [yaml.safe_dump_all(found).replace("ddp-pipeline\n", f"{NAMESPACE}\n")]


def test_every_case_passes_on_a_cluster_that_keeps_the_promises(fake: Fake) -> None:
    results = fake.run(*DARK)
    assert results.pop("code") == {"code": 0}, fake.out
    assert list(results) == list(on_cluster.CASES)
    assert {result["result"] for result in results.values()} == {"passed"}
    assert {result["weights"] for result in results.values()} == {"sha256:5a3e"}
    assert {result["mlflow"] for result in results.values()} == {"1 run, 168 points"}
    disturbed = {name for name, result in results.items() if result["continued_s"] is not None}
    assert disturbed == set(on_cluster.CASES) - {
        "no-fault", "evicted-while-waiting", "peer-lost-at-the-end", "mlflow-away-at-the-end",
        "exact-one-process",
    }  # fmt: skip
    table = fake.out.split("case  ")[1]
    assert all(name in table for name in results)
    assert "not run" not in table
    assert "pod 1 was still running, deleted in" in results["peer-lost-at-the-end"]["why"]
    assert results["elastic"]["why"] == "nodes of the later starts: 1, 2"
    assert not (fake.folder / "build").exists(), "evidence is for cases that fail"
    assert_only_its_namespace(fake)
    verbs = fake.verbs
    assert verbs[-1].startswith(f"delete namespace {NAMESPACE}")
    assert sum(verb.startswith("create --raw ") for verb in verbs) == 3
    (eviction, *_) = [call for call in fake.calls if "--raw" in call["arguments"]]
    assert json.loads(eviction["text"]) == {
        "apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "trainer-1-0", "namespace": NAMESPACE},
    }  # fmt: skip
    assert [verb for verb in verbs if verb.startswith(("freeze", "thaw"))] == [
        "freeze node-0", "thaw node-0", "freeze node-1", "thaw node-1",
    ]  # fmt: skip


def assert_only_its_namespace(fake: Fake) -> None:
    """Assert that no call reaches another namespace, a node, or several pods by a selector."""
    for call in fake.calls:
        verb = call["arguments"][0] if call["arguments"][0] in ("freeze", "thaw") else call["arguments"][2]
        if verb in ("freeze", "thaw"):
            continue
        assert call["arguments"][:2] == ["--namespace", NAMESPACE]
        assert not {"--all-namespaces", "-A", "--all", "nodes", "node"} & set(call["arguments"])
        assert verb != "delete" or "--selector" not in call["arguments"]
        if verb == "apply":
            items = json.loads(call["text"])["items"]
            assert {item["metadata"]["namespace"] for item in items} == {NAMESPACE}
            assert "Namespace" not in {item["kind"] for item in items}


def test_only_a_namespace_of_an_earlier_test_is_replaced(fake: Fake) -> None:
    fake.set(namespace={"metadata": {"name": NAMESPACE, "labels": {"team": "vision"}}})
    assert fake.run(only="no-fault")["code"] == {"code": 1}
    assert f"namespace {NAMESPACE} exists and was not made by a test" in fake.error
    assert {verb.split()[0] for verb in fake.verbs} == {"get"}
    fake.set(namespace={"metadata": {"name": NAMESPACE, "labels": {LABEL: "earlier"}}})
    assert fake.run(only="no-fault")["code"] == {"code": 0}
    assert sum(verb.startswith("delete namespace") for verb in fake.verbs) == 2


def test_a_failed_job_is_noticed_at_once_and_its_evidence_is_kept(fake: Fake) -> None:
    fake.set(fails="evicted")
    results = fake.run(only="evicted suspended")
    assert results["code"] == {"code": 1}
    assert {name: results[name]["result"] for name in ("no-fault", "evicted", "suspended")} == {
        "no-fault": "passed", "evicted": "failed", "suspended": "passed",
    }  # fmt: skip
    assert "the Job is Failed: BackoffLimitExceeded" in results["evicted"]["why"]
    (folder,) = (fake.folder / "build").glob("cluster-test-*/evicted")
    assert {path.name for path in folder.iterdir()} >= {
        "events.txt", "describe.txt", "objects.yaml", "journal.jsonl", "files.txt", "trainer-0-0.preflight.log",
        "trainer-0-0.trainer.log", "trainer-0-0.trainer.previous.log", "trainer-1-1.trainer.log",
    }  # fmt: skip
    assert '"event": "started"' in (folder / "journal.jsonl").read_text()
    verbs = fake.verbs
    assert verbs[-1].startswith("delete namespace")


@pytest.mark.parametrize(
    ("case", "quirks", "why"),
    [
        ("suspended", {"weights of suspended": "0bad"}, "the weights differ from those of no-fault"),
        ("no-fault", {"runs": 2}, "too long for one FINISHED run in MLflow"),
        ("no-fault", {"twice": 1}, "MLflow has 1 points twice and lacks 0"),
        ("elastic", {"never shrinks": True}, "no start on 1 node after the loss of pod 1"),
        (
            "dark-node-1",
            {"written after the thaw": "more"},
            "wrote to the run's folder after its node node-1 was",
        ),
        ("dark-node-0", {"freeze fails": True}, "kubectl freeze node-0: no such node"),
    ],
)
def test_a_broken_promise_fails_its_case(fake: Fake, case: str, quirks: dict[str, object], why: str) -> None:
    fake.set(**quirks)
    results = fake.run(*DARK, only=case, change="on_cluster.MLFLOW_S = 0")
    assert results["code"] == {"code": 1}
    assert (results[case]["result"], why in results[case]["why"]) == ("failed", True), results[case]
    frozen, thawed = ([verb for verb in fake.verbs if verb.startswith(word)] for word in ("freeze", "thaw"))
    assert len(frozen) == len(thawed)


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_saves_the_evidence_and_cleans_up(fake: Fake, name: str, code: int) -> None:
    change = f"""
method = Cluster.end_of
def interrupted(*arguments):
    method(*arguments)
    signal.raise_signal(signal.{name})
Cluster.end_of = interrupted
"""
    results = fake.run(change=change)
    assert results.pop("code") == {"code": code}
    first = results.pop("no-fault")
    assert {result["result"] for result in results.values()} == {"not run"}
    assert (first["result"], first["why"]) == ("failed", "interrupted")
    assert list((fake.folder / "build").glob("cluster-test-*/no-fault/events.txt"))
    assert fake.state["namespace"] is None


def test_every_case_renders_valid_manifests(capsys: pytest.CaptureFixture[str]) -> None:
    code = on_cluster.main(["--dry-run", "--render", "--cpu --single-node"])
    out = capsys.readouterr().out
    assert (code, out.splitlines()[-1]) == (0, "all manifests are valid"), out
    assert len(out.splitlines()) == len(on_cluster.CASES) + 1
