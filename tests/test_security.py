"""Data never executes: files from a registry, an archive or a cache are read or refused by name."""

import dataclasses
import functools
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
from harness import SMALL, Job, environment, free_port, listening, make_database, quick
from manifests import one, pod_of
from mlflow import MlflowClient
from server import Server, foreign_server, tracked_job
from test_predict import CLASSES, run_dir  # noqa: F401 — a fixture
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
    contents = checkpoint_contents.decode(path.read_bytes(), path)
    description = export_model(contents, from_yaml(contents["config"], "test"), folder / "model")
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
    version = client(project).create_model_version(
        name, f"models:/{model_info.model_id}", model_id=model_info.model_id
    )
    client(project).set_registered_model_alias(name, "best", version.version)
    return f"models:/{name}@best"


def copy_changed(logged: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Copy the model with a changed MLmodel."""
    shutil.copytree(logged, to)
    description = yaml.safe_load((to / "MLmodel").read_text())
    change(description)
    (to / "MLmodel").write_text(yaml.safe_dump(description))


def set_code(description: dict[str, Any]) -> None:
    for flavor in description["flavors"].values():
        flavor["code"] = "code"


def set_import_path(description: dict[str, Any]) -> None:
    config = description["metadata"]["config"]
    assert f"arch: {ARCH}" in config
    description["metadata"]["config"] = config.replace(f"arch: {ARCH}", "arch: canary_module:build")


def a_pickle(logged: Path, to: Path, canary: Path) -> None:
    metadata = yaml.safe_load((logged / "MLmodel").read_text())["metadata"]
    mlflow.pytorch.save_model(
        Payload(canary), str(to), serialization_format="pickle", metadata=metadata, pip_requirements=["torch"]
    )


def a_code_entry(logged: Path, to: Path, canary: Path) -> None:
    """Shadow packages that torch.export imports by modules of the model."""
    copy_changed(logged, to, set_code)
    (to / "code").mkdir()
    for module in ("networkx", "sympy"):
        (to / "code" / f"{module}.py").write_text(f"open({str(canary)!r}, 'w')\n")


def an_import_path(logged: Path, to: Path, canary: Path) -> None:
    Path("canary_module.py").write_text(f"open({str(canary)!r}, 'w')\n")
    copy_changed(logged, to, set_import_path)


def a_pickled_weight(logged: Path, to: Path, canary: Path) -> None:
    """Replace the weights of the exported program by pickles."""
    buffer = io.BytesIO()
    torch.save(Payload(canary), buffer)

    def change(name: str, data: bytes) -> bytes:
        if "/weights/weight_" in name:
            return buffer.getvalue()
        return data.replace(b'"use_pickle": false', b'"use_pickle": true', 10)

    copy_changed(logged, to, lambda _: None)
    rewrite(logged / "data/model.pt2", to / "data/model.pt2", change)


def a_tag(logged: Path, to: Path, canary: Path) -> None:
    copy_changed(logged, to, lambda _: None)
    (to / "MLmodel").write_text(f"metadata: !!python/object/apply:builtins.open [{canary}, w]\n")


def an_alias(logged: Path, to: Path, canary: Path) -> None:
    """Use an MLmodel of 600 bytes that expands to ten million entries."""
    copy_changed(logged, to, lambda _: None)
    levels = [f"a{n}: &a{n} {{<<: [{', '.join(10 * [f'*a{n - 1}'])}]}}" for n in range(1, 8)]
    (to / "MLmodel").write_text("\n".join(["a0: &a0 {k: v}", *levels, (to / "MLmodel").read_text()]))


ATTACKS = {
    a_pickle: (2, "has no data/model.pt2"),
    a_code_entry: (2, "brings code of its own"),
    an_import_path: (2, "model.arch=canary_module:build"),
    a_pickled_weight: (4, "does not hold the weights"),
    a_tag: (2, "is not a model that this pipeline logged"),
    an_alias: (2, "is not a model that this pipeline logged"),
}


def rewrite(
    good: Path, to: Path, change: Callable[[str, bytes], bytes], kind: int = zipfile.ZIP_STORED
) -> None:
    """Copy an archive with changed members."""
    with zipfile.ZipFile(good) as old, zipfile.ZipFile(to, "w", kind) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))


@pytest.fixture
def in_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.syspath_prepend(str(project))
    return project


@pytest.mark.fault("J5")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_registered_model_executes_nothing(
    attack: Callable[[Path, Path, Path], None], in_project: Path, logged: Path, tmp_path: Path, digits: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    canary, before = tmp_path / "executed", list(sys.path)
    attack(logged, tmp_path / "model", canary)
    uri = register(in_project, attack.__name__, tmp_path / "model")
    code, says = ATTACKS[attack]
    capsys.readouterr()
    assert main(["predict", uri, str(digits / "val" / "3")]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pipeline: ")
    assert says in line
    if attack is a_pickle:  # as the first weights of a training, too
        words = (f"data.root={digits}", f"model.init={uri}", f"run.dir={tmp_path / 'run'}")
        refused = quick("train", "digits", *SMALL, *words, cwd=in_project)
        assert (refused.code, says in refused.error) == (code, True), refused.err
    assert not canary.exists()
    assert sys.path == before


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
    weights = checkpoint_contents.decode(path.read_bytes(), path)["model"]
    assert weights_digest(read) == weights_digest(weights)


def test_a_registry_cannot_send_a_client_to_another_host(
    in_project: Path, digits: Path, unsent: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The password would go with the request for a model, and for an upload."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{in_project}/runs/mlflow.db")
    with foreign_server() as (uri, seen):
        places = (f"{uri}/model", uri.replace("http:", "mlflow-artifacts:"), "ftp://127.0.0.1/x")
        for number, place in enumerate(places):
            name = f"elsewhere-{number}"
            client(in_project).create_registered_model(name)
            client(in_project).create_model_version(name, place)
            client(in_project).create_experiment(name, place)
            (unsent / "config.yaml").write_text(load("digits", [f"track.experiment={name}"]).to_yaml())
            predict = ["predict", f"models:/{name}/1", str(digits / "val" / "3")]
            for command in (predict, ["sync", str(unsent)]):
                assert main(command) == 2
                line = capsys.readouterr().err.splitlines()[-1]
                assert line.startswith("pipeline: ")
                assert "secret" not in line
    assert seen == []


@pytest.fixture
def unsent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a run with something to send, with a password in the environment."""
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    # `sync` sets these, and the patch restores them
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_ALLOW_HTTP_REDIRECTS", "true")
    (tmp_path / "config.yaml").write_text(load("digits", ["track.experiment=trap"]).to_yaml())
    (tmp_path / "plan.json").write_text("{}")
    Journal(tmp_path / "journal.jsonl", pytest.fail).log_metrics(1, {"loss": 1.0})
    return tmp_path


def test_only_the_server_itself_and_stores_get_files_with_a_password(unsent: Path) -> None:
    http, https = "http://mlflow.example", "https://mlflow.example"
    for files, server in (
        (f"{http}/x", https), (f"{https}/x", http), (f"{http}:5000/x", http),
        ("http://other.example/x", http), ("mlflow-artifacts://mlflow.example:443/x", http),
        ("http://me@mlflow.example/x", http), ("abfss://c@a.dfs.core.windows.net/m", "sqlite:///x"),
    ):  # fmt: skip
        with pytest.raises(RequestError):
            check_artifact_host(files, server)
    for files, server in (
        (f"{https}:443/x", https), ("http://Mlflow.example/x", f"{http}:80"), ("mlflow-artifacts:/x", http),
        ("mlflow-artifacts://mlflow.example:80/x", http), ("s3://bucket/x", http),
        ("dbfs:/databricks/mlflow-tracking/x", "databricks"), ("/mlruns/x", "sqlite:///x"),
    ):  # fmt: skip
        check_artifact_host(files, server)


@pytest.mark.parametrize(("command", "status"), [("sync", 307), ("predict", 308)])
def test_mlflow_is_told_nothing_at_the_target_of_a_redirect(
    command: str, status: int, unsent: Path, digits: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    words = {"sync": [str(unsent)], "predict": ["models:/digits@best", str(digits / "val" / "3")]}[command]
    with foreign_server() as (target, seen), foreign_server(status, Location=f"{target}/api") as (uri, asked):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert main([command, *words]) == 75
    assert "Traceback" not in capsys.readouterr().err
    assert asked
    assert seen == []


@pytest.mark.parametrize(("kind", "status"), [("address", 301), ("environment", 303), ("token", 307)])
def test_a_password_follows_no_redirect(
    status: int, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    redirect = functools.partial(foreign_server, status)
    with foreign_server() as (target, seen), redirect(Location=f"{target}/api?token=x") as (uri, asked):
        if kind == "environment":
            monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
            monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
        if kind == "token":
            monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
        given = uri.replace("//", "//me:secret@") if kind == "address" else uri
        with pytest.raises(TemporaryError) as refusal:
            check_server_answers(load("digits", [f"track.uri={given}"]), RunFolder(tmp_path))
        assert f"answers {status} and redirects to {target}/api" in str(refusal.value)
        assert "secret" not in str(refusal.value)
    assert [bool(authorization) for _, authorization in asked] == [True]
    assert seen == []


def test_a_broken_or_unreachable_registry_is_one_line(
    tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (tmp_path / "broken.db").write_bytes(b"no database" * 1000)
    with foreign_server() as (uri, _):
        nobody = f"http://127.0.0.1:{free_port()}"
        for place, code in ((f"sqlite:///{tmp_path}/broken.db", 4), (nobody, 75), (uri, 75)):
            monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
            assert main(["predict", "models:/digits@best", str(digits / "val" / "3")]) == code
            (error,) = [
                line for line in capsys.readouterr().err.splitlines() if line.startswith("pipeline: ")
            ]
            assert "models:/digits@best cannot be read from" in error


def test_an_exported_program_yields_its_tensors_or_is_refused(logged: Path, tmp_path: Path) -> None:
    expected = meta_model(Model(arch=ARCH), len(CLASSES)).state_dict()
    good, bad = logged / "data/model.pt2", tmp_path / "model.pt2"
    assert read_weights(good, "model.", expected).keys() == expected.keys()
    changes: list[tuple[bytes, bytes]] = [
        (b'"path_name": "weight_7"', b'"path_name": "weight_7777"'),  # a missing member
        (b'"path_name": "weight_7"', b'"path_name": "../../../weight_7"'),
        (b'"strides": [{"as_int": 27}', b'"strides": [{"as_int": 99}'),  # out of bounds
        (b'"storage_offset": {"as_int": 0}', b'"storage_offset": {"as_int": 9}'),  # out of bounds
        (b'"strides": [{"as_int": 27}', b'"strides": [{"as_int": -9}'),
        (b'"sizes": [{"as_int": 24}', b'"sizes": [{"as_int": 25}'),  # another shape
        (b'"dtype": 7', b'"dtype": 6'),
        (b'"model.conv1.0.weight"', b'"model.conv9.0.weight"'),
        (b'"config"', b'"confid"'),  # no table
        (b"{", b"["),  # no JSON
    ]
    for old, new in changes:

        def change(name: str, data: bytes, old: bytes = old, new: bytes = new) -> bytes:
            return data.replace(old, new) if name.endswith("model_weights_config.json") else data

        rewrite(good, bad, change)
        with pytest.raises(StorageError, match="does not hold the weights"):
            read_weights(bad, "model.", expected)
    rewrite(good, bad, lambda _, data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(StorageError, match="compressed or too large"):
        read_weights(bad, "model.", expected)
    bad.write_bytes(good.read_bytes()[:1000])
    with pytest.raises(StorageError, match="does not hold the weights"):
        read_weights(bad, "model.", expected)


@pytest.mark.fault("J5")
def test_published_weights_in_the_cache_execute_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = pretrained_weights("resnet18")["IMAGENET1K_V1"]
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save({"conv1.weight": Payload(tmp_path / "executed")}, folder / Path(weights.url).name)
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    options = Model(arch="resnet18", init="IMAGENET1K_V1")
    with pytest.raises(StorageError, match=r"its file in torch's cache \(TORCH_HOME\) holds no weights"):
        pretrained.read(options, meta_model(options, 10))
    assert not (tmp_path / "executed").exists()


def forge_head(index: Index, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Return the index as bytes with a changed JSON header."""
    data = index.to_bytes()
    start = data.index(b"{")
    end = start + int.from_bytes(data[start - 8 : start], "little")
    head = change(json.loads(data[start:end]))
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return data[: start - 8] + len(text).to_bytes(8, "little") + text + data[end:]


def with_count(head: dict[str, Any]) -> dict[str, Any]:
    head["arrays"][0][1] = 1 << 70
    return head


HEADS: list[Callable[[dict[str, Any]], Any]] = [
    with_count,
    lambda head: head | {"folders": {"a\0b": 1}},
    lambda head: head | {"folders": {"\ud800": 1}},
    lambda head: head | {"classes": list(range(10))},
    lambda head: head | {"classes": ["\x1b[2J\n", *head["classes"][1:]]},
    lambda head: head | {"val_split": float("nan")},
    lambda head: head | {"split_by": "\x1b[2J"},
    lambda head: b"[" * 200_000,
    lambda head: [head],
]


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
    assert Index.from_bytes(forge_head(real, lambda head: head)).digest == real.digest
    for number, change in enumerate(HEADS):
        with pytest.raises(ValueError, match=r"."):
            Index.from_bytes(forge_head(real, change))
        (root / manifest.CACHE / f"{number}.index").write_bytes(forge_head(real, change))
    assert manifest.open_index(root, HoldOut(), tmp_path / "b", check_sizes=False).digest == real.digest


def test_no_error_line_repeats_a_key_that_was_given_in_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (
        "train digits checkpoint.mirror={}", "train digits data.source=pack data.root={}",
        "train digits data.root={}", "train digits run.resume={}", "train digits model.init={}",
        "data check {}", "evaluate {}", "sync {}", "train {}", "k8s render --store {}",
    ):  # fmt: skip
        assert main(words.format("s3://AKIA:secret@bucket/x").split()) == 2
        lines = capfd.readouterr().err
        assert lines.startswith("pipeline: ")
        assert "bucket/x" in lines
        assert "secret" not in lines


HOST = """
import ctypes, socket
assert ctypes.CDLL(None).unshare(0x14000000) == 0  # CLONE_NEWUSER | CLONE_NEWUTS
socket.sethostname("{name}")
"""


@pytest.mark.parametrize("by_torchrun", [False, True], ids=["--nproc", "torchrun"])
def test_a_training_on_one_machine_cannot_be_reached_from_another(
    by_torchrun: bool, tmp_path: Path, digits: Path
) -> None:
    words = ["digits", f"data.root={digits}", *SMALL, "train.epochs=1000"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        # by default gloo listens at the address of the host name, which is a container's network
        prelude = HOST.format(name=probe.getsockname()[0])
    run = Job(tmp_path / "run", words, nproc=2, by_torchrun=by_torchrun, prelude=prelude)
    try:
        run.start().wait_for_step(1)
        assert run.process
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
    words = tracked_job(
        Path("run"), digits, "track.uri=sqlite:///mlflow.db", "train.max_steps=2"
    ).train_words()
    make_database(tmp_path / "mlflow.db")
    for command in ([*words, "--nproc", "2"], *([["verify", "run"]] if full else [])):
        done = subprocess.run(
            [sys.executable, script, *command],
            cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
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
    texts = render(RenderOptions(mlflow_auth=True))["30-mlflow.yaml"]
    (container,) = pod_of(one(list(yaml.safe_load_all(texts)), "Deployment", "mlflow"))["containers"]
    assert sorted(compose["command"]) == sorted(container["args"])
    secret = dict.fromkeys(compose["environment"], "a long enough password") | {
        "MLFLOW_AUTH_ADMIN_USERNAME": "me"
    }
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
        run = tracked_job(
            tmp_path / "run", digits, "train.max_steps=4", MLFLOW_TRACKING_URI=server.uri, **given
        )
        result = run.run()
        assert result.code == 0, result.err
        assert server.run_of(run).info.status == "FINISHED"
    finally:
        server.kill()
