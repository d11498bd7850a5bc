"""The rendered Job without a shared disk: data and run in a bucket, a disk for each pod."""

import random
import time
from pathlib import Path

import pytest
from harness import SMALL, Job, quick, read_rows
from object_store import Bucket

from faults.cluster import assert_same
from faults.ledger import Notes
from faults.pods import Pods, missing, rendered

STEPS = 40
WORDS = (*SMALL, "train.epochs=100", f"train.max_steps={STEPS}", "evaluate.every=1000 epochs",
         "checkpoint.every=7 steps")  # fmt: skip


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
@pytest.mark.usefixtures("jpegtran")
@pytest.mark.full
@pytest.mark.fault("K5", ci=1, long=10)
def test_node_0_lost_with_its_disk_comes_back_bit_identical(
    tmp_path: Path, digits: Path, bucket: Bucket, seed: int, notes: Notes
) -> None:
    with Pods(rendered(digits, *WORDS), tmp_path / "undisturbed") as pods:  # from a local folder
        assert pods.start().wait() == 0, pods.logs()
        undisturbed = pods.run
    packed = quick("data", "pack", str(digits), f"{bucket.place}/data")
    assert packed.code == 0, packed.err
    manifests = rendered(
        f"{bucket.place}/data", *WORDS, "data.source=pack", "data.cache=/data/cache",
        store=bucket.place, store_endpoint="http://store.storage.svc:8333",
    )  # fmt: skip
    keys = {name: value for name, value in bucket.server.env.items() if name != "AWS_ENDPOINT_URL"}
    store = {"store": bucket.server.endpoint, "secrets": {"store-credentials": keys}}
    draw = random.Random(seed)
    with Pods(manifests, tmp_path / "job", **store) as pods:
        end = pods.start_and_watch(900)
        pods.wait_for_step(draw.randint(8, STEPS - 15))
        time.sleep(draw.uniform(0, 0.5))
        lost, before, run_id = time.monotonic(), pods.run.folder, _run_ids(pods.run)
        pods[0].kill()
        pods.wait_until(
            lambda: pods.run.folder != before and len(pods.run.starts()) == 2, "start on an empty disk"
        )
        notes.note("K5", seconds=time.monotonic() - lost)
        assert end() == 0, pods.logs()
        assert pods.run.starts()[1]["step"] > 0, "it continues, it does not start again"
        assert _run_ids(pods.run) == run_id
        assert_same(pods.run, undisturbed)
    names = bucket.names("runs/")
    assert not [name for name in names if not name.startswith("runs/digits/")], "one mirror for the run"
    assert bucket.read("runs/digits/journal.jsonl") == (pods.run.folder / "journal.jsonl").read_bytes()


def _run_ids(run: Job) -> set[str]:
    return {row["run"] for row in read_rows(run.folder / "journal.jsonl") if "run" in row}
