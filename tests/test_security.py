"""Data never executes: files from a registry, an archive or a cache are read or refused by name."""

import dataclasses
import importlib.util
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
import yaml
from harness import ROOT, SMALL, MakeJob, environment, listening, make_database, quick
from manifests import one, pod_of
from mlflow import MlflowClient
from server import Server, foreign_server, tracked_job
from test_predict import ARCH, CLASSES, run_dir  # noqa: F401 — a fixture
from torch import nn

from pipeline.addons.datasets import manifest
from pipeline.addons.datasets.holdout import HoldOut
from pipeline.addons.datasets.index import Index
from pipeline.addons.deploy.k8s import render
from pipeline.addons.deploy.options import RenderOptions
from pipeline.addons.mlflow.connection import check_artifact_host
from pipeline.addons.mlflow.exported_program import read_weights
from pipeline.addons.mlflow.model import export_model
from pipeline.addons.mlflow.tracker import check_server_answers
from pipeline.addons.models import pretrained
from pipeline.addons.models.functions import meta_model
from pipeline.addons.models.pretrained import pretrained_weights
from pipeline.addons.models.trained import weights_digest
from pipeline.cli.main import main
from pipeline.config.load import from_yaml, load
from pipeline.config.sections import Model
from pipeline.errors import RequestError, StorageError, TemporaryError
from pipeline.record import checkpoint_contents, checkpoint_files
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal

Capture = pytest.CaptureFixture[str]


class Payload(nn.Module):
    """A module that writes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        super().__init__()
        self.canary = canary

    def __reduce__(self) -> Any:
        return (Path.touch, (self.canary,))


def refusal(words: list[str], code: int, capture: Capture) -> str:
    """Run a command that must fail with one error line; return its standard error."""
    capture.readouterr()
    assert main(words) == code
    text = capture.readouterr().err
    assert "Traceback" not in text
    assert len([line for line in text.splitlines() if line.startswith("pipeline: ")]) == 1
    return text


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory, run_dir: Path) -> Path:  # noqa: F811
    """Return a model as the sender logs it: MLmodel, data/model.pt2 and the files MLflow adds."""
    model = tmp_path_factory.mktemp("logged") / "model"
    contents = checkpoint_contents.read_model(checkpoint_files.find(run_dir))
    export_model(contents, from_yaml(contents["config"], "test"), model).save(model / "MLmodel")
    return model


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    """Work in a folder that has a real MLflow store in runs/mlflow.db and can be imported from."""
    project = tmp_path / "project"
    (project / "runs").mkdir(parents=True)
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    make_database(project / "runs/mlflow.db")
    return MlflowClient(f"sqlite:///{project}/runs/mlflow.db")


def register(registry: MlflowClient, model: Path) -> str:
    """Register the files of a model unchanged and return the model's URI."""
    experiment = registry.create_experiment("digits", Path("runs/mlartifacts").absolute().as_uri())
    logged = registry.create_logged_model(experiment, "model").model_id
    registry.log_model_artifacts(logged, str(model))
    registry.create_registered_model("digits")
    mlflow.set_tracking_uri(registry.tracking_uri)  # where MLflow looks up the model
    version = registry.create_model_version("digits", f"models:/{logged}", model_id=logged)
    registry.set_registered_model_alias("digits", "best", version.version)
    return "models:/digits@best"


# Each changes a copy of the model so that it would make the file `canary` if its data was executed.


def a_pickle(model: Path, canary: Path) -> None:
    metadata = yaml.safe_load((model / "MLmodel").read_text())["metadata"]
    shutil.rmtree(model)
    mlflow.pytorch.save_model(
        Payload(canary), str(model), serialization_format="pickle", metadata=metadata,
        pip_requirements=["torch"],
    )  # fmt: skip


def a_code_entry(model: Path, canary: Path) -> None:
    """Shadow packages that torch.export imports by modules of the model."""
    description = yaml.safe_load((model / "MLmodel").read_text())
    for flavor in description["flavors"].values():
        flavor["code"] = "code"
    (model / "MLmodel").write_text(yaml.safe_dump(description))
    (model / "code").mkdir()
    for module in ("networkx", "sympy"):
        (model / "code" / f"{module}.py").write_text(f"open({str(canary)!r}, 'w')\n")


def an_import_path(model: Path, canary: Path) -> None:
    Path("canary_module.py").write_text(f"open({str(canary)!r}, 'w')\n")
    description = (model / "MLmodel").read_text()
    assert ARCH in description
    (model / "MLmodel").write_text(description.replace(ARCH, "canary_module:build"))


def a_pickled_weight(model: Path, canary: Path) -> None:
    """Replace the weights of the exported program by pickles."""
    buffer = io.BytesIO()
    torch.save(Payload(canary), buffer)

    def change(name: str, data: bytes) -> bytes:
        if "/weights/weight_" in name:
            return buffer.getvalue()
        return data.replace(b'"use_pickle": false', b'"use_pickle": true', 10)

    rewrite(model / "data/model.pt2", model / "data/model.pt2", change)


def a_tag(model: Path, canary: Path) -> None:
    (model / "MLmodel").write_text(f"metadata: !!python/object/apply:builtins.open [{canary}, w]\n")


def an_alias(model: Path, canary: Path) -> None:
    """Use an MLmodel of 600 bytes that expands to ten million entries."""
    levels = [f"a{n}: &a{n} {{<<: [{', '.join(10 * [f'*a{n - 1}'])}]}}" for n in range(1, 8)]
    (model / "MLmodel").write_text("\n".join(["a0: &a0 {k: v}", *levels, (model / "MLmodel").read_text()]))


def rewrite(
    good: Path, to: Path, change: Callable[[str, bytes], bytes], kind: int = zipfile.ZIP_STORED
) -> None:
    """Copy an archive with changed members."""
    with zipfile.ZipFile(good) as old:
        members = {name: change(name, old.read(name)) for name in old.namelist()}
    with zipfile.ZipFile(to, "w", kind) as new:
        for name, data in members.items():
            new.writestr(name, data)


@pytest.mark.fault("J5")
@pytest.mark.parametrize(
    ("attack", "code", "says"),
    [(a_pickle, 2, "has no data/model.pt2"), (a_code_entry, 2, "brings code of its own"),
     (an_import_path, 2, "model.arch=canary_module:build"),
     (a_pickled_weight, 4, "does not hold the weights"),
     *((attack, 2, "is not a model that this pipeline logged") for attack in (a_tag, an_alias))],
)  # fmt: skip
def test_a_registered_model_executes_nothing(
    attack: Callable[[Path, Path], None], registry: MlflowClient, logged: Path, tmp_path: Path, digits: Path,
    capsys: Capture, code: int, says: str,
) -> None:  # fmt: skip
    canary, before = tmp_path / "executed", list(sys.path)
    attack(Path(shutil.copytree(logged, tmp_path / "model")), canary)
    uri = register(registry, tmp_path / "model")
    assert says in refusal(["predict", uri, str(digits / "val" / "3")], code, capsys)
    if attack is a_pickle:  # as the first weights of a training, too
        words = (f"data.root={digits}", f"model.init={uri}", f"run.dir={tmp_path / 'run'}")
        assert says in quick("train", "digits", *SMALL, *words, code=code).error
    assert not canary.exists()
    assert sys.path == before


def test_a_logged_model_has_the_weights_of_its_checkpoint(
    registry: MlflowClient, logged: Path, run_dir: Path,  # noqa: F811
) -> None:  # fmt: skip
    options = Model(arch=ARCH, init=register(registry, logged))
    read = pretrained.read(options, meta_model(options, len(CLASSES)))
    weights = checkpoint_contents.read_model(checkpoint_files.find(run_dir))["model"]
    assert weights_digest(read) == weights_digest(weights)


@pytest.fixture
def unsent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a run with something to send to a server that is not asked twice."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_ALLOW_HTTP_REDIRECTS", "true")  # `sync` changes it, the patch restores it
    (tmp_path / "config.yaml").write_text(load("digits", ["track.experiment=trap"]).to_yaml())
    (tmp_path / "plan.json").write_text("{}")
    Journal(tmp_path / "journal.jsonl", pytest.fail).log_metrics(1, {"loss": 1.0})
    return tmp_path


def test_a_registry_cannot_send_a_client_to_another_host(
    registry: MlflowClient, digits: Path, unsent: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:  # fmt: skip
    """The password would go with the request for a model, and for an upload."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", registry.tracking_uri)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    with foreign_server() as (uri, seen):
        for place in (f"{uri}/model", uri.replace("http:", "mlflow-artifacts:"), "ftp://127.0.0.1/x"):
            name = place.partition(":")[0]
            registry.create_registered_model(name)
            registry.create_model_version(name, place)
            registry.create_experiment(name, place)
            (unsent / "config.yaml").write_text(load("digits", [f"track.experiment={name}"]).to_yaml())
            for words in (["predict", f"models:/{name}/1", str(digits / "val" / "3")], ["sync", str(unsent)]):
                assert "secret" not in refusal(words, 2, capsys)
    assert seen == []
    http, https = "http://mlflow.example", "https://mlflow.example"
    for files, server in (
        (f"{http}/x", https), (f"{https}/x", http), (f"{http}:5000/x", http),
        ("http://me@mlflow.example/x", http), ("mlflow-artifacts://mlflow.example:443/x", http),
    ):  # fmt: skip
        with pytest.raises(RequestError):
            check_artifact_host(files, server)
    for files, server in (
        (f"{https}:443/x", https), ("http://Mlflow.example/x", f"{http}:80"), ("mlflow-artifacts:/x", http),
        ("mlflow-artifacts://mlflow.example:80/x", http), ("s3://bucket/x", http),
        ("dbfs:/databricks/mlflow-tracking/x", "databricks"), ("/mlruns/x", "sqlite:///x"),
    ):  # fmt: skip
        check_artifact_host(files, server)


@pytest.mark.parametrize(
    ("variables", "user", "status"),
    [({}, "me:secret@", 301), ({"USERNAME": "me", "PASSWORD": "secret"}, "", 307),
     ({"TOKEN": "secret"}, "", 308)],
    ids=["address", "environment", "token"],
)  # fmt: skip
def test_a_password_follows_no_redirect(
    variables: dict[str, str], user: str, status: int, unsent: Path, digits: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: Capture,
) -> None:  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", value)
    with (
        foreign_server() as (target, seen),
        foreign_server(status, Location=f"{target}/x?key=y") as (uri, asked),
    ):
        given = uri.replace("//", f"//{user}")
        with pytest.raises(TemporaryError, match=f"answers {status} and redirects to {target}/x") as refused:
            check_server_answers(load("digits", [f"track.uri={given}"]), RunFolder(unsent))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
        for words in (["sync", str(unsent)], ["predict", "models:/digits@best", str(digits / "val" / "3")]):
            assert "secret" not in refusal(words, 75, capsys)
    assert "secret" not in str(refused.value)
    assert len(asked) >= 3
    assert all(authorization for _, authorization in asked)
    assert seen == []


def test_a_broken_or_foreign_registry_is_one_line(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "broken.db").write_bytes(b"no database" * 1000)
    with foreign_server() as (foreign, _):
        for uri, code in ((f"sqlite:///{tmp_path}/broken.db", 4), (foreign, 75)):
            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
            error = refusal(["predict", "models:/digits@best", str(digits / "val" / "3")], code, capsys)
            assert "models:/digits@best cannot be read from" in error


def test_an_exported_program_yields_its_tensors_or_is_refused(logged: Path, tmp_path: Path) -> None:
    expected = meta_model(Model(arch=ARCH), len(CLASSES)).state_dict()
    good, bad = logged / "data/model.pt2", tmp_path / "model.pt2"
    assert read_weights(good, "model.", expected).keys() == expected.keys()
    bad.write_bytes(good.read_bytes()[:1000])
    with pytest.raises(StorageError, match="does not hold the weights"):
        read_weights(bad, "model.", expected)
    rewrite(good, bad, lambda _, data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(StorageError, match="compressed or too large"):
        read_weights(bad, "model.", expected)
    for old, new in (
        ('"path_name": "weight_7"', '"path_name": "weight_7777"'),  # a missing member
        ('"path_name": "weight_7"', '"path_name": "../../../weight_7"'),
        ('"strides": [{"as_int": 27}', '"strides": [{"as_int": 99}'),  # out of bounds
        ('"storage_offset": {"as_int": 0}', '"storage_offset": {"as_int": 9}'),  # out of bounds
        ('"strides": [{"as_int": 27}', '"strides": [{"as_int": -9}'),
        ('"sizes": [{"as_int": 24}', '"sizes": [{"as_int": 25}'),
        ('"dtype": 7', '"dtype": 6'),
        ('"model.conv1.0.weight"', '"model.conv9.0.weight"'),
        ('"config"', '"confid"'),  # no table
        ("{", "["),  # no JSON
    ):

        def change(name: str, data: bytes, old: bytes = old.encode(), new: bytes = new.encode()) -> bytes:
            return data.replace(old, new) if name.endswith("model_weights_config.json") else data

        rewrite(good, bad, change)
        with pytest.raises(StorageError, match="does not hold the weights"):
            read_weights(bad, "model.", expected)


@pytest.mark.fault("J5")
def test_cached_published_weights_execute_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = pretrained_weights("resnet18")["IMAGENET1K_V1"]
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save({"conv1.weight": Payload(tmp_path / "executed")}, folder / Path(weights.url).name)
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    options = Model(arch="resnet18", init="IMAGENET1K_V1")
    with pytest.raises(StorageError, match=r"its file in torch's cache \(TORCH_HOME\) holds no weights"):
        pretrained.read(options, meta_model(options, 10))
    assert not (tmp_path / "executed").exists()


@pytest.mark.fault("J5")
def test_forged_indices_delivered_with_the_data_are_ignored(digits: Path, tmp_path: Path) -> None:
    """Distrust the cache in the data's folder: whoever made the data may have made the cache."""
    root = tmp_path / "digits"
    shutil.copytree(digits, root, copy_function=os.link)
    (tmp_path / "outside.png").write_bytes(b"outside")
    real = manifest.scan(root, HoldOut())
    val = [(real.val.name(i), int(real.val.sizes[i]), int(real.val.labels[i])) for i in range(len(real.val))]
    names = ("../outside.png", "/outside.png", "val/0/../../../outside.png", "val/0/a\0.png")
    splits = [manifest.Split.from_entries([(name.encode(), 7, 0), *val[1:]]) for name in names]
    splits.append(dataclasses.replace(real.val, labels=real.val.labels + 7))
    ends = real.val.ends.copy()
    ends[1:3] = (1 << 63) - 1, 1000 - (1 << 63)  # each difference wraps to a positive number
    splits.append(dataclasses.replace(real.val, ends=ends))
    folders = {key: (root / key).stat().st_mtime_ns for key in real.folders}
    for split in splits:
        shutil.rmtree(root / manifest.CACHE, ignore_errors=True)
        forged = dataclasses.replace(real, val=split, folders=folders)
        manifest.save_index(forged, root / manifest.CACHE)
        assert manifest.open_index(root, HoldOut(), tmp_path / "a", check_sizes=False).digest == real.digest
        assert manifest.find_cached_index(root, tmp_path / "a", forged.digest) is None
    data = real.to_bytes()
    start = data.index(b"{")
    end = start + int.from_bytes(data[start - 8 : start], "little")
    head = json.loads(data[start:end])
    changes: tuple[dict[str, Any], ...] = (
        {"arrays": [[head["arrays"][0][0], 1 << 70], *head["arrays"][1:]]}, {"folders": {"a\0b": 1}},
        {"folders": {"\ud800": 1}}, {"classes": list(range(10))}, {"split_by": "\x1b[2J"},
        {"classes": ["\x1b[2J\n", *head["classes"][1:]]}, {"val_split": float("nan")},
    )  # fmt: skip
    texts = [json.dumps(forged).encode() for forged in ([head], *(head | change for change in changes))]
    for number, text in enumerate((data[start:end], b"[" * 200_000, *texts)):
        forgery = data[: start - 8] + len(text).to_bytes(8, "little") + text + data[end:]
        (root / manifest.CACHE / f"{number}.index").write_bytes(forgery)
        if number == 0:
            assert Index.from_bytes(forgery).digest == real.digest
        else:
            with pytest.raises(ValueError, match=r"."):
                Index.from_bytes(forgery)
    assert manifest.open_index(root, HoldOut(), tmp_path / "b", check_sizes=False).digest == real.digest


def test_no_error_line_repeats_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (
        "train digits checkpoint.mirror={}", "train digits data.source=pack data.root={}",
        "train digits data.root={}", "train digits run.resume={}", "train digits model.init={}",
        "data check {}", "evaluate {}", "sync {}", "train {}", "k8s render --store {}",
    ):  # fmt: skip
        error = refusal(words.format("s3://AKIA:secret@bucket/x").split(), 2, capfd)
        assert ("bucket/x" in error, "secret" in error) == (True, False), error


HOST = """
import ctypes, socket
assert ctypes.CDLL(None).unshare(0x14000000) == 0  # CLONE_NEWUSER | CLONE_NEWUTS
socket.sethostname("{name}")
"""


@pytest.mark.parametrize("by_torchrun", [False, True], ids=["--nproc", "torchrun"])
def test_a_training_cannot_be_reached_from_outside(by_torchrun: bool, job: MakeJob) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        # by default gloo listens at the address of the host name, which is a container's network
        prelude = HOST.format(name=probe.getsockname()[0])
    run = job("train.epochs=1000", nproc=2, by_torchrun=by_torchrun, prelude=prelude)
    try:
        run.start().wait_for_step(1)
        for pid in (run.process.pid, *run.ranks()):
            assert {address for address, _ in listening([pid])} == {"127.0.0.1"}, pid
    finally:
        run.clean()


def test_a_training_imports_nothing_from_the_current_folder(tmp_path: Path, digits: Path, full: bool) -> None:
    """Train in a folder of files from elsewhere, with the console script `pipeline`."""
    for name in ("yaml", "torch", "mlflow", "multiprocessing"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    script = tmp_path / "bin" / "pipeline"
    script.parent.mkdir()
    script.write_text("from pipeline.cli.main import command\ncommand()\n")
    job = tracked_job(Path("run"), digits, "track.uri=sqlite:///mlflow.db", "train.max_steps=2")
    make_database(tmp_path / "mlflow.db")
    for words in ([*job.train_words(), "--nproc", "2"], *([["verify", "run"]] if full else [])):
        command = [sys.executable, script, *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "executed").exists()
    tracker = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = tracker.search_runs([experiment.experiment_id for experiment in tracker.search_experiments()])
    assert run.info.status == "FINISHED"


@pytest.mark.full
def test_a_server_with_a_password_requires_it_and_a_training_sends_it(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start a server with the arguments of compose and the manifests, and run their probes."""
    if not importlib.util.find_spec("flask_wtf"):
        pytest.skip("MLflow's extra `auth`, which the lock files have, is not installed")
    compose = yaml.safe_load((ROOT / "docker-compose.auth.yml").read_text())["services"]["mlflow"]
    manifests = list(yaml.safe_load_all(render(RenderOptions(mlflow_auth=True))["30-mlflow.yaml"]))
    (container,) = pod_of(one(manifests, "Deployment", "mlflow"))["containers"]
    assert sorted(compose["command"]) == sorted(container["args"])
    password = "a long enough password"
    secret = {**dict.fromkeys(compose["environment"], password), "MLFLOW_AUTH_ADMIN_USERNAME": "me"}
    given = {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": password}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with Server(tmp_path, *compose["command"], **secret) as server:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{server.uri}/api/2.0/mlflow/experiments/search?max_results=1")
        for script in (container["readinessProbe"]["exec"]["command"][2], compose["healthcheck"]["test"][3]):
            assert "http://127.0.0.1:5000/" in script
            probe = [sys.executable, "-c", script.replace("127.0.0.1:5000", f"127.0.0.1:{server.port}")]
            assert subprocess.run(probe, env=environment(**secret), check=False).returncode == 0
            wrong = environment(**{**secret, "MLFLOW_AUTH_ADMIN_PASSWORD": "another one"})
            assert subprocess.run(probe, env=wrong, capture_output=True, check=False).returncode != 0
        words = ("train.max_steps=4", f"track.uri={server.uri}")
        run = tracked_job(tmp_path / "run", digits, *words, **given).finished()
        assert server.run_of(run).info.status == "FINISHED"
