"""The doctor names each injected fault with its remedy before anything starts."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Result, quick
from object_store import Bucket, FaultProxy
from place import Place
from server import foreign_server

from pipeline import errors, machine
from pipeline.addons.datasets import images
from pipeline.addons.datasets.sources import open_source
from pipeline.addons.datasets.write_pack import pack
from pipeline.addons.deploy import node
from pipeline.addons.mlflow import tracker
from pipeline.addons.ops import doctor
from pipeline.addons.ops import machine as checks
from pipeline.addons.store import lease
from pipeline.addons.store.bucket import Store
from pipeline.config.load import load
from pipeline.device import choose_device
from pipeline.errors import NotFiniteError
from pipeline.plan import DataSize
from pipeline.planning import make_plan, request_digest
from pipeline.record.failure import save_failure
from pipeline.record.folder import RunFolder
from pipeline.world import World

HERE = World(cpus=2)


def run_doctor(tmp_path: Path, digits: Path, *words: str, code: int = 0, **env: str) -> tuple[Any, Result]:
    """Return the findings of `doctor --json`, by name, and the result."""
    request = ("digits", f"data.root={digits}", f"run.dir={tmp_path / 'run'}", "--json", *words)
    result = quick("doctor", *request, code=code, **{"MLFLOW_TRACKING_URI": ""} | env)
    rows = json.loads(result.out)["findings"]
    assert all(set(row) == {"check", "ok", "line", "remedy"} for row in rows)
    return {row["check"]: row for row in rows}, result


def test_a_request_that_can_run_passes_and_leaves_no_files(tmp_path: Path, digits: Path) -> None:
    found, _ = run_doctor(tmp_path, digits)
    assert all(row["ok"] for row in found.values())
    assert list(tmp_path.iterdir()) == []


def test_the_failure_of_the_last_start_is_reported(tmp_path: Path, digits: Path) -> None:
    config = load("digits", [f"data.root={digits}", f"run.dir={tmp_path / 'run'}"])
    config.run_dir.mkdir()
    save_failure(RunFolder(config.run_dir), NotFiniteError("nan at step 7"), request_digest(config, World()))
    found, _ = run_doctor(tmp_path, digits, code=3)
    assert found["last start"]["line"] == "nan at step 7"
    run_doctor(tmp_path, digits, "train.epochs=13")  # another request


def test_a_node_has_its_own_checks(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = node.environment(3, 2) | {"PET_RDZV_ENDPOINT": "localhost:29500"}
    found, _ = run_doctor(tmp_path, digits, **env)
    assert "6 processes on 3 nodes" in found["plan"]["line"]
    assert found["names"]["line"].endswith("localhost is 127.0.0.1")
    assert not found.keys() & {"CPUs", "memory", "disk space", "all-reduce"}
    monkeypatch.setattr(doctor, "_NAMES_TIMEOUT_S", 1)
    with pytest.raises(errors.TemporaryError, match=r"no-such-node\.invalid does not resolve"):
        doctor.check_names_resolve("no-such-node.invalid:29500")


def test_a_refusal_by_mlflow_is_named_and_stops_no_training(tmp_path: Path, digits: Path) -> None:
    required = "track.required=true"
    with foreign_server(403, lambda _: [b"Invalid Host header"]) as (uri, _):
        found, _ = run_doctor(tmp_path, digits, MLFLOW_TRACKING_URI=uri)  # training needs no tracker
        assert "answers 403" in found["MLflow"]["line"]
        run_doctor(tmp_path, digits, required, code=2, MLFLOW_TRACKING_URI=uri)  # as `train` does
        # for a node, its server may still be starting
        run_doctor(tmp_path, digits, required, code=75, MLFLOW_TRACKING_URI=uri, PET_NPROC_PER_NODE="1")
    database = "sqlite:////proc/x.db"
    answers = {uri: "Connection refused", database: "MLflow's database /proc/x.db cannot be written"}
    for place, says in answers.items():
        found, _ = run_doctor(tmp_path, digits, MLFLOW_TRACKING_URI=place)
        assert says in found["MLflow"]["line"]

    for status, check, says in (
        (500, tracker.check_server_stores_files, "answers 500"),
        (200, tracker.check_server_stores_files, "other bytes"),
        (401, tracker.check_server_answers, "^MLflow at {} answers 401"),
    ):
        with foreign_server(status, lambda _: [b"x"]) as (uri, _):
            config = load("digits", [f"track.uri={uri.replace('//', '//me:Zx9/Qw#r@')}"])
            with pytest.raises(errors.TemporaryError, match=says.format(uri)):  # without the password
                check(config, RunFolder(tmp_path))


@pytest.mark.skipif(machine.has_gpu(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("cause", "kind"),
    [("CUDA error: no kernel image is available for execution on the device", errors.RequestError),
     ("CUDA out of memory. Tried to allocate 2.00 MiB.", errors.TemporaryError)],
)  # fmt: skip
def test_a_gpu_that_torch_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch, cause: str, kind: Any) -> None:
    def fail(_: torch.device) -> None:
        raise RuntimeError(cause)

    for name, answer in {"is_available": True, "device_count": 1, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr("pipeline.device._compute", fail)
    with pytest.raises(kind, match="cannot use the GPU cuda:0"):
        choose_device(load("digits", ["run.device=cuda"]), HERE)


def test_what_the_machine_lacks_is_named(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("digits", [f"data.root={digits}", "data.workers=2"])
    with pytest.raises(errors.RequestError, match="4 processes share 2 CPUs: start fewer"):
        checks.check_cpu_per_process(HERE.resized(4))
    monkeypatch.setattr(machine, "available_memory", lambda: 1 << 30)
    with pytest.raises(errors.RequestError, match=r"need about 1.5 GiB, but only 1.0 GiB .*: give the"):
        checks.check_memory(make_plan(config, HERE, open_source(config).size), on_gpu=False)
    config = load("digits", ["batch.global=1200", "augment.size=224", "evaluate.batch=100"])
    plan = make_plan(config, World(size=8, local_size=8, cpus=96), DataSize(9600, 960, 10))
    for on_gpu, gib in ((False, "42.7"), (True, "43.8")):  # 8 × 3 × (32 + 16) MiB are pinned
        with pytest.raises(errors.RequestError, match=f"need about {gib} GiB"):
            checks.check_memory(plan, on_gpu=on_gpu)


def test_a_disk_that_is_small_or_not_shared_is_named(small_disk: Path, digits: Path) -> None:
    config, folder = load("digits", [f"data.root={digits}"]), RunFolder(small_disk / "run")
    two_machines = replace(HERE, size=4, local_size=2)
    with pytest.raises(errors.TemporaryError, match=r"run.dir is on tmpfs .*: use a volume"):
        checks.check_run_folder_is_shared(config, folder, two_machines)
    mirrored = load("digits", ["checkpoint.mirror=s3://bucket/run"])
    assert checks.check_run_folder_is_shared(mirrored, folder, two_machines)
    with pytest.raises(errors.StorageError, match=r"2 checkpoints, .* need 0.33 GiB more"):
        checks.check_disk_space(config, make_plan(config, HERE, open_source(config).size), folder)


def test_bad_images_and_the_decoder_are_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("digits", ["data.source=folder", f"data.root={place.path / 'images'}", "batch.global=2"])
    source = open_source(config)
    words = (config, source, make_plan(config, HERE, source.size), HERE)
    says = rf"JPEG by simplejpeg; {HERE.cpus} CPUs make about [\d,]+ training images/s"
    assert re.search(says, checks.check_images_decode(*words))
    monkeypatch.setattr(images, "simplejpeg", None)
    assert "JPEG by Pillow, which is slower" in checks.check_images_decode(*words)
    first = min((place.path / "images/train").glob("*/*"))
    first.write_bytes(bytes(first.stat().st_size))
    with pytest.raises(errors.StorageError, match=rf"{first.name} cannot be decoded .*'pipeline data check'"):
        checks.check_images_decode(*words)


@pytest.mark.full
def test_the_all_reduce_check_reports_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("digits", ["run.device=cpu"])
    assert "2 processes over gloo" in checks.check_all_reduce(config, HERE.resized(2))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(errors.TemporaryError, match=r"all-reduce of 2 processes failed over gloo .*: look"):
        checks.check_all_reduce(config, HERE.resized(2))


@pytest.mark.parametrize("kind", ["bucket", "weak_bucket"])
def test_a_store_that_ignores_ranges_or_conditions_is_refused_by_name(
    tmp_path: Path, digits: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    bucket: Bucket = request.getfixturevalue(kind)
    place, mirror = f"{bucket.place}/pack", f"{bucket.place}/run"
    pack(digits / "val", Store(place), "raw=8", 0.1)
    before = bucket.names()
    words = ("data.source=pack", f"data.root={place}", f"checkpoint.mirror={mirror}")
    found, _ = run_doctor(tmp_path, digits, *words, code=0 if kind == "bucket" else 2)
    assert bucket.names() == before, "no probe is left"
    refused = {name: row["line"] + row["remedy"] for name, row in found.items() if not row["ok"]}
    if kind == "bucket":
        assert not refused
        return
    assert list(refused) == ["data", "mirror"]
    assert re.match(rf"data.root={place}: .*use a store that honours ranges", refused["data"])
    assert re.match(rf"{mirror} ignores If-None-Match and overwrites .*use a store that", refused["mirror"])


class IgnoresIfMatch(Store):
    def write(self, name: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        return super().write(name, data, if_absent=if_absent)


def test_a_failed_check_of_a_mirror_leaves_no_probe(bucket: Bucket, fault_proxy: FaultProxy) -> None:
    for store, rates, only, error, says in (
        (IgnoresIfMatch, {}, "", errors.RequestError, "/run ignores If-Match and overwrites"),
        (Store, {"500": 1.0}, "GET ", errors.TemporaryError, ""),
        (Store, {"403": 1.0}, "PUT ", errors.RequestError, ""),
    ):
        fault_proxy.rates, fault_proxy.only = rates, only
        with pytest.raises(error, match=bucket.place + says):
            lease.check_mirror(store(f"{bucket.place}/run"))
        assert bucket.names() == []


def test_a_store_out_of_reach_is_temporary(tmp_path: Path, digits: Path) -> None:
    secret = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "not-to-be-shown"}
    nowhere = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    mirror = "checkpoint.mirror=s3://bucket/run"
    _, result = run_doctor(tmp_path, digits, mirror, code=75, **secret, **nowhere)
    assert "the store is out of reach (s3://bucket/run/" in result.error
    assert "not-to-be-shown" not in result.out + result.err
