"""Measure what a dead store costs the steps of a run with a mirror.

One run trains. Its store is alive and dead in turns, so that both share the machine's moods. The
last turn is followed by SIGTERM: the newest checkpoint must then be in the bucket.
"""

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path
from statistics import median

from harness import SMALL, Job, kill, read_rows
from object_store import Bucket, FaultProxy, Weed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns with and without the store (default 3)")
    parser.add_argument("--seconds", type=float, default=60, help="length of a turn (default 60)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        server = Weed(Path(scratch) / "server").start()
        try:
            bucket = Bucket(server.wait_ready(), server.make_bucket())
            with FaultProxy(server.endpoint) as proxy:
                os.environ.update(server.env, AWS_ENDPOINT_URL=proxy.endpoint)
                _measure(Path(scratch), bucket, proxy, options.rounds, options.seconds)
        finally:
            server.kill()


def _measure(scratch: Path, bucket: Bucket, proxy: FaultProxy, rounds: int, seconds: float) -> None:
    words = ["digits", f"data.root={scratch}/digits", *SMALL, "train.epochs=1000000", "checkpoint.every=20 steps"]
    job = Job(scratch / "run", [*words, "evaluate.every=1000 epochs", f"checkpoint.mirror={bucket.place}/run"]).start()
    job.wait_for_step(50)
    ratios = []
    for number in range(rounds):
        alive = _step_ms(job, seconds)
        proxy.die()
        dead = _step_ms(job, seconds)
        proxy.revive()
        ratios.append(dead / alive)
        print(f"round {number + 1}: {alive:.1f} ms a step, {dead:.1f} ms with the store dead", flush=True)
    assert job.process
    kill(job.process.pid, signal.SIGTERM)
    result = job.wait(60)
    assert result.code == 75, result.err
    newest = max(path.name for path in job.checkpoints())
    assert f"run/checkpoints/{newest}" in bucket.names(), "the newest checkpoint is in the bucket"
    failed = sum(row.get("event") == "mirror failed" for row in read_rows(job.folder / "journal.jsonl"))
    print(f"ratio {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); {failed} saves not uploaded at once")


def _step_ms(job: Job, seconds: float) -> float:
    """Return the median time of a step from now on, for some seconds."""
    start = time.time()
    time.sleep(seconds)
    rows = [row for row in read_rows(job.folder / "journal.jsonl") if row["time"] > 1000 * start]
    return median(row["metrics"]["time/step_ms"] for row in rows if "time/step_ms" in row.get("metrics", ()))


if __name__ == "__main__":
    main()
