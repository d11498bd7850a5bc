"""Test the manifests on a real cluster with kubectl: `make cluster-test`. `make test` does not.

Renders the manifests into a separate namespace, trains the digits once without faults and once with
each fault: a worker's pod deleted, pod 0 deleted, a rank killed inside its pod, a node drained.
Compares the digests of the weights and removes the namespace at the end.

    make cluster-test KUBECONFIG=… IMAGE=… MLFLOW_IMAGE=… RENDER="--cpu --single-node"
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

NAMESPACE = "ddp-pipeline-test"
WORDS = ("run.deterministic=true", "checkpoint.every=10 steps", "track.every=2 steps")
FAULT_STEP = 40


def kubectl(*arguments: str, check: bool = True, timeout: float = 120) -> str:
    done = subprocess.run(
        ["kubectl", "--namespace", NAMESPACE, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
    if check and done.returncode:
        sys.exit(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def render(image: str, mlflow_image: str, options: list[str], run: str) -> Path:
    folder = Path(tempfile.mkdtemp())
    command = [sys.executable, "-m", "pipeline", "k8s", "render", "digits", *WORDS, "--namespace", NAMESPACE]
    subprocess.run([*command, "--image", image, "--mlflow-image", mlflow_image, "--out", folder, *options], check=True)
    config = folder / "10-config.yaml"
    config.write_text(config.read_text().replace("RUN_DIR: /runs/digits", f"RUN_DIR: /runs/{run}"))
    return folder


def pod(index: int) -> str:
    selector = f"app=trainer,batch.kubernetes.io/job-completion-index={index}"
    return kubectl(
        "get", "pods", "--selector", selector, "--output", "name", "--field-selector", "status.phase=Running"
    ).strip()


def step() -> int:
    """Return the last step in the journal of node 0, 0 if it cannot be read."""
    name = pod(0)
    text = name and kubectl("exec", name, "--", "sh", "-c", "tail -n 1 $RUN_DIR/journal.jsonl", check=False)
    try:
        return int(json.loads(text)["step"])
    except (ValueError, KeyError, TypeError):
        return 0


def train(folder: Path, fault: Callable[[], None] | None) -> str:
    """Apply the manifests, inject the fault and wait for the end; return the `done` line."""
    kubectl("delete", "job", "trainer", "--ignore-not-found", "--wait")
    kubectl("apply", "--filename", str(folder))
    if fault:
        end = time.monotonic() + 1200
        while step() < FAULT_STEP:
            if time.monotonic() > end:
                sys.exit(f"step {FAULT_STEP} was not reported in 20 min")
            time.sleep(1)
        fault()
    started = time.monotonic()
    kubectl("wait", "--for=condition=complete", "job/trainer", "--timeout=1800s", timeout=1900)
    print(f"  complete {time.monotonic() - started:.0f} s later")
    for name in kubectl("get", "pods", "--selector", "app=trainer", "--output", "name").split():
        for line in kubectl("logs", name, "--container", "trainer", check=False).splitlines():
            if line.startswith("done "):
                return line
    sys.exit("no pod has printed a done line")


def ask_mlflow() -> None:
    """Call MLflow from a trainer's pod, through the Service and the network policy."""
    code = (
        "import urllib.request as http\n"
        "print(http.urlopen('http://mlflow:5000/api/2.0/mlflow/experiments/search?max_results=9').read().decode())"
    )
    answer = kubectl("exec", pod(0), "--", "python3", "-c", code)
    if '"digits"' not in answer:
        sys.exit(f"MLflow knows no experiment digits: {answer}")


def kill_rank() -> None:
    ask_mlflow()
    code = (
        "import os, pathlib\n"
        "for p in pathlib.Path('/proc').glob('[0-9]*/environ'):\n"
        "    if b'\\0RANK=' in b'\\0' + p.read_bytes(): os.kill(int(p.parent.name), 9); break\n"
    )
    kubectl("exec", pod(1), "--", "python3", "-c", code)


def drain() -> None:
    node = kubectl("get", pod(1), "--output", "jsonpath={.spec.nodeName}")
    kubectl(
        "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--pod-selector", "app=trainer", timeout=300
    )
    kubectl("uncordon", node)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", required=True)
    parser.add_argument("--mlflow-image", required=True)
    parser.add_argument("--render", default="", help="further options of `pipeline k8s render`")
    given = parser.parse_args()
    faults: dict[str, Callable[[], None] | None] = {
        "no-fault": None,
        "worker-deleted": lambda: print(kubectl("delete", pod(1), "--wait=false").strip()),
        "node-0-deleted": lambda: print(kubectl("delete", pod(0), "--wait=false").strip()),
        "rank-killed": kill_rank,
        "drained": drain,
    }
    lines = {}
    try:
        for name, fault in faults.items():
            print(name, flush=True)
            lines[name] = train(render(given.image, given.mlflow_image, given.render.split(), name), fault)
            print(f"  {lines[name]}", flush=True)
    finally:
        kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", timeout=600)
    different = [name for name, line in lines.items() if line != lines["no-fault"]]
    sys.exit(f"the weights differ from the run without faults: {', '.join(different)}" if different else 0)


if __name__ == "__main__":
    main()
