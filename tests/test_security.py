"""Data never executes: files from a registry, an archive or a cache are read or refused by name."""

import contextlib
import dataclasses
import http.server
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
import yaml
from harness import SMALL, Job, environment, free_port, pipeline
from manifests import one, pod_of
from mlflow import MlflowClient
from server import Server
from test_predict import CLASSES, run_dir  # noqa: F401 — a fixture
from torch import nn
from torchvision.datasets.folder import default_loader

from pipeline.cli.main import main
from pipeline.config.load import from_yaml, load
from pipeline.config.schema import Model
from pipeline.data import manifest
from pipeline.deploy.k8s import RenderOptions, render
from pipeline.errors import StorageError, TemporaryError
from pipeline.model.architectures import meta_model, pretrained_weights
from pipeline.preflight.tracker import check_server_answers
from pipeline.record import checkpoint, checkpoint_files
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal
from pipeline.record.mlflow.exported_program import read_weights
from pipeline.record.mlflow.model import export_model
from pipeline.train import pretrained

ROOT = Path(__file__).parents[1]
ARCH = "shufflenet_v2_x0_5"


class Payload(nn.Module):
    """A module that writes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        super().__init__()
        self.canary = canary

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images

    def __reduce__(self) -> Any:
        return (Path.touch, (self.canary,))


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory, run_dir: Path) -> Path:  # noqa: F811
    """Return a model as the sender logs it: MLmodel, data/model.pt2 and the files MLflow adds."""
    folder = tmp_path_factory.mktemp("logged")
    path = checkpoint_files.find(run_dir)
    config = from_yaml(checkpoint.decode(path.read_bytes(), path)["config"], "test")
    description = export_model(path, config, folder / "model")
    description.save(folder / "model" / "MLmodel")
    return folder / "model"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a real MLflow store in runs/mlflow.db."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "runs").mkdir()
    client(folder).create_experiment("digits", (folder / "runs" / "mlartifacts").as_uri())
    return folder


def client(project: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{project}/runs/mlflow.db")


def register(project: Path, name: str, model: Path) -> str:
    """Register the files of a model unchanged and return the model's URI."""
    (experiment,) = (found for found in client(project).search_experiments() if found.name == "digits")
    model_info = client(project).create_logged_model(experiment.experiment_id, name)
    client(project).log_model_artifacts(model_info.model_id, str(model))
    client(project).create_registered_model(name)
    mlflow.set_tracking_uri(f"sqlite:///{project}/runs/mlflow.db")  # where MLflow looks up the model
    version = client(project).create_model_version(name, f"models:/{model_info.model_id}", model_id=model_info.model_id)
    client(project).set_registered_model_alias(name, "best", version.version)
    return f"models:/{name}@best"


def copy_changed(logged: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy the model with a changed MLmodel and return the copy."""
    for path in logged.rglob("*"):
        if path.is_file():
            (to / path.relative_to(logged)).parent.mkdir(parents=True, exist_ok=True)
            (to / path.relative_to(logged)).write_bytes(path.read_bytes())
    description = yaml.safe_load((to / "MLmodel").read_text())
    change(description)
    (to / "MLmodel").write_text(yaml.safe_dump(description))
    return to


def a_pickle(logged: Path, to: Path, canary: Path) -> Path:
    metadata = yaml.safe_load((logged / "MLmodel").read_text())["metadata"]
    mlflow.pytorch.save_model(
        Payload(canary), str(to), serialization_format="pickle", metadata=metadata, pip_requirements=["torch"]
    )
    return to


def a_code_entry(logged: Path, to: Path, canary: Path) -> Path:
    """Shadow packages that torch.export imports by modules of the model."""

    def change(description: dict[str, Any]) -> None:
        for flavor in description["flavors"].values():
            flavor["code"] = "code"

    (to / "code").mkdir(parents=True)
    for module in ("networkx", "sympy", "canary_module"):
        (to / "code" / f"{module}.py").write_text(f"open({str(canary)!r}, 'w')\n")
    return copy_changed(logged, to, change)


def a_loader_module(logged: Path, to: Path, canary: Path) -> Path:
    def change(description: dict[str, Any]) -> None:
        description["flavors"]["python_function"]["loader_module"] = "canary_module"
        description["flavors"]["python_function"]["code"] = "."

    to.mkdir()
    (to / "canary_module.py").write_text(f"open({str(canary)!r}, 'w')\n")
    return copy_changed(logged, to, change)


def an_import_path(logged: Path, to: Path, canary: Path) -> Path:
    def change(description: dict[str, Any]) -> None:
        config = description["metadata"]["config"]
        assert f"arch: {ARCH}" in config
        description["metadata"]["config"] = config.replace(f"arch: {ARCH}", "arch: canary_module:build")

    Path("canary_module.py").write_text(f"open({str(canary)!r}, 'w')\n")
    return copy_changed(logged, to, change)


def a_pickled_weight(logged: Path, to: Path, canary: Path) -> Path:
    """Replace the weights of the exported program by pickles."""
    copy_changed(logged, to, lambda _: None)
    with zipfile.ZipFile(logged / "data/model.pt2") as old, zipfile.ZipFile(to / "data/model.pt2", "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("weights_config.json"):
                data = data.replace(b'"use_pickle": false', b'"use_pickle": true', 10)
            elif "/weights/weight_" in name:
                buffer = io.BytesIO()
                torch.save(Payload(canary), buffer)
                data = buffer.getvalue()
            new.writestr(name, data)
    return to


def a_tag(logged: Path, to: Path, canary: Path) -> Path:
    copy_changed(logged, to, lambda _: None)
    (to / "MLmodel").write_text(f"metadata: !!python/object/apply:builtins.open [{canary}, w]\n")
    return to


ATTACKS = {
    a_pickle: (2, "has no data/model.pt2"),
    a_code_entry: (2, "brings code of its own"),
    a_loader_module: (2, "brings code of its own"),
    an_import_path: (2, "model.arch=canary_module:build"),
    a_pickled_weight: (4, "does not hold the weights"),
    a_tag: (2, "is not a model that this pipeline logged"),
}


@pytest.fixture
def in_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.syspath_prepend(str(project))
    return project


@pytest.mark.fault("J5")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_registered_model_executes_nothing(
    attack: Callable[[Path, Path, Path], Path], in_project: Path, logged: Path, tmp_path: Path, digits: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    canary = tmp_path / "executed"
    uri = register(in_project, f"{attack.__name__}-predict", attack(logged, tmp_path / "model", canary))
    code, says = ATTACKS[attack]
    before = list(sys.path)
    capsys.readouterr()
    assert main(["predict", uri, str(digits / "val" / "3")]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pipeline: ")
    assert says in line
    assert not canary.exists()
    assert sys.path == before


@pytest.mark.full
@pytest.mark.fault("J5")
@pytest.mark.parametrize("attack", [a_pickle, a_code_entry], ids=lambda attack: attack.__name__)
def test_pretrained_weights_from_a_registry_execute_nothing(
    attack: Callable[[Path, Path, Path], Path], in_project: Path, logged: Path, tmp_path: Path, digits: Path
) -> None:
    canary = tmp_path / "executed"
    uri = register(in_project, f"{attack.__name__}-train", attack(logged, tmp_path / "model", canary))
    result = pipeline(
        "train", "digits", *SMALL, f"data.root={digits}", f"model.init={uri}", "train.max_steps=1",
        f"run.dir={tmp_path / 'run'}", cwd=in_project, PYTHONPATH=f"{in_project}:{os.environ.get('PYTHONPATH', '')}",
    )  # fmt: skip
    assert (result.code, ATTACKS[attack][1] in result.error) == (2, True), result.err
    assert not canary.exists()


def test_a_logged_model_has_the_predictions_and_weights_of_its_checkpoint(
    in_project: Path, logged: Path, run_dir: Path, digits: Path, capsys: pytest.CaptureFixture[str],  # noqa: F811
) -> None:  # fmt: skip
    uri = register(in_project, "good", logged)
    outputs = []
    for target in (str(run_dir), uri):
        assert main(["predict", target, str(digits / "val" / "3"), "--json"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    options = Model(arch=ARCH, init=uri)
    read = pretrained.read(options, meta_model(options, len(CLASSES)))
    path = checkpoint_files.find(run_dir)
    weights = checkpoint.decode(path.read_bytes(), path)["model"]
    assert checkpoint.weights_digest(read) == checkpoint.weights_digest(weights)


def test_a_logged_model_needs_no_pickle_to_be_served(logged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    served = mlflow.pyfunc.load_model(str(logged))
    assert served.predict(np.zeros((3, 3, 32, 32), np.float32)).shape == (3, len(CLASSES))


@contextlib.contextmanager
def foreign_server(status: int = 200, location: str = "") -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Start a foreign server; yield its address and (path, Authorization) of each request."""
    seen: list[tuple[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers.get("Authorization", "")))
            self.send_response(status)
            if location:
                self.send_header("Location", location)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_PUT = do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("named", [False, True], ids=["runs/mlflow.db", "MLFLOW_TRACKING_URI"])
def test_a_registry_cannot_send_a_client_to_another_host(
    named: bool, in_project: Path, digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    if named:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{in_project}/runs/mlflow.db")
    with foreign_server() as (uri, seen):
        for n, source in enumerate((f"{uri}/model", uri.replace("http:", "mlflow-artifacts:"), "ftp://127.0.0.1/x")):
            name = f"elsewhere-{n}-{named}"
            client(in_project).create_registered_model(name)
            client(in_project).create_model_version(name, source)
            assert main(["predict", f"models:/{name}/1", str(digits / "val" / "3")]) == 2
            line = capsys.readouterr().err.splitlines()[-1]
            assert line.startswith("pipeline: ")
            assert "Traceback" not in line
            assert "secret" not in line
    assert seen == []


def test_a_run_is_not_sent_to_a_server_that_would_receive_the_password(
    in_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{in_project}/runs/mlflow.db")
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "0")  # `sync` sets them, and the patch restores them
    (tmp_path / "config.yaml").write_text(load("digits", ["track.experiment=trap"]).to_yaml())
    (tmp_path / "plan.json").write_text("{}")
    journal = Journal(tmp_path / "journal.jsonl", pytest.fail)
    journal.log_metrics(1, {"loss": 1.0})
    with foreign_server() as (uri, seen):
        client(in_project).create_experiment("trap", f"{uri}/api/2.0/mlflow-artifacts/artifacts/x")
        assert main(["sync", str(tmp_path)]) == 2
    assert "which would be sent your password" in capsys.readouterr().err.splitlines()[-1]
    assert seen == []


@pytest.mark.parametrize("trouble", ["no database", "nobody there", "not MLflow"])
def test_a_broken_or_unreachable_registry_is_one_line(
    trouble: str, tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (tmp_path / "no database").write_bytes(b"no database" * 1000)
    with foreign_server() as (uri, _):
        uris = {"nobody there": f"http://127.0.0.1:{free_port()}", "not MLflow": uri}
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uris.get(trouble, f"sqlite:///{tmp_path / trouble}"))
        code = main(["predict", "models:/digits@best", str(digits / "val" / "3")])
    assert code == {"nobody there": 75, "not MLflow": 75}.get(trouble, 4)
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("pipeline: ")]
    assert "models:/digits@best cannot be read from" in error


def test_an_exported_program_yields_its_tensors_or_is_refused(logged: Path, tmp_path: Path) -> None:
    expected = meta_model(Model(arch=ARCH), len(CLASSES)).state_dict()
    good = logged / "data/model.pt2"
    assert read_weights(good, "model.", expected).keys() == expected.keys()
    changes: dict[str, tuple[bytes, bytes]] = {
        "a missing member": (b'"path_name": "weight_7"', b'"path_name": "weight_7777"'),
        "a path": (b'"path_name": "weight_7"', b'"path_name": "../../../weight_7"'),
        "a stride out of bounds": (b'"strides": [{"as_int": 27}', b'"strides": [{"as_int": 99}'),
        "an offset out of bounds": (b'"storage_offset": {"as_int": 0}', b'"storage_offset": {"as_int": 9}'),
        "a negative stride": (b'"strides": [{"as_int": 27}', b'"strides": [{"as_int": -9}'),
        "another shape": (b'"sizes": [{"as_int": 24}', b'"sizes": [{"as_int": 25}'),
        "another type": (b'"dtype": 7', b'"dtype": 6'),
        "another model": (b'"model.conv1.0.weight"', b'"model.conv9.0.weight"'),
        "no table": (b'"config"', b'"confid"'),
        "no JSON": (b"{", b"["),
    }
    for label, (old, new) in changes.items():
        rewrite(good, tmp_path / "model.pt2", lambda data, old=old, new=new: data.replace(old, new))
        with pytest.raises(StorageError, match="does not hold the weights"):
            read_weights(tmp_path / "model.pt2", "model.", expected)
        print(f"refused: {label}")
    rewrite(good, tmp_path / "model.pt2", lambda data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(StorageError, match="compressed or too large"):
        read_weights(tmp_path / "model.pt2", "model.", expected)
    (tmp_path / "model.pt2").write_bytes(good.read_bytes()[:1000])
    with pytest.raises(StorageError, match="does not hold the weights"):
        read_weights(tmp_path / "model.pt2", "model.", expected)


def rewrite(good: Path, to: Path, change: Callable[[bytes], bytes], kind: int = zipfile.ZIP_STORED) -> None:
    """Copy the archive of an exported program with a changed table of weights."""
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(to, "w", kind) as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, change(data) if name.endswith("model_weights_config.json") else data)


@pytest.mark.fault("J5")
def test_published_weights_in_the_cache_execute_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
@pytest.mark.parametrize("name", ["../outside.png", "/outside.png", "val/0/../../../outside.png", "val/0/a\0.png"])
def test_an_index_delivered_with_the_data_names_nothing_outside_it(name: str, digits: Path, tmp_path: Path) -> None:
    """Distrust the cache in the data's folder: whoever made the data may have made the cache."""
    root = tmp_path / "digits"
    shutil.copytree(digits, root, copy_function=os.link)
    (tmp_path / "outside.png").write_bytes(b"outside")
    real = manifest.scan(root, 0.1)
    names = [(real.val.name(i), int(real.val.sizes[i]), int(real.val.labels[i])) for i in range(len(real.val))]
    names[0] = (name.encode(), 7, 0)
    folders = {key: (root / key).stat().st_mtime_ns for key in real.folders}
    forged = dataclasses.replace(real, val=manifest.Split.from_entries(names), folders=folders)
    manifest.save_index(forged, root / manifest.CACHE)
    opened = manifest.open_index(root, 0.1, tmp_path / "spare", check_sizes=False)
    assert opened.digest == real.digest
    forged = dataclasses.replace(real, val=dataclasses.replace(real.val, labels=real.val.labels + 7), folders=folders)
    manifest.save_index(forged, root / manifest.CACHE)
    assert manifest.open_index(root, 0.1, tmp_path / "spare", check_sizes=False).digest == real.digest


def test_an_image_starts_no_ghostscript_in_the_loaders_of_a_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open a file whose content is EPS, for which Pillow starts `gs`, whatever the file's name."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\n")
    (tmp_path / "gs").chmod(0o755)
    (tmp_path / "cat.jpg").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(OSError, match="Ghostscript"):
        default_loader(str(tmp_path / "cat.jpg"))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("kind", ["address", "environment"])
def test_a_password_follows_no_redirect(
    status: int, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with foreign_server() as (target, seen), foreign_server(status, f"{target}/api?token=x") as (uri, asked):
        if kind == "environment":
            monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
            monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
        given = uri.replace("//", "//me:secret@") if kind == "address" else uri
        config = load("digits", [f"track.uri={given}"])
        with pytest.raises(TemporaryError) as refusal:
            check_server_answers(config, RunFolder(tmp_path))
        assert f"answers {status}: it redirects to {target}/api" in str(refusal.value)
        assert "set track.uri to that address" in str(refusal.value)
        assert "secret" not in str(refusal.value)
    assert [bool(authorization) for _, authorization in asked] == [True]
    assert seen == []


@pytest.mark.full
def test_a_server_with_a_password_requires_it_and_a_training_sends_it(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start a server with the arguments of compose and the manifests, and run their probes."""
    if not importlib.util.find_spec("flask_wtf"):
        pytest.skip("MLflow's extra `auth`, which the lock files have, is not installed")
    compose = yaml.safe_load((ROOT / "docker-compose.auth.yml").read_text())["services"]["mlflow"]
    texts = render(RenderOptions(mlflow_auth=True))["30-mlflow.yaml"]
    (container,) = pod_of(one(list(yaml.safe_load_all(texts)), "Deployment", "mlflow"))["containers"]
    assert sorted(compose["command"]) == sorted(container["args"])
    secret = dict.fromkeys(compose["environment"], "a long enough password") | {"MLFLOW_AUTH_ADMIN_USERNAME": "me"}
    given = {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "a long enough password"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "5")
    server = Server(tmp_path, *compose["command"], **secret).start()
    try:
        server.wait_ready()
        ask = f"{server.uri}/api/2.0/mlflow/experiments/search?max_results=1"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(ask, timeout=20)
        for script in (container["readinessProbe"]["exec"]["command"][2], compose["healthcheck"]["test"][3]):
            assert "http://127.0.0.1:5000/" in script
            probe = [sys.executable, "-c", script.replace("127.0.0.1:5000", f"127.0.0.1:{server.port}")]
            assert subprocess.run(probe, env=environment(**secret), check=False).returncode == 0
            wrong = environment(**{**secret, "MLFLOW_AUTH_ADMIN_PASSWORD": "another one"})
            assert subprocess.run(probe, env=wrong, stderr=subprocess.DEVNULL, check=False).returncode != 0
        small = [word for word in SMALL if not word.startswith("track.uri")]
        words = ["digits", f"data.root={digits}", *small, "data.workers=0", "train.epochs=1", "train.max_steps=4"]
        run = Job(tmp_path / "run", words, env={"MLFLOW_TRACKING_URI": server.uri, **given})
        result = run.run()
        assert result.code == 0, result.err
        assert server.run_of(run).info.status == "FINISHED"
    finally:
        server.kill()
