"""The doctor names each injected fault with its remedy before anything starts."""

import json
import pickle
import re
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Result, quick
from object_store import Bucket, FaultProxy
from torch import nn

from pipeline import errors, machine
from pipeline.addons.datasets.write_pack import pack
from pipeline.addons.deploy import node
from pipeline.addons.mlflow import tracker
from pipeline.addons.ops import doctor, sanity
from pipeline.addons.ops import machine as checks
from pipeline.addons.store import check as store
from pipeline.addons.store.bucket import Store
from pipeline.config.load import load
from pipeline.data import images
from pipeline.data.sources import open_source
from pipeline.device import choose_device
from pipeline.errors import NotFiniteError
from pipeline.model.architectures import build
from pipeline.planning import make_plan, request_digest
from pipeline.record.failure import load_failure, save_failure
from pipeline.record.folder import RunFolder
from pipeline.world import World

HERE = World(cpus=2)


def run_doctor(tmp_path: Path, digits: Path, *words: str, **env: str) -> Result:
    request = ("digits", f"data.root={digits}", f"run.dir={tmp_path / 'run'}", *words)
    return quick("doctor", *request, **{"MLFLOW_TRACKING_URI": ""} | env)


def findings(result: Result) -> dict[str, dict[str, Any]]:
    rows = json.loads(result.out)["findings"]
    assert all(set(row) == {"check", "ok", "line", "remedy"} for row in rows)
    return {row["check"]: row for row in rows}


def test_a_request_that_can_run_passes_and_leaves_no_files(tmp_path: Path, digits: Path) -> None:
    result = run_doctor(tmp_path, digits, "--json")
    assert result.code == 0, result.err
    assert all(row["ok"] for row in findings(result).values())
    assert list(tmp_path.iterdir()) == []
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    text = run_doctor(tmp_path, digits)
    assert text.out.strip() == "digits can run here"
    assert "1,437 images to train" in text.err
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 15, (
        "other tests run on these cores"
    )


@pytest.mark.parametrize(
    ("check", "words", "says"),
    [
        ("data", ("data.source=folder", "data.root=/no/such: set it"), "give a folder with train/ and val/"),
        ("recipe", ("train.epoch=1",), "did you mean train.epochs?"),
        ("run folder", ("run.dir=/etc/hostname/run", "track.uri=none"), "give a folder that can"),
        ("plan", ("batch.global=97", "--world", "2"), "the nearest batch.global that works is 96 or 98"),
        ("device", ("run.device=cuda",), "use run.device=cpu, or auto"),
    ],
)
def test_a_permanent_error_is_exit_2(
    tmp_path: Path, digits: Path, check: str, words: tuple[str, ...], says: str
) -> None:
    if check == "device" and Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    result = run_doctor(tmp_path, digits, "--json", *words)
    assert result.code == 2
    found = findings(result)
    assert [name for name, row in found.items() if not row["ok"]] == [check]
    line, remedy = found[check]["line"], found[check]["remedy"]
    assert says in line + remedy
    value = words[-1].partition("=")[2]
    assert value in line if ": " in value else True
    assert result.error == (f"{line}: {remedy}" if remedy else line)


def test_the_failure_of_the_last_start_is_reported(tmp_path: Path, digits: Path) -> None:
    config = load("digits", [f"data.root={digits}", f"run.dir={tmp_path / 'run'}"])
    config.run_dir.mkdir()
    digest = request_digest(config, World())
    save_failure(config.run_dir, NotFiniteError("the loss is nan at step 7"), digest)
    result = run_doctor(tmp_path, digits, "--json")
    assert result.code == 3
    assert findings(result)["last start"]["line"] == "the loss is nan at step 7"
    assert run_doctor(tmp_path, digits, "train.epochs=13").code == 0, "another request"


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_node_runs_only_the_checks_of_a_node(tmp_path: Path, digits: Path, nodes: int) -> None:
    env = node.environment(nodes, 2)
    if nodes > 1:
        env["PET_RDZV_ENDPOINT"] = "localhost:29500"
    result = run_doctor(tmp_path, digits, "--json", **env)
    assert result.code == 0, result.err
    found = findings(result)
    assert ("6 processes on 3 nodes" if nodes > 1 else "2 processes on 1 node") in found["plan"]["line"]
    assert ("names" in found) == (nodes > 1)
    assert nodes == 1 or "localhost is 127.0.0.1" in found["names"]["line"]
    assert not found.keys() & {"CPUs", "memory", "disk space", "all-reduce"}


def test_a_host_name_that_does_not_resolve_is_a_temporary_error(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_NAMES_TIMEOUT_S", 1)
    with pytest.raises(errors.TemporaryError, match=r"no-such-node\.invalid does not resolve"):
        doctor.check_names_resolve("no-such-node.invalid:29500")


@pytest.mark.parametrize("status", [403, pytest.param(500, marks=pytest.mark.full)])
def test_a_refusal_by_mlflow_is_named_and_stops_no_training(
    tmp_path: Path, digits: Path, status: int
) -> None:
    with _server(status) as uri:
        result = run_doctor(tmp_path, digits, "--json", MLFLOW_TRACKING_URI=uri)
        assert result.code == 0, "training needs no tracker"
        assert f"answers {status}" in findings(result)["MLflow"]["line"]
        required = run_doctor(tmp_path, digits, "track.required=true", MLFLOW_TRACKING_URI=uri)
        assert required.code == 2, "as `train` does"
        on_node = run_doctor(
            tmp_path, digits, "track.required=true", MLFLOW_TRACKING_URI=uri, PET_NPROC_PER_NODE="1"
        )
        assert on_node.code == 75, "its server may still be starting"
    file = run_doctor(tmp_path, digits, "--json", MLFLOW_TRACKING_URI="sqlite:////proc/x.db")
    assert file.code == 0
    assert findings(file)["MLflow"]["line"].startswith("MLflow's database /proc/x.db cannot be written")
    unreachable = run_doctor(tmp_path, digits, "--json", MLFLOW_TRACKING_URI=uri)
    assert "Connection refused" in findings(unreachable)["MLflow"]["line"]


@pytest.mark.skipif(machine.has_gpu(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("CUDA error: no kernel image is available for execution on the device", errors.RequestError),
        ("CUDA out of memory. Tried to allocate 2.00 MiB.", errors.TemporaryError),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_named_and_only_a_full_one_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, cause: str, kind: type[errors.RunError]
) -> None:
    def fail(_: torch.device) -> None:
        raise RuntimeError(cause)

    for name, answer in {"is_available": True, "device_count": 1, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr("pipeline.device._compute", fail)
    with pytest.raises(kind, match="cannot use the GPU cuda:0"):
        choose_device(load("digits", ["run.device=cuda"]), HERE)


class CheckInputs:
    """Inputs of the checks: a request, its plan and this machine."""

    def __init__(self, root: Path, folder: Path, *words: str, world: World = HERE) -> None:
        self.config = load("digits", [f"data.root={root}", f"run.dir={folder}", "data.workers=2", *words])
        self.folder = RunFolder(folder)
        self.source = open_source(self.config)
        self.plan = make_plan(self.config, HERE, self.source.size)
        self.world = world


def test_what_the_machine_lacks_is_named_with_its_remedy(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = CheckInputs(digits, tmp_path / "run")
    with pytest.raises(errors.RequestError, match="4 processes share 2 CPUs: start fewer"):
        checks.check_cpu_per_process(HERE.resized(4))
    monkeypatch.setattr(machine, "available_memory", lambda: 1 << 30)
    with pytest.raises(
        errors.RequestError,
        match=r"need about 1.5 GiB, but only 1.0 GiB are available: give the container more",
    ):
        checks.check_memory(inputs.plan)
    monkeypatch.setattr(checks, "_file_system", lambda place: "ext4")
    with pytest.raises(
        errors.TemporaryError, match=r"which only this machine can see; if rank 0 restarts .*: use a volume"
    ):
        checks.check_run_folder_is_shared(inputs.config, inputs.folder, replace(HERE, size=4, local_size=2))
    mirrored = load("digits", ["checkpoint.mirror=s3://bucket/run"])
    line = checks.check_run_folder_is_shared(mirrored, inputs.folder, replace(HERE, size=4, local_size=2))
    assert "need not be shared: checkpoint.mirror" in line


def test_a_disk_without_room_for_the_checkpoints_is_named(small_disk: Path, digits: Path) -> None:
    inputs = CheckInputs(digits, small_disk / "run")
    with pytest.raises(
        errors.StorageError, match=r"2 checkpoints, the best and one being written need 0.33 GiB more"
    ):
        checks.check_disk_space(inputs.config, inputs.plan, inputs.folder)


def test_images_that_cannot_be_decoded_and_the_decoder_are_named(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = CheckInputs(digits, tmp_path / "run").source
    assert checks.check_images_decode(source).endswith("JPEG by simplejpeg")
    monkeypatch.setattr(images, "simplejpeg", None)
    assert "JPEG by Pillow, which is slower" in checks.check_images_decode(source)
    shutil.copytree(digits, tmp_path / "data")
    first = min((tmp_path / "data" / "train").glob("*/*.png"))
    first.write_bytes(bytes(100))
    inputs = CheckInputs(tmp_path / "data", tmp_path / "run")
    with pytest.raises(
        errors.StorageError,
        match=f"1 of 16 sampled images .*{first.name}.*: list all with 'pipeline data check'",
    ):
        checks.check_images_decode(inputs.source)


@pytest.mark.parametrize(
    ("speed", "says", "warning", "remedy"),
    [
        ("1", r"2 × 1 images/s take 1 of \d+ cores", "", ""),
        ("1000000000", r"2 × 1,000,000,000 images/s need [\d,]+ cores, and here are \d+", "too few cores: ",
         "use more cores for each GPU, or a pack ('pipeline data pack')"),
    ],
)  # fmt: skip
def test_doctor_and_plan_tell_how_many_cores_feed_the_gpus(
    tmp_path: Path, digits: Path, speed: str, says: str, warning: str, remedy: str
) -> None:
    row = rf"a core makes [\d,]+ images/s of 32 px, so {says}"
    words = ("--world", "2", "--gpu-images-per-s", speed)
    result = run_doctor(tmp_path, digits, "--json", *words)
    assert result.code == 0, result.err
    found = findings(result)["loader"]
    assert re.fullmatch(row, found["line"])
    assert (found["ok"], found["remedy"]) == (not warning, remedy)
    plan = quick("plan", "digits", f"data.root={digits}", f"run.dir={tmp_path / 'run'}", *words)
    assert re.search(rf"\n  loader         {warning}{row}", plan.out), plan.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("status", "says"), [(500, "answers 500"), (200, "other bytes")])
def test_a_server_that_stores_no_files_is_named(tmp_path: Path, digits: Path, status: int, says: str) -> None:
    with _server(status) as uri:
        inputs = CheckInputs(digits, tmp_path / "run", f"track.uri={uri}")
        with pytest.raises(errors.TemporaryError, match=says):
            tracker.check_server_stores_files(inputs.config, inputs.folder)


def test_the_address_in_an_error_has_no_password(tmp_path: Path, digits: Path) -> None:
    with _server(401) as uri:
        inputs = CheckInputs(digits, tmp_path / "run", f"track.uri={uri.replace('//', '//me:Zx9/Qw#r@')}")
        with pytest.raises(errors.TemporaryError, match=f"^MLflow at {uri} answers 401"):
            tracker.check_server_answers(inputs.config, inputs.folder)


@pytest.mark.full
def test_the_all_reduce_check_reports_what_failed(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = CheckInputs(digits, tmp_path / "run", "run.device=cpu")
    assert "2 processes over gloo" in checks.check_all_reduce(inputs.config, HERE.resized(2))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(
        errors.TemporaryError, match=r"all-reduce of 2 processes failed over gloo .*: look at"
    ):
        checks.check_all_reduce(inputs.config, HERE.resized(2))


@pytest.mark.full
def test_the_sanity_checks_pass_on_good_data_and_name_wiring_mistakes(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("model.arch=shufflenet_v2_x0_5", "run.device=cpu", "data.workers=0")
    good = CheckInputs(digits, tmp_path / "run", *small)
    checks = sanity.SanityChecks(good.config, good.plan, good.source, HERE)
    checks.check_initial_loss()
    checks.check_one_batch_overfits()
    checks.check_shuffled_labels_give_chance()

    with monkeypatch.context() as patch:  # logits that are far too large
        patch.setattr(
            sanity, "build", lambda options, classes: nn.Sequential(build(options, classes), LoudLogits())
        )
        with pytest.raises(
            errors.RequestError,
            match=r"the initial loss is .*, but a random guess among 10 classes has 2.30: look",
        ):
            checks.check_initial_loss()
    for rate in (0.0, 1e30):  # the second makes the loss NaN
        with monkeypatch.context() as patch:
            patch.setattr(sanity, "_LEARNING_RATE", rate)
            with pytest.raises(errors.RequestError, match="the model does not overfit 32 images"):
                checks.check_one_batch_overfits()
    with monkeypatch.context() as patch:  # labels that are not shuffled
        patch.setattr(sanity, "_shuffled", lambda labels, draw: labels)
        with pytest.raises(
            errors.RequestError, match=r"trained on shuffled labels, .* look for images that are in both"
        ):
            checks.check_shuffled_labels_give_chance()


class LoudLogits(nn.Module):
    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return 40 * logits


@contextmanager
def _server(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.end_headers()
            if status == 403:
                self.wfile.write(b"Invalid Host header - possible DNS rebinding attack detected")

        do_PUT = do_DELETE = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


# --- object stores


@pytest.fixture(scope="module")
def digits_pack(digits: Path, tmp_path_factory: pytest.TempPathFactory, jpegtran: str) -> Path:
    out = tmp_path_factory.mktemp("pack") / "digits"
    pack(digits, out, "lossless", 0.1)
    return out


def copy_into(bucket: Bucket, root: Path) -> str:
    """Copy a pack into a bucket; return its place."""
    for path in root.iterdir():
        bucket.write(f"pack/{path.name}", path.read_bytes())
    return f"{bucket.place}/pack"


def test_a_store_that_honours_ranges_and_conditions_passes(
    tmp_path: Path, digits: Path, digits_pack: Path, bucket: Bucket
) -> None:
    place, mirror = copy_into(bucket, digits_pack), f"{bucket.place}/run"
    before = bucket.names()
    words = ("data.source=pack", f"data.root={place}", f"checkpoint.mirror={mirror}")
    result = run_doctor(tmp_path, digits, "--json", *words)
    assert result.code == 0, result.err
    found = findings(result)
    assert re.fullmatch(rf"{place} returns one image in \d+\.\d ms", found["data store"]["line"])
    assert re.match(
        rf"{mirror} can be written, honours conditional writes, and .* ms$", found["mirror"]["line"]
    )
    assert bucket.names() == before, "no probe is left"


def test_a_store_that_ignores_ranges_or_conditions_is_refused_by_name(
    tmp_path: Path, digits: Path, digits_pack: Path, weak_bucket: Bucket
) -> None:
    place, mirror = copy_into(weak_bucket, digits_pack), f"{weak_bucket.place}/run"
    before = weak_bucket.names()
    words = ("data.source=pack", f"data.root={place}", f"checkpoint.mirror={mirror}")
    result = run_doctor(tmp_path, digits, "--json", *words)
    assert result.code == 2
    found = {
        name: f"{row['line']}: {row['remedy']}" for name, row in findings(result).items() if not row["ok"]
    }
    assert list(found) == ["data", "mirror"]
    ignored = (
        "the store answers a read of a part of an object with 200, not 206: use a store that honours ranges"
    )
    assert found["data"].startswith(f"data.root={place}: {ignored}")
    assert re.match(rf"{mirror} ignores If-None-Match and overwrites .*: use a store that", found["mirror"])
    assert weak_bucket.names() == before, "no probe is left"


class IgnoresIfMatch(Store):
    """A store that honours If-None-Match only."""

    def write(self, name: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        return super().write(name, data, if_absent=if_absent)


def test_a_store_that_ignores_if_match_is_refused(bucket: Bucket) -> None:
    with pytest.raises(errors.RequestError, match=rf"^{bucket.place}/run ignores If-Match and overwrites"):
        store.check_mirror(IgnoresIfMatch(f"{bucket.place}/run"))
    assert bucket.names() == []


@pytest.mark.parametrize(
    ("rates", "only", "kind"),
    [({"403": 1.0}, "GET ", errors.RequestError), ({"500": 1.0}, "GET ", errors.TemporaryError),
     ({"403": 1.0}, "PUT ", errors.RequestError)],
)  # fmt: skip
def test_a_failed_check_of_a_mirror_leaves_no_probe(
    bucket: Bucket, fault_proxy: FaultProxy, rates: dict[str, float], only: str, kind: type[Exception]
) -> None:
    fault_proxy.rates, fault_proxy.only = rates, only
    with pytest.raises(kind, match=re.escape(bucket.place)):
        store.check_mirror(Store(f"{bucket.place}/run"))
    assert bucket.names() == []


def test_a_store_that_fails_now_and_then_passes(
    bucket: Bucket, digits_pack: Path, fault_proxy: FaultProxy
) -> None:
    """A request whose answer is lost is repeated, and then finds what it wrote itself."""
    source = open_source(load("digits", ["data.source=pack", f"data.root={copy_into(bucket, digits_pack)}"]))
    fault_proxy.rates = {"500": 0.1, "truncate": 0.2}
    for _ in range(5):
        assert "honours conditional writes" in store.check_mirror(Store(f"{bucket.place}/run"))
        assert "returns one image" in store.check_reads(source.train)
    assert fault_proxy.counts["truncate"] > 5


def test_a_store_out_of_reach_is_temporary(tmp_path: Path, digits: Path) -> None:
    result = run_doctor(tmp_path, digits, "checkpoint.mirror=s3://bucket/run", AWS_ENDPOINT_URL="http://127.0.0.1:1",
                        AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="not-to-be-shown")  # fmt: skip
    assert (result.code, "the store is out of reach (s3://bucket/run/" in result.error) == (75, True)
    assert "not-to-be-shown" not in result.out + result.err


def test_no_message_is_taken_apart_again(tmp_path: Path) -> None:
    """The parts of an error arrive as they were raised, whatever a path in them holds."""
    error = errors.StorageError("run.dir=/a: set b cannot be\nwritten: x", "make room: really")
    assert str(error) == "run.dir=/a: set b cannot be written: x: make room: really"
    for again in (pickle.loads(pickle.dumps(error)), _saved_and_loaded(tmp_path, error)):
        assert type(again) is errors.StorageError
        assert (again.problem, again.remedy) == (
            "run.dir=/a: set b cannot be written: x",
            "make room: really",
        )


def _saved_and_loaded(folder: Path, error: errors.RunError) -> errors.RunError:
    save_failure(folder, error, "request")
    loaded = load_failure(folder, "request")
    assert loaded
    return loaded
