"""A run with a mirror in a bucket continues on an empty disk, bit for bit, as one MLflow run."""

import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults.ledger import Notes
from harness import SMALL, Job, Result, before_each, quick, read_rows
from mlflow import MlflowClient
from object_store import Bucket, FaultProxy

from pipeline.addons.store.bucket import Store
from pipeline.addons.store.lease import Lease
from pipeline.record.checkpoint_files import step_of
from pipeline.record.folder import RunFolder

LEASE = 3
"""Seconds of a lease in these tests; the real ones would take a minute each."""
SHORT_LEASE = f"""
from pipeline.addons.store import lease, mirror
mirror.FINISH_S = 10
lease.LEASE_S, lease.RENEW_S, lease._POLL_S = {LEASE}, 0.5, 0.2
"""
WORDS = (*SMALL, "train.epochs=2", "checkpoint.every=7 steps")
STEPS = 58


@dataclass
class Mirrored(Job):
    """A run of one process, with a short lease."""

    prelude: str = SHORT_LEASE

    def kill_with_disk(self) -> None:
        """Kill everything at once, and lose the disk."""
        self.clean()
        shutil.rmtree(self.folder, ignore_errors=True)


MakeJob = Callable[..., Mirrored]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Result:
    """Train without a mirror, undisturbed."""
    return Job(tmp_path_factory.mktemp("expected") / "run", ["digits", f"data.root={digits}", *WORDS]).run()


@pytest.fixture
def make_job(tmp_path: Path, digits: Path, bucket: Bucket) -> MakeJob:
    def make(*words: str, name: str = "run", **env: str) -> Mirrored:
        mirror = f"checkpoint.mirror={bucket.place}/run"
        return Mirrored(tmp_path / name, ["digits", f"data.root={digits}", *WORDS, mirror, *words], env=env)

    return make


def checkpoints(bucket: Bucket) -> list[str]:
    """Return the names of the checkpoints in the mirror, the oldest first."""
    return [name.rpartition("/")[2] for name in bucket.names("run/checkpoints/")]


def steps(bucket: Bucket) -> list[int]:
    return [step_of(Path(name)) for name in checkpoints(bucket)]


def logged(uri: str, key: str = "train/loss") -> tuple[str, Counter[int]]:
    """Return the status of the only run in MLflow, and how often it has each step of a metric."""
    client = MlflowClient(uri)
    (run,) = client.search_runs(["1"])
    return run.info.status, Counter(point.step for point in client.get_metric_history(run.info.run_id, key))


@pytest.mark.fault("K3", ci=1, long=10)
@pytest.mark.parametrize(
    "slow_ms",
    [pytest.param(0, id="between uploads", marks=pytest.mark.long), pytest.param(150, id="while it uploads")],
)
def test_a_run_that_lost_its_disk_continues_elsewhere_as_one_run(
    tmp_path: Path, make_job: MakeJob, bucket: Bucket, fault_proxy: FaultProxy,
    expected: Result, seed: int, slow_ms: int, notes: Notes, full: bool,
) -> None:  # fmt: skip
    """Errors of the store, whose text may hold a credential, come with it."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    job = make_job(f"track.uri={uri}", "track.report=true")
    draw = random.Random(seed)
    fault_proxy.latency_ms = slow_ms
    for _ in range(1 + full):
        job.start().wait_for_step(draw.randint(5, STEPS - 20))
        time.sleep(draw.uniform(0, 0.5))
        job.kill_with_disk()
        notes.note("K3")
    job.start().wait_for_step(STEPS - 15)
    fault_proxy.rates = {"403": 0.02, "500": 0.1, "truncate": 0.05}
    assert job.wait().done["weights"] == expected.done["weights"]
    fault_proxy.rates = {}
    for key in ("train/loss", "val/top1"):
        status, steps = logged(uri, key)
        assert (status, set(steps.values())) == ("FINISHED", {1}), f"{key}: {steps}"
    assert [row["step"] for row in job.trace()] == list(range(1, STEPS + 1))
    secrets = [os.environ[name].encode() for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID")]
    for path in filter(Path.is_file, tmp_path.rglob("*")):
        assert not any(secret in path.read_bytes() for secret in (*secrets, b"X-Amz-Signature")), path
    for name in bucket.names():
        assert not any(secret in bucket.read(name) for secret in secrets), name


@pytest.mark.fault("K3")
def test_a_cut_off_upload_is_never_resumed_from(make_job: MakeJob, bucket: Bucket, expected: Result) -> None:
    """The checkpoint before it is used. Without any, nothing is restored or trained again."""
    job = make_job("checkpoint.keep=3")
    job.run()
    *_, newest = checkpoints(bucket)
    data = bucket.read(f"run/checkpoints/{newest}")
    bucket.write(f"run/checkpoints/{newest}", data[: len(data) // 2])
    shutil.rmtree(job.folder)
    result = job.run()
    assert result.done["weights"] == expected.done["weights"]
    assert f"{newest} is damaged" in result.err
    assert f"restored step {step_of(Path(newest)) - 2}" in result.err
    shutil.rmtree(job.folder)
    for name in checkpoints(bucket):
        bucket.write(f"run/checkpoints/{name}", b"x")
    assert "no checkpoint in checkpoint.mirror=s3://" in job.run(code=4).error
    assert not job.folder.exists()
    for name in checkpoints(bucket):
        bucket.delete(f"run/checkpoints/{name}")
    for command in ("train", "doctor"):
        missed = quick(command, *job.train_words()[1:], code=4)
        assert "verifies, and its journal names step-0000" in missed.err


@pytest.mark.fault("K2", ci=1, long=5)
@pytest.mark.parametrize("returns", [True, False])
def test_a_store_that_is_away_costs_no_step_and_is_named_if_it_stays_away(
    make_job: MakeJob, bucket: Bucket, fault_proxy: FaultProxy, expected: Result, seed: int,
    returns: bool,
) -> None:  # fmt: skip
    job = make_job().start().wait_for_step(random.Random(seed).randint(8, 30))
    fault_proxy.die()
    if returns:
        job.wait_for_step(45)
        fault_proxy.revive()
    result = job.wait(400)
    assert result.done == expected.done
    if not returns:
        assert re.search(rf"lacks .*it is in {job.folder}", result.err)
        rows = read_rows(job.folder / "journal.jsonl")
        assert "mirror failed" in {row.get("event") for row in rows}, "counted in the journal"
        fault_proxy.revive()
        assert job.run().done == expected.done
    assert sorted(checkpoints(bucket)) == sorted(path.name for path in job.checkpoints())
    assert bucket.read("run/journal.jsonl") == (job.folder / "journal.jsonl").read_bytes()


@pytest.mark.fault("K4", ci=1, long=10)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGSTOP, 75)])
def test_a_second_start_names_the_holder_and_replaces_a_dead_or_frozen_one_which_writes_nothing(
    make_job: MakeJob, bucket: Bucket, seed: int, number: int, code: int
) -> None:
    first, second = (make_job("train.epochs=1000", name=name) for name in ("first", "second"))
    first.start().wait_for_step(random.Random(seed).randint(8, 30))
    refused = second.run(code=75)
    assert re.search(r"checkpoint.mirror=s3://\S+ is held by process \d+ on \S+ since", refused.error)
    assert not second.starts()
    first.send(number)
    try:
        second.start().wait_for_start()
        second.wait_until(lambda: checkpoints(bucket) and second.step() > first.step(), "a step")
    finally:
        first.send(signal.SIGCONT)
    ended = first.wait(60, code=code)
    assert number == signal.SIGKILL or "was taken over by process" in ended.error
    rows = map(json.loads, bucket.read("run/journal.jsonl").splitlines())
    (run,) = {row["run"] for row in rows if "run" in row}
    assert run == next(row["run"] for row in read_rows(second.folder / "journal.jsonl") if "run" in row)
    assert second.process.poll() is None
    second.clean()


@pytest.mark.fault("K3")
def test_a_run_none_of_whose_checkpoints_was_uploaded_begins_again_as_the_same_run(
    tmp_path: Path, make_job: MakeJob, bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    job = make_job(f"track.uri={uri}", "train.epochs=10")
    job.prelude += before_each("pipeline.addons.store.mirror.Mirror._upload", "time.sleep(3600)")
    job.start().wait_until(lambda: MlflowClient(uri).search_runs(["1"]), "a run in MLflow", pause=0.2)
    job.kill_with_disk()
    job.prelude = SHORT_LEASE
    fault_proxy.only, fault_proxy.rates = "^P.*/checkpoints/", {"403": 1}
    job.start().wait_until(lambda: "run/journal.jsonl" in bucket.names(), "the journal", pause=0.2)
    job.wait_until(lambda: b'"saved"' in bucket.read("run/journal.jsonl"), "a save in it", pause=0.2)
    job.kill_with_disk()
    fault_proxy.rates = {}
    assert not checkpoints(bucket)
    job.arguments.append("train.max_steps=20")
    assert "holds no complete checkpoint: training begins at step 0" in job.finished().log()
    assert logged(uri)[0] == "FINISHED"


@pytest.mark.parametrize(
    ("words", "code"),
    [(("optimizer.lr=1e6", "schedule.name=constant"), 3), (("train.max_steps=8", "run.resume=never"), 0)],
    ids=["failed", "finished, with run.resume=never"],
)
def test_the_end_of_a_job_is_known_on_an_empty_disk(make_job: MakeJob, words: tuple[str], code: int) -> None:
    job = make_job(*words, TORCHELASTIC_RUN_ID="job")
    first = job.run()
    for lost in (job.folder / "nothing", job.folder):
        shutil.rmtree(lost, ignore_errors=True)
        again = job.run()
        assert (first.code, again.code, again.out) == (code, code, first.out), again.err
        if code:
            assert (again.error, "creating" in again.err) == (first.error, False), "it does not start"
        else:
            assert "already finished" in again.err


def test_processes_of_a_launcher_share_one_mirror(tmp_path: Path, digits: Path, bucket: Bucket) -> None:
    """With the real lease: the next start in the same folder need not wait for it."""
    words = [f"data.root={digits}", *WORDS, f"checkpoint.mirror={bucket.place}/run", "train.max_steps=40"]
    job = Job(tmp_path / "run", ["digits", *words], nproc=2).start().wait_for_step(10)
    job.clean()
    assert "waiting up to" not in job.run(code=0).err
    assert max(steps(bucket)) == 40


def test_a_finished_run_is_known_on_a_fresh_disk(make_job: MakeJob, bucket: Bucket, expected: Result) -> None:
    job = make_job("checkpoint.keep=2")
    assert job.run().done == expected.done
    for name in ("config.yaml", "journal.jsonl", "plan.json", "receipt.json", "trace.jsonl"):
        assert bucket.read(f"run/{name}") == (job.folder / name).read_bytes(), name
    words, finished = ["doctor", *job.train_words()[1:]], job.folder.with_name("finished")
    node = {"PET_NPROC_PER_NODE": "1", "PIPELINE_FINISHED": str(finished)}
    for checkpoint in job.checkpoints():
        checkpoint.write_bytes(b"damaged")
    assert quick(*words, **node).code == 0, "training takes them from the mirror"
    shutil.rmtree(job.folder)
    assert "config is compatible with the run in s3://" in quick(*words, **node, code=0).err
    assert finished.read_text().startswith(f"done step={STEPS} ")
    assert "optimizer.lr" in quick(*words, "optimizer.lr=0.3", **node, code=2).error
    assert not job.folder.exists(), "nothing is changed"
    names = sorted(checkpoints(bucket))
    RunFolder(job.folder).checkpoints.mkdir(parents=True)  # a restore that was killed
    (job.folder / "checkpoints" / names[0]).write_bytes(bucket.read(f"run/checkpoints/{names[0]}"))
    again = job.run()
    assert (again.done, "already finished" in again.err) == (expected.done, True), again.err
    assert len(job.starts()) == 1, "it was not trained again"
    assert sorted(checkpoints(bucket)) == sorted(path.name for path in job.checkpoints()) == names


def test_machines_in_turn_send_each_metric_once(tmp_path: Path, make_job: MakeJob, bucket: Bucket) -> None:
    """The second is lost before it saves, so that the first trains its steps again."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    never = ("checkpoint.every=1000 epochs", "evaluate.every=1000 epochs", "train.epochs=1000",
             f"track.uri={uri}")  # fmt: skip
    first, second = make_job(*never, name="first"), make_job(*never, name="second")
    second.prelude += before_each("pipeline.train.loop.update_once", "time.sleep(0.1)")
    first.start().wait_for_step(10)
    (step,) = re.findall(r"step (\d+) is saved", first.stop(code=75).error)
    assert steps(bucket) == [int(step)], "the end of the first"
    assert json.loads(bucket.read("run/lease.json"))["is_released"]
    second.start()
    second.wait_until(lambda: max(logged(uri)[1]) > int(step), "a step of the second in MLflow", pause=0.2)
    second.kill_with_disk()
    first.arguments.append("train.max_steps=60")
    assert first.run().code == 0
    status, steps_sent = logged(uri)
    assert (status, set(steps_sent.values())) == ("FINISHED", {1}), steps_sent


def test_a_stalled_store_delays_no_stop(make_job: MakeJob, fault_proxy: FaultProxy) -> None:
    job = make_job("train.epochs=1000", "checkpoint.every=1000 epochs", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="15")
    job.start().wait_for_step(10)
    fault_proxy.rates = {"stall": 1}  # for ever
    assert "lacks" in job.stop(code=75).err


def test_a_signal_ends_the_wait_for_a_lease(make_job: MakeJob, bucket: Bucket) -> None:
    lease = Lease(Store(f"{bucket.place}/run"), "another folder")
    lease.take()
    lease.drop(is_released=False)  # as if its holder were dead
    job = make_job("train.max_steps=8")
    job.prelude += "lease.LEASE_S = 600\n"
    job.start().wait_until(lambda: "waiting up to" in job.log(), "the wait", 60)
    assert job.stop().code == 75


ROLLBACK = ("checkpoint.every=5 steps", "checkpoint.keep=10")


def step_5(job: Job) -> Path:
    (path,) = [path for path in job.checkpoints() if step_of(path) == 5]
    return path


@pytest.mark.fault("K3")
def test_a_rollback_is_mirrored_at_once(make_job: MakeJob, bucket: Bucket, fault_proxy: FaultProxy) -> None:
    """Also if the store refuses to delete the checkpoints that no longer count."""
    job = make_job(*ROLLBACK, "train.max_steps=20").finished()
    before = job.checkpoints()
    rolled_back = make_job(*ROLLBACK, "train.max_steps=12", f"run.resume={step_5(job)}")
    fault_proxy.only, fault_proxy.rates = "^PUT .*/abandoned.json", {"503": 1}
    rolled_back.run(code=75)
    assert job.checkpoints() == before
    assert len(job.starts()) == 1
    fault_proxy.only, fault_proxy.rates = "^DELETE .*/checkpoints/", {"403": 1}
    expected = rolled_back.finished().output()
    assert 20 in steps(bucket)
    again = make_job(*ROLLBACK, "train.max_steps=12")
    for lost in (job.folder / "nothing", job.folder):
        shutil.rmtree(lost, ignore_errors=True)
        assert again.run().out == expected
        assert [row["step"] for row in again.starts()] == [0, 5]
    # the same steps have the same weights, and so the same names as before
    repeated = make_job(*ROLLBACK, "train.max_steps=20").finished()
    shutil.rmtree(job.folder)
    assert repeated.run().done["step"] == "20"
    assert [row["step"] for row in repeated.starts()] == [0, 5, 12]


def test_a_disk_that_missed_a_rollback_does_not_undo_it(make_job: MakeJob, fault_proxy: FaultProxy) -> None:
    for name in ("first", "second"):
        job = make_job(*ROLLBACK, "train.max_steps=20", name=name).finished()
    words = (*ROLLBACK, "train.max_steps=12", f"run.resume={step_5(job)}")
    rollback, late = (make_job(*words, name=name, TORCHELASTIC_RUN_ID="job") for name in ("second", "first"))
    expected = rollback.finished().output()
    before = late.checkpoints()
    fault_proxy.only, fault_proxy.rates = "/checkpoints/step-", {"503": 1}
    assert late.run().code == 75
    assert late.checkpoints() == before, "nothing is set aside before its replacement has verified"
    fault_proxy.rates = {}
    result = late.run()
    assert (result.out, "already finished" in result.err) == (expected, True), result.err


def test_a_start_that_would_lose_the_mirrors_run_is_refused(make_job: MakeJob, bucket: Bucket) -> None:
    wrong = make_job("model.arch=nosuch", name="wrong")
    assert wrong.run().code == 2
    assert not wrong.folder.exists()
    assert json.loads(bucket.read("run/lease.json"))["is_released"]
    old, other = (make_job("train.max_steps=8", name=name) for name in ("old", "other"))
    old.run()
    other.arguments = [word for word in other.arguments if not word.startswith("checkpoint.mirror")]
    other.run()
    make_job("train.max_steps=30", name="new").run()
    before = set(checkpoints(bucket))
    for name, word, says in (
        ("old", "run.resume=never", "holds a run"),
        ("empty", "run.resume=never", "holds a run"),
        ("old", f"run.resume={old.checkpoints()[0]}", "holds a later step"),
        ("other", "run.resume=auto", "holds another run"),
        ("empty", "optimizer.lr=0.2", "optimizer.lr"),
    ):
        assert says in make_job("train.max_steps=8", word, name=name).run(code=2).error
    assert set(checkpoints(bucket)) == before


@pytest.mark.parametrize("has_clock", [True, False])
def test_a_foreign_lease_is_taken_over_once_it_is_old(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], has_clock: bool
) -> None:
    monkeypatch.setattr("pipeline.addons.store.lease.LEASE_S", 1)
    bucket.write("lease.json", b'{"holder": "\\u001b[2J"}')
    store = Store(bucket.place)
    if not has_clock:
        hide = lambda response_dict, **_: response_dict["headers"].pop("Date", None)  # noqa: E731
        store._client.meta.events.register("before-parse.s3.GetObject", hide)
    lease = Lease(store, "owner")
    lease.take()
    lease.drop(is_released=True)
    output = capfd.readouterr().err
    assert (f"took over checkpoint.mirror={bucket.place}" in output, "\x1b" in output) == (True, False)
