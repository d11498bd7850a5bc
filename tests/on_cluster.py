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
newest of each case between the page's marks.
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
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from manifests import Document, one
from real_cluster import Cluster, Failure

from pipeline.cli.main import main as pipeline

ROOT = Path(__file__).parents[1]
REFERENCES = {"no-fault": "digits", "exact-one-process": "digits-exact"}
WORDS = ("run.deterministic=true", "checkpoint.every=10 steps", "track.every=2 steps")
FAULT_STEP = 40

Fault = Callable[["Run"], list[float]]
"""Disturbs a run; returns the seconds until it trained again, for each fault."""


class Run:
    """One training on the cluster, with a time limit. Its folder has the name of the case."""

    def __init__(self, case: "Case", cluster: Cluster, given: argparse.Namespace) -> None:
        self.case, self.cluster, self.given = case, cluster, given
        self.documents = render(given, *case.options)
        one(self.documents, "ConfigMap", "trainer")["data"]["RUN_DIR"] = f"/runs/{case.name}"
        one(self.documents, "Job", "trainer")["spec"] |= case.job
        self.end = math.inf

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
            time.sleep(1)

    def rows(self) -> list[dict[str, Any]]:
        return self.cluster.journal(self.case.name)

    def wait_for_step(self, step: int) -> None:
        self.wait(f"step {step}", lambda: any(row.get("step", 0) >= step for row in self.rows()))
        if is_finished(self.rows()):
            raise Failure(f"the training ended before the fault at step {step}: {_LONGER}")

    def disturb(self, fault: Callable[[], object], within_s: float = math.inf) -> list[float]:
        """Inject a fault; return the seconds until a new start has trained a step."""
        before, began = len(starts_of(self.rows())), time.monotonic()
        fault()

        def has_continued() -> bool:
            rows = self.rows()
            starts = starts_of(rows)
            return len(starts) > before and any("metrics" in row for row in rows[starts[-1] :])

        self.wait("the training to continue", has_continued, within_s)
        return [time.monotonic() - began]

    def pod(self, index: int) -> dict[str, Any]:
        """Return the pod of an index that is neither ended nor to be deleted; wait for it."""

        def living() -> list[dict[str, Any]]:
            pods = filter(is_active, self.cluster.pods(index))
            return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

        return self.wait(f"a pod of index {index}", living)[0]

    def patch(self, **spec: object) -> None:
        self.cluster.kubectl("patch", "job", "trainer", "--patch", json.dumps({"spec": spec}))


_LONGER = "make it longer, with train.epochs=60 in --render"


def starts_of(rows: list[dict[str, Any]]) -> list[int]:
    """Return the positions of the `started` rows of a journal."""
    return [number for number, row in enumerate(rows) if row.get("event") == "started"]


def is_finished(rows: list[dict[str, Any]]) -> bool:
    return any(row.get("event") == "ended" and row.get("status") == "FINISHED" for row in rows)


def is_active(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") in ("Pending", "Running")


def remove_pod(run: Run, index: int, step: int = FAULT_STEP) -> list[float]:
    run.wait_for_step(step)
    words = ("delete", "pod", run.pod(index)["metadata"]["name"], "--wait=false")
    return run.disturb(lambda: run.cluster.kubectl(*words))


def evict(run: Run, index: int) -> list[float]:
    run.wait_for_step(FAULT_STEP)
    pod = run.pod(index)["metadata"]["name"]
    return run.disturb(lambda: run.cluster.evict(pod))


def kill_rank(run: Run) -> list[float]:
    code = (
        "import os, pathlib\n"
        "for p in pathlib.Path('/proc').glob('[0-9]*/environ'):\n"
        "    if b'\\0RANK=' in b'\\0' + p.read_bytes(): os.kill(int(p.parent.name), 9); break\n"
    )
    run.wait_for_step(FAULT_STEP)
    words = ("exec", run.pod(1)["metadata"]["name"], "--container", "trainer", "--", "python3", "-c", code)
    return run.disturb(lambda: run.cluster.kubectl(*words))


def evict_while_waiting(run: Run) -> list[float]:
    """Evict pod 0 while it waits for pod 1, which the Job starts only with more parallelism."""

    def is_waiting() -> bool:
        statuses = run.pod(0)["status"].get("containerStatuses") or []
        return any("running" in status["state"] for status in statuses)

    run.wait("pod 0 to wait for pod 1", is_waiting)
    pod = run.pod(0)["metadata"]["name"]
    run.cluster.evict(pod)
    # it does not use its grace period
    run.wait("another pod 0", lambda: run.pod(0)["metadata"]["name"] != pod, 60)
    run.patch(parallelism=2)
    return []


def shrink_and_grow(run: Run, step: int = FAULT_STEP) -> list[float]:
    """Delete pod 1: training continues on 1 node, and later on 2 again."""
    run.wait_for_step(step)
    before, counts = len(starts_of(run.rows())), list[int]()
    seconds = remove_pod(run, 1, step)

    def has_grown() -> bool:
        rows = run.rows()
        tags = [rows[start]["tags"] for start in starts_of(rows)[before:]]
        counts[:] = [int(tag["world"]) // int(tag["processes_a_node"]) for tag in tags]
        return is_finished(rows) or (counts[-1:] == [2] and 1 in counts)

    run.wait("2 nodes to train again", has_grown)
    if counts[-1:] != [2] or 1 not in counts:
        raise Failure(f"no start on 1 node and then one on 2, but on {counts}; {_LONGER}")
    return seconds


def suspend(run: Run, step: int = FAULT_STEP) -> list[float]:
    run.wait_for_step(step)
    run.patch(suspend=True)
    run.wait("the suspended pods to be gone", lambda: not any(map(is_active, run.cluster.pods())))
    return run.disturb(lambda: run.patch(suspend=False))


def darken(run: Run, index: int, step: int = FAULT_STEP) -> list[float]:
    run.wait_for_step(1)
    node = run.pod(index)["spec"]["nodeName"]
    run.cluster.start_helper(run.documents, avoid_node=node)
    run.wait_for_step(step)
    try:
        return run.disturb(lambda: shell(run.given.freeze, node), 300)
    finally:
        shell(run.given.thaw, node)


def in_turn(run: Run, *, faults: tuple[Fault, ...]) -> list[float]:
    return [seconds for fault in faults for seconds in fault(run)]


def remove_mlflow(run: Run) -> list[float]:
    run.wait_for_step(FAULT_STEP)
    run.cluster.kubectl("scale", "deployment/mlflow", "--replicas", "0")
    return []


def sync(run: Run) -> None:
    """Bring MLflow back and run the Job of `render --sync`."""
    run.cluster.kubectl("scale", "deployment/mlflow", "--replicas", "1")
    run.cluster.kubectl("rollout", "status", "deployment/mlflow", "--timeout=600s", timeout=630)
    found = render(run.given, "--sync", run.case.name)
    run.cluster.apply(found)
    (job,) = [document["metadata"]["name"] for document in found if document["kind"] == "Job"]
    outcome = run.wait("the Job of render --sync", lambda: run.cluster.end_of(job))
    if outcome != "Complete":
        raise Failure(f"the Job {job} is {outcome}")


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
    fault: Fault | None = None
    options: tuple[str, ...] = ()
    reference: str = "no-fault"
    after: Callable[[Run], None] | None = None
    """Runs once the Job is complete."""
    job: dict[str, Any] = field(default_factory=dict)
    """Other fields of the Job's spec."""


_EXACT = ("run.exact=true",)
_ELASTIC = (*_EXACT, "--nodes", "1:2")
CASES = {
    case.name: case
    for case in (
        Case("no-fault", "no fault"),
        Case("worker-deleted", "pod 1 deleted", partial(remove_pod, index=1)),
        Case("node-0-deleted", "pod 0 deleted", partial(remove_pod, index=0)),
        Case("rank-killed", "a rank of pod 1 killed", kill_rank),
        Case("evicted", "pod 1 evicted", partial(evict, index=1)),
        Case("evicted-node-0", "pod 0 evicted", partial(evict, index=0)),
        Case("evicted-while-waiting", "pod 0 evicted before pod 1 is there", evict_while_waiting,
             job={"parallelism": 1}),
        Case("suspended", "suspended and resumed, twice",
             partial(in_turn, faults=(suspend, partial(suspend, step=100)))),
        Case("mlflow-away-at-the-end", "MLflow stopped, then render --sync", remove_mlflow, after=sync),
        Case("exact-one-process", "exact, 1 process", None, (*_EXACT, "--nodes", "1"),
             "exact-one-process"),
        Case("elastic", "elastic: pod 1 deleted", shrink_and_grow, _ELASTIC,
             "exact-one-process"),
        Case("in-turn", "elastic: pods 1 and 0 deleted, node frozen, suspended",
             partial(in_turn, faults=(partial(shrink_and_grow, step=8), partial(remove_pod, index=0, step=28),
                                      partial(darken, index=0, step=44), partial(suspend, step=66))),
             _ELASTIC, "exact-one-process"),
        Case("dark-node-0", "node of pod 0 frozen", partial(darken, index=0), after=sync),
        Case("dark-node-1", "node of pod 1 frozen", partial(darken, index=1), after=sync),
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


@dataclass
class Result:
    case: str
    result: str = "not run"
    why: str = ""
    continued: str = ""
    """Seconds from each fault to a step of a new start."""
    complete: str = ""
    """Seconds from the Job's start to its end."""
    weights: str = ""
    mlflow: str = ""


def attempt(run: Run, result: Result, expected: str | None) -> None:
    """Run one case and fill in its result; save the evidence if it does not pass."""
    result.result, result.why = "failed", "interrupted"
    try:
        train(run, result)
        if expected and result.weights != expected:
            raise Failure(f"the weights differ from those of {run.case.reference}, {expected}")
        result.mlflow = check_mlflow(run)
        result.result, result.why = "passed", ""
    except Failure as failure:
        result.why = str(failure)
    finally:
        if result.result != "passed":
            print(f"  {result.why}; evidence is in {run.cluster.save_evidence(run.case.name)}", flush=True)
    print(f"  {row(result)}", flush=True)


def train(run: Run, result: Result) -> None:
    """Train, with the case's faults. Raises Failure."""
    began = time.monotonic()
    run.cluster.start(run.documents)  # has limits of its own: the first start pulls the images
    run.end = time.monotonic() + run.given.limit
    if run.case.fault:
        result.continued = ", ".join(f"{seconds:.0f}" for seconds in run.case.fault(run))
    run.wait("the Job to complete", lambda: run.cluster.end_of("trainer") == "Complete")
    result.complete = f"{time.monotonic() - began:.0f}"
    if run.case.after:
        run.case.after(run)
    lines = [row["line"] for row in run.rows() if row.get("event") == "ended" and "line" in row]
    if not lines:
        raise Failure("the Job is complete, but the journal has no done line")
    result.weights = lines[-1].rpartition("weights=")[2]


def check_mlflow(run: Run) -> str:
    """Return what MLflow has of the run. Raises Failure unless it is one complete run."""

    def finished() -> list[dict[str, Any]]:
        found = run.cluster.mlflow_runs(run.case.name)
        return found if [tracked["status"] for tracked in found] == ["FINISHED"] else []

    (tracked,) = run.wait("one FINISHED run in MLflow", finished, 60)
    expected = {(key, row["step"]) for row in run.rows() for key in row.get("metrics", {})}
    keys = {key for key, _ in expected}
    points = Counter((key, step) for key, step in tracked["points"] if key in keys)
    twice = sorted(point for point, count in points.items() if count > 1)
    missing = sorted(expected - points.keys())
    if twice or missing:
        raise Failure(f"MLflow has {len(twice)} points twice, lacks {len(missing)}: {[*twice, *missing][:3]}")
    return f"1 run, {len(points)} points"


def run_all(given: argparse.Namespace, results: dict[str, Result], references: dict[str, Result]) -> None:
    """Run the cases in a new namespace; delete it on every path."""
    cluster = Cluster(given.namespace, Path("build") / time.strftime("cluster-test-%Y%m%d-%H%M%S"))
    # with a + if files differ from the commit
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude", "*"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    try:
        where = {"on": cluster.describe(), "with": given.render, "commit": commit}
        cluster.make(one(render(given), "Namespace", given.namespace))
        for name, result in results.items():
            case = CASES[name]
            reference = references[case.reference]
            if "frozen" in case.text and not (given.freeze and given.thaw):
                result.why = "give --freeze and --thaw, the commands that stop and restart a node"
            elif reference.result != "passed" and name != case.reference:
                result.why = f"its reference {case.reference} did not pass"
            else:
                print(f"{name}: {case.text}", flush=True)
                attempt(Run(case, cluster, given), result, reference.weights or None)
                given.ledger.parent.mkdir(parents=True, exist_ok=True)
                with open(given.ledger, "a") as file:
                    file.write(json.dumps({"date": time.strftime("%F"), **where, **asdict(result)}) + "\n")
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        cluster.delete()


def row(result: Result) -> str:
    cells = [result.weights[:15], result.mlflow, result.why]
    seconds = f"{result.continued:>9} {result.complete:>9}"
    return f"{result.case:<23} {result.result:<8} {seconds}  {'  '.join(filter(None, cells))}"


def write_page(page: Path, ledger: Path) -> None:
    """Write the newest result of each case between the marks of a page."""
    rows = {row["case"]: row for row in map(json.loads, ledger.read_text().splitlines())}
    found = [row for name in CASES if (row := rows.get(name))]
    made = dict.fromkeys(f"on {r['date']} at {r['commit']}, {r['on']}, `{r['with']}`" for r in found)
    title = f"Written by `make cluster-test`, {'; '.join(made)}. In seconds:"
    lines = [textwrap.fill(title, 100, break_on_hyphens=False), ""]
    lines += ["| case | trained again after | complete after |", "| --- | --- | --- |"]
    for row in found:
        failed = "" if row["result"] == "passed" else f", {row['result'].upper()}"
        lines.append(f"| {CASES[row['case']].text}{failed} | {row['continued']} | {row['complete']} |")
    marks = r"(?<=<!-- cluster-test -->\n\n).*?(?=\n\n<!-- end -->)"
    text, count = re.subn(marks, lambda _: "\n".join(lines), page.read_text(), count=1, flags=re.DOTALL)
    if not count:
        sys.exit(f"{page} has no marks <!-- cluster-test --> and <!-- end -->")
    page.write_text(text)


def parse() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--image", help="training image, in a registry of the cluster")
    add("--mlflow-image", help="MLflow image, likewise")
    add("--render", default="", metavar="OPTIONS", help="further options and words of `pipeline k8s render`")
    add("--namespace", default=f"ddp-pipeline-test-{secrets.token_hex(3)}", help="default: a new name")
    add("--only", action="append", default=[], choices=CASES, metavar="CASE", help="run it; may be repeated")
    add("--limit", type=float, default=900, metavar="SECONDS", help="time limit of a case (default 900)")
    add("--freeze", metavar="COMMAND", help="stops a node: its name takes the place of {node}")
    add("--thaw", metavar="COMMAND", help="restarts the node")
    add("--receipts", type=int, metavar="STEP", help="compare with docs/receipts, and run no reference")
    ledger = ROOT / "build/cluster.jsonl"
    add("--ledger", type=Path, default=ledger, metavar="FILE", help="append the results to this file")
    add("--page", type=Path, metavar="FILE", help="write the newest results between the marks of this page")
    given = parser.parse_args()
    if not (given.image and given.mlflow_image):
        parser.error("--image and --mlflow-image are required: images that the cluster can pull")
    return given


def main() -> int:
    given = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    names = set(given.only or CASES)
    references = {}
    if given.receipts:  # of `make train` on CPUs
        for name, folder in REFERENCES.items():
            receipt = json.loads((ROOT / f"docs/receipts/{folder}/receipt.json").read_text())
            (weights,) = [row["weights"] for row in receipt["evaluations"] if row["step"] == given.receipts]
            references[name] = Result(name, "passed", weights=weights)
    else:
        names |= {CASES[name].reference for name in names}
    results = {name: Result(name) for name in CASES if name in names}
    try:
        run_all(given, results, references or results)
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
