"""Test the manifests on a real cluster with kubectl: `make cluster-test`. `make test` does not.

Trains the digits once without a fault, and once for each case below. A case passes if the Job
completes, the weights are those of its reference run, and MLflow has one FINISHED run with every
metric once. Everything happens in a namespace made for the test and deleted at the end; logs,
events and journals of a failed case are in build/cluster-test-TIME.

    make cluster-test IMAGE=… MLFLOW_IMAGE=… RENDER="--cpu --single-node"

in-turn and the dark-node cases need a third node, and two commands that stop and restart one:

    ARGS='--only dark-node-0 --freeze "docker pause {node}" --thaw "docker unpause {node}"'

The faults come at steps 40 and 100 of 168. On fast machines make the run longer:
RENDER="train.epochs=60". Each result is a line of build/cluster.jsonl, and --page PAGE writes the
newest of each case between the page's marks, also without running a case (no --image).
"""

import argparse
import contextlib
import io
import json
import math
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from manifests import Document, one
from real_cluster import Cluster, Failure

from pipeline.cli.main import main as pipeline

ROOT = Path(__file__).parents[1]
RECEIPTS = ROOT / "docs/receipts"
REFERENCES = {"no-fault": "digits", "exact-one-process": "digits-exact"}
WORDS = ("run.deterministic=true", "checkpoint.every=10 steps", "track.every=2 steps")
POLL_S = 1.0
FAULT_STEP, SECOND_FAULT_STEP = 40, 100
DARK_S, STOPPED_S, MLFLOW_S, THAWED_S = 300, 15, 60, 30
"""Limits: until training continues without a lost node, until an evicted pod is gone, from Complete
to a FINISHED run in MLflow. THAWED_S: how long the old pod of a thawed node is watched."""


class Run:
    """One training on the cluster, with a time limit. Its folder has the name of the case."""

    def __init__(self, case: "Case", cluster: Cluster, given: argparse.Namespace) -> None:
        self.case, self.run_name, self.cluster, self.given = case, case.name, cluster, given
        self.documents = documents(case, given)
        self.end = math.inf
        self.note = ""

    def wait(self, text: str, condition: Callable[[], Any], within_s: float = math.inf) -> Any:
        """Poll until the condition is true; return its value.

        Raises Failure after the time limit, and at once if the Job has failed. A kubectl command
        that fails is repeated.
        """
        end, problem = min(self.end, time.monotonic() + within_s), ""
        while True:
            try:
                if value := condition():
                    return value
                outcome, problem = self.cluster.end_of("trainer"), ""
            except Failure as failure:
                outcome, problem = None, f" ({failure})"
            if outcome and outcome != "Complete":
                raise Failure(f"the Job is {outcome}, while the test waited for {text}")
            if time.monotonic() > end:
                raise Failure(f"the test waited too long for {text}{problem}")
            time.sleep(POLL_S)

    def rows(self) -> list[dict[str, Any]]:
        return self.cluster.journal(self.run_name)

    def wait_for_step(self, step: int) -> list[dict[str, Any]]:
        """Wait until a step is in the journal; return its rows."""

        def reached() -> list[dict[str, Any]]:
            rows = self.rows()
            return rows if any(row.get("step", 0) >= step for row in rows) else []

        rows: list[dict[str, Any]] = self.wait(f"step {step}", reached)
        if is_finished(rows):
            raise Failure(f"the training ended before the fault at step {step}: {_LONGER}")
        return rows

    def disturb(self, fault: Callable[[], object], within_s: float = math.inf) -> float:
        """Inject a fault; return the seconds until a new start has trained a step."""
        before, began = len(starts_of(self.rows())), time.monotonic()
        fault()

        def has_continued() -> bool:
            rows = self.rows()
            starts = starts_of(rows)
            return len(starts) > before and any("metrics" in row for row in rows[starts[-1] :])

        self.wait("the training to continue", has_continued, within_s)
        return time.monotonic() - began

    def pod(self, index: int) -> dict[str, Any]:
        """Return the pod of an index that is neither ended nor to be deleted; wait for it."""

        def living() -> list[dict[str, Any]]:
            return [
                pod
                for pod in self.cluster.pods(index)
                if is_active(pod) and "deletionTimestamp" not in pod["metadata"]
            ]

        pod: dict[str, Any] = self.wait(f"a pod of index {index}", living)[0]
        return pod

    def name(self, index: int) -> str:
        return str(self.pod(index)["metadata"]["name"])

    def is_complete(self) -> bool:
        return self.cluster.end_of("trainer") == "Complete"

    def is_gone(self, pod: str) -> bool:
        return not self.cluster.kubectl("get", "pod", pod, "--ignore-not-found", "--output", "name").strip()

    def patch(self, **spec: object) -> None:
        self.cluster.kubectl("patch", "job", "trainer", "--patch", json.dumps({"spec": spec}))


_LONGER = "make it longer, with train.epochs=60 in --render"


def starts_of(rows: list[dict[str, Any]]) -> list[int]:
    """Return the positions of the `started` rows of a journal."""
    return [number for number, row in enumerate(rows) if row.get("event") == "started"]


def is_finished(rows: list[dict[str, Any]]) -> bool:
    return any(row.get("event") == "ended" and row.get("status") == "FINISHED" for row in rows)


def node_counts(rows: list[dict[str, Any]]) -> list[int]:
    """Return the number of nodes of each start in a journal."""
    tags = [rows[number]["tags"] for number in starts_of(rows)]
    return [int(tag["world"]) // int(tag["processes_a_node"]) for tag in tags]


def is_active(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") in ("Pending", "Running")


def remove_pod(index: int, step: int = FAULT_STEP, *, by_eviction: bool = False) -> Callable[[Run], float]:
    def fault(run: Run) -> float:
        run.wait_for_step(step)
        pod = run.name(index)
        if by_eviction:
            return run.disturb(lambda: run.cluster.evict(pod))
        return run.disturb(lambda: run.cluster.kubectl("delete", "pod", pod, "--wait=false"))

    return fault


def kill_rank(run: Run) -> float:
    code = (
        "import os, pathlib\n"
        "for p in pathlib.Path('/proc').glob('[0-9]*/environ'):\n"
        "    if b'\\0RANK=' in b'\\0' + p.read_bytes(): os.kill(int(p.parent.name), 9); break\n"
    )
    run.wait_for_step(FAULT_STEP)
    words = ("exec", run.name(1), "--container", "trainer", "--", "python3", "-c", code)
    return run.disturb(lambda: run.cluster.kubectl(*words))


def evict_while_waiting(run: Run) -> None:
    """Evict pod 0 while it waits for pod 1, which the Job starts only with more parallelism."""

    def is_waiting() -> bool:
        statuses = run.pod(0)["status"].get("containerStatuses") or []
        return any("running" in status["state"] for status in statuses)

    run.wait("pod 0 to wait for pod 1", is_waiting)
    pod, began = run.name(0), time.monotonic()
    run.cluster.evict(pod)
    run.wait("the evicted pod to be gone", lambda: run.is_gone(pod), STOPPED_S)
    run.note = f"gone in {time.monotonic() - began:.0f} s"
    run.patch(parallelism=one(run.documents, "Job", "trainer")["spec"]["completions"])


def shrink_and_grow(step: int) -> Callable[[Run], float]:
    """Delete pod 1: training continues on 1 node, and later on 2 again."""

    def fault(run: Run) -> float:
        before, counts = len(starts_of(run.wait_for_step(step))), list[int]()
        pod = run.name(1)
        seconds = run.disturb(lambda: run.cluster.kubectl("delete", "pod", pod, "--wait=false"))

        def has_grown() -> bool:
            rows = run.rows()
            counts[:] = node_counts(rows)[before:]
            return is_finished(rows) or (1 in counts and counts[-1] == 2)

        run.wait("2 nodes to train again", has_grown)
        if not (1 in counts and counts[-1] == 2):
            raise Failure(f"no start on 1 node and then one on 2, but on {counts}; {_LONGER}")
        return seconds

    return fault


def suspend(step: int) -> Callable[[Run], float]:
    def fault(run: Run) -> float:
        run.wait_for_step(step)
        run.patch(suspend=True)
        run.wait("the suspended pods to be gone", lambda: not any(map(is_active, run.cluster.pods())))
        return run.disturb(lambda: run.patch(suspend=False))

    return fault


def in_turn(*faults: Callable[[Run], float]) -> Callable[[Run], float]:
    def fault(run: Run) -> float:
        seconds = [fault(run) for fault in faults]
        run.note = f"{', '.join(f'{s:.0f}' for s in seconds)} s"
        return max(seconds)

    return fault


def remove_mlflow(run: Run) -> None:
    run.wait_for_step(FAULT_STEP)
    run.cluster.kubectl("scale", "deployment/mlflow", "--replicas", "0")


def sync(run: Run) -> None:
    """Bring MLflow back and run the Job of `render --sync`."""
    run.cluster.kubectl("scale", "deployment/mlflow", "--replicas", "1")
    run.cluster.kubectl("rollout", "status", "deployment/mlflow", "--timeout=600s", timeout=630)
    found = render(run.given, "--sync", run.run_name)
    run.cluster.apply(found)
    (job,) = [document["metadata"]["name"] for document in found if document["kind"] == "Job"]
    outcome = run.wait("the Job of render --sync", lambda: run.cluster.end_of(job))
    if outcome != "Complete":
        raise Failure(f"the Job {job} is {outcome}")


def darken(index: int, step: int = FAULT_STEP, *, to_the_end: bool = True) -> Callable[[Run], float]:
    def fault(run: Run) -> float:
        run.wait_for_step(1)
        pod = run.pod(index)
        name, node = pod["metadata"]["name"], pod["spec"]["nodeName"]
        run.cluster.start_helper(run.documents, avoid_node=node)
        run.wait_for_step(step)
        with contextlib.ExitStack() as stack:
            stack.callback(shell, run.given.thaw, node)
            seconds = run.disturb(lambda: shell(run.given.freeze, node), DARK_S)
            if not to_the_end:
                return seconds
            run.wait("the old pod to be gone", lambda: run.is_gone(name))
            run.wait("the Job to complete", run.is_complete)
            before = run.cluster.hashes(run.run_name)
        time.sleep(THAWED_S * POLL_S)
        if run.cluster.hashes(run.run_name) != before:
            raise Failure(f"pod {name} wrote to the run's folder after its node {node} was thawed")
        return seconds

    return fault


def shell(command: str, node: str) -> None:
    """Run the user's command for a node. Raises Failure."""
    words = shlex.split(command.replace("{node}", shlex.quote(node)))
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=120, start_new_session=True)
    except (subprocess.SubprocessError, OSError) as error:
        detail = getattr(error, "stderr", None) or error
        raise Failure(f"{' '.join(words)}: {' '.join(str(detail).split())}") from None


@dataclass(frozen=True)
class Case:
    name: str
    text: str
    fault: Callable[[Run], float | None] | None = None
    options: tuple[str, ...] = ()
    reference: str = "no-fault"
    after: Callable[[Run], None] | None = None
    """Runs once the Job is complete."""
    parallelism: int | None = None
    """Pods that the Job starts with; None: all."""


_EXACT = ("run.exact=true",)
_ELASTIC = (*_EXACT, "--nodes", "1:2")
CASES = {
    case.name: case
    for case in (
        Case("no-fault", "the reference of the cases below"),
        Case("worker-deleted", "pod 1 deleted", remove_pod(1)),
        Case("node-0-deleted", "pod 0 deleted", remove_pod(0)),
        Case("rank-killed", "a rank of pod 1 killed", kill_rank),
        Case("evicted", "pod 1 evicted, as by a drain", remove_pod(1, by_eviction=True)),
        Case("evicted-node-0", "pod 0 evicted", remove_pod(0, by_eviction=True)),
        Case("evicted-while-waiting", "pod 0 evicted before pod 1 is there", evict_while_waiting,
             parallelism=1),
        Case("suspended", "the Job suspended and resumed, twice",
             in_turn(suspend(FAULT_STEP), suspend(SECOND_FAULT_STEP))),
        Case("mlflow-away-at-the-end", "MLflow stopped, then render --sync", remove_mlflow, after=sync),
        Case("exact-one-process", "the reference of elastic", None, (*_EXACT, "--nodes", "1"),
             "exact-one-process"),
        Case("elastic", "1 or 2 nodes, pod 1 deleted", shrink_and_grow(FAULT_STEP), _ELASTIC,
             "exact-one-process"),
        Case("in-turn", "elastic: pod 1 deleted, pod 0 deleted, its node frozen and thawed, suspended",
             in_turn(shrink_and_grow(8), remove_pod(0, 28), darken(0, 44, to_the_end=False), suspend(66)),
             _ELASTIC, "exact-one-process"),
        Case("dark-node-0", "the node of pod 0 frozen, later thawed", darken(0), after=sync),
        Case("dark-node-1", "the node of pod 1 frozen, later thawed", darken(1), after=sync),
    )
}  # fmt: skip


def render(given: argparse.Namespace, *words: str) -> list[Document]:
    """Return the documents that `pipeline k8s render` writes. Raises Failure."""
    fixed = ("--namespace", given.namespace, "--image", given.image, "--mlflow-image", given.mlflow_image)
    words = ("k8s", "render", "digits", *WORDS, *fixed, *shlex.split(given.render), *words)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        if pipeline([*words, "--out", folder]):
            raise Failure(f"pipeline {shlex.join(words)} failed")
        texts = [path.read_text() for path in sorted(Path(folder).glob("*.yaml"))]
    return [document for text in texts for document in yaml.safe_load_all(text)]


def documents(case: Case, given: argparse.Namespace) -> list[Document]:
    """Return the manifests of a case, for a run of its name."""
    found = render(given, *case.options)
    one(found, "ConfigMap", "trainer")["data"]["RUN_DIR"] = f"/runs/{case.name}"
    if case.parallelism:
        one(found, "Job", "trainer")["spec"]["parallelism"] = case.parallelism
    return found


@dataclass
class Result:
    case: str
    result: str = "not run"
    why: str = ""
    continued_s: float | None = None
    complete_s: float | None = None
    weights: str = ""
    mlflow: str = ""


def train(run: Run, result: Result, expected: str | None) -> None:
    """Run one case and fill in its result. Raises Failure."""
    case, cluster, given = run.case, run.cluster, run.given
    began = time.monotonic()
    cluster.start(run.documents)  # has limits of its own: the first start pulls the images
    run.end = time.monotonic() + given.limit
    if case.fault:
        result.continued_s = case.fault(run)
    run.wait("the Job to complete", run.is_complete)
    result.complete_s = time.monotonic() - began
    if case.after:
        case.after(run)
    lines = [row["line"] for row in run.rows() if row.get("event") == "ended" and "line" in row]
    if not lines:
        raise Failure("the Job is complete, but the journal has no done line")
    result.weights = lines[-1].rpartition("weights=")[2]
    if expected and result.weights != expected:
        raise Failure(f"the weights differ from those of {case.reference}: {result.weights} and {expected}")
    result.mlflow = check_mlflow(run)
    result.why = run.note


def check_mlflow(run: Run) -> str:
    """Return what MLflow has of the run. Raises Failure unless it is one complete run."""
    found = list[dict[str, Any]]()

    def has_one() -> bool:
        found[:] = run.cluster.mlflow_runs(run.run_name)
        return [mlflow_run["status"] for mlflow_run in found] == ["FINISHED"]

    try:
        run.wait("one FINISHED run in MLflow", has_one, MLFLOW_S)
    except Failure as failure:
        raise Failure(f"{failure}: it has {[mlflow_run['status'] for mlflow_run in found]}") from None
    expected = {(key, row["step"]) for row in run.rows() for key in row.get("metrics", {})}
    keys = {key for key, _ in expected}
    points = Counter((key, step) for key, step in found[0]["points"] if key in keys)
    twice = sorted(point for point, count in points.items() if count > 1)
    missing = sorted(expected - points.keys())
    if twice or missing:
        raise Failure(f"MLflow has {len(twice)} points twice, lacks {len(missing)}: {[*twice, *missing][:3]}")
    return f"1 run, {len(points)} points"


def chosen(given: argparse.Namespace) -> list[Case]:
    """Return the cases to run, with their references first."""
    names = set(given.only or CASES)
    names |= set() if given.receipts else {CASES[name].reference for name in names}
    return [case for name, case in CASES.items() if name in names]


def named(reference: str, step: int) -> Result:
    """Return the result of a reference as docs/receipts has it, from `make train` on CPUs."""
    receipt = json.loads((RECEIPTS / REFERENCES[reference] / "receipt.json").read_text())
    (weights,) = [row["weights"] for row in receipt["evaluations"] if row["step"] == step]
    return Result(reference, "passed", weights=weights)


def run_all(
    given: argparse.Namespace, cases: list[Case], results: dict[str, Result], references: dict[str, Result]
) -> None:
    """Run the cases in a new namespace; delete it on every path."""
    evidence = Path("build") / time.strftime("cluster-test-%Y%m%d-%H%M%S")
    cluster = Cluster(given.namespace, evidence)
    try:
        where = {"on": cluster.describe(), "with": given.render, "commit": commit()}
        cluster.make(one(render(given), "Namespace", given.namespace))
        for case in cases:
            result, reference = results[case.name], references[case.reference]
            if "frozen" in case.text and not (given.freeze and given.thaw):
                result.why = "give --freeze and --thaw, the commands that stop and restart a node"
            elif reference.result != "passed" and case.name != case.reference:
                result.why = f"its reference {case.reference} did not pass"
            else:
                print(f"{case.name}: {case.text}", flush=True)
                attempt(Run(case, cluster, given), result, reference.weights or None)
                given.ledger.parent.mkdir(parents=True, exist_ok=True)
                with open(given.ledger, "a") as file:
                    file.write(json.dumps({"date": time.strftime("%F"), **where, **asdict(result)}) + "\n")
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        print(f"deleting namespace {given.namespace}, if it was made", flush=True)
        cluster.delete()


def attempt(run: Run, result: Result, expected: str | None) -> None:
    """Run one case; save the evidence if it does not pass."""
    result.result, result.why = "failed", "interrupted"
    try:
        train(run, result, expected)
        result.result = "passed"
    except Failure as failure:
        result.why = str(failure)
    finally:
        if result.result != "passed":
            print(f"  {result.why}; evidence is in {run.cluster.save_evidence(run.case.name)}", flush=True)
    print(f"  {row(result)}", flush=True)


def row(result: Result) -> str:
    seconds = [
        f"{s:7.0f} s" if s is not None else f"{'–':>9}" for s in (result.continued_s, result.complete_s)
    ]
    cells = [result.weights[:15], result.mlflow, result.why]
    return f"{result.case:<23} {result.result:<8} {' '.join(seconds)}  {'  '.join(filter(None, cells))}"


def commit() -> str:
    """Return the commit of the code, with a + if files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def write_page(page: Path, ledger: Path) -> None:
    """Write the newest result of each case between the marks of a page."""
    rows = {row["case"]: row for row in map(json.loads, ledger.read_text().splitlines())}
    found = [row for name in CASES if (row := rows.get(name))]
    made = dict.fromkeys(f"on {r['date']} at {r['commit']}, {r['on']}, `{r['with']}`" for r in found)
    lines = [
        textwrap.fill(f"Written by `make cluster-test`, {'; '.join(made)}:", 100, break_on_hyphens=False), "",
        "| case | | result | trained again after | complete after | MLflow |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for case in CASES.values():
        row = rows.get(case.name, asdict(Result(case.name)))
        again, complete = (f"{s:.0f} s" if s else "" for s in (row["continued_s"], row["complete_s"]))
        again = row["why"] if row["result"] == "passed" and row["why"] else again
        cells = (case.name, case.text, row["result"], again, complete, row["mlflow"])
        lines.append(f"| {' | '.join(cells)} |")
    marks = r"(?<=<!-- cluster-test -->\n\n).*?(?=\n\n<!-- end -->)"
    text, count = re.subn(marks, lambda _: "\n".join(lines), page.read_text(), count=1, flags=re.DOTALL)
    if not count:
        sys.exit(f"{page} has no marks <!-- cluster-test --> and <!-- end -->")
    page.write_text(text)


def parse(words: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--image", default="", help="training image, in a registry of the cluster")
    add("--mlflow-image", default="", help="MLflow image, likewise")
    add("--render", default="", metavar="OPTIONS", help="further options and words of `pipeline k8s render`")
    add("--namespace", default=f"ddp-pipeline-test-{secrets.token_hex(3)}", help="default: a new name")
    add("--only", action="append", default=[], choices=CASES, metavar="CASE", help="run it; may be repeated")
    add("--limit", type=float, default=900, metavar="SECONDS", help="time limit of a case (default 900)")
    add("--freeze", metavar="COMMAND", help="stops a node: its name takes the place of {node}")
    add("--thaw", metavar="COMMAND", help="restarts the node")
    add(
        "--receipts", type=int, metavar="STEP", help="compare with docs/receipts (CPUs), and run no reference"
    )
    ledger = ROOT / "build/cluster.jsonl"
    add("--ledger", type=Path, default=ledger, metavar="FILE", help="append the results to this file")
    add("--page", type=Path, metavar="FILE", help="write the newest results between the marks of this page")
    add("--list", action="store_true", help="list the cases")
    given = parser.parse_args(words)
    is_run = given.image or given.mlflow_image or not (given.list or given.page)
    if is_run and not (given.image and given.mlflow_image):
        parser.error("--image and --mlflow-image are required: images that the cluster can pull")
    return given


def main(words: list[str] | None = None) -> int:
    given = parse(words)
    if given.list:
        print("\n".join(f"{case.name:<23} {case.text}" for case in CASES.values()))
        return 0
    if given.page and not given.image:
        write_page(given.page, given.ledger)
        return 0
    cases = chosen(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = {case.name: Result(case.name) for case in cases}
    references = {name: named(name, given.receipts) for name in REFERENCES} if given.receipts else results
    try:
        run_all(given, cases, results, references)
    except Failure as failure:
        print(f"on_cluster: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        print("case                    result    continued  complete  weights, MLflow")
        print("\n".join(row(result) for result in results.values()), flush=True)
        if given.page and given.ledger.exists():
            write_page(given.page, given.ledger)
    return int(any(result.result == "failed" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
