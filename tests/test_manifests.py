"""The manifests: k8s/ equals the rendered defaults, all variants are valid, mistakes are found."""

import itertools
import os
import random
import re
import sys
import tarfile
from base64 import b64decode
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import quick
from manifests import Document, claims_of, containers, one, pod_of, problems, problems_of, settings, words_of

import pipeline as package
from pipeline.addons.deploy import node
from pipeline.addons.deploy.code import unpack
from pipeline.addons.deploy.k8s import render, render_sync
from pipeline.addons.deploy.options import RenderOptions
from pipeline.addons.run.provenance import provenance
from pipeline.config.load import load
from pipeline.errors import RequestError

IMAGE = f"registry.example/train@sha256:{64 * '0'}"
K8S = Path(package.__file__).parents[1] / "k8s"


def documents(request: RenderOptions) -> list[Document]:
    return [document for text in render(request).values() for document in yaml.safe_load_all(text)]


@pytest.fixture(scope="module")
def defaults() -> list[Document]:
    return documents(RenderOptions())


def test_the_k8s_folder_equals_the_rendered_defaults() -> None:
    assert {path.name: path.read_text() for path in sorted(K8S.glob("*.yaml"))} == render(RenderOptions())
    assert not [*K8S.glob("*kustomization*")], "kubectl apply -f would fail on it"


@pytest.mark.parametrize("path", sorted((K8S / "examples").iterdir()), ids=lambda path: path.stem)
def test_an_example_is_valid_and_fits_the_manifests(path: Path, defaults: list[Document]) -> None:
    text = path.read_text()
    claims = {d["metadata"]["name"] for d in defaults if d["kind"] == "PersistentVolumeClaim"} | {"archives"}
    images = {pod_of(one(defaults, *name))["containers"][0]["image"]
              for name in (("Job", "trainer"), ("Deployment", "mlflow"))}  # fmt: skip
    for document in yaml.safe_load_all(text):
        assert document["metadata"]["namespace"] == "ddp-pipeline"
        if document["kind"] == "TrainingRuntime":  # kubernetes_validate has no schema for it
            check_runtime(document, pod_of(one(defaults, "Job", "trainer")))
        elif document["kind"] != "TrainJob":
            assert problems_of(document) == []
            if "template" in document["spec"]:
                assert claims_of(pod_of(document)) <= claims
                assert {container["image"] for container in containers(pod_of(document))} <= images

    manifests = render(RenderOptions())
    if replaced := re.search(r"in place of k8s/(\S+\.yaml)", " ".join(text.replace("#", "").split())):
        del manifests[replaced[1]]
    found = [d for manifest in (text, *manifests.values()) for d in yaml.safe_load_all(manifest)]
    servers = [d["spec"]["template"]["metadata"]["labels"] for d in found if d["kind"] == "Deployment"]
    services = [d for d in found if d["kind"] == "Service"
                if any(d["spec"]["selector"].items() <= labels.items() for labels in servers)]  # fmt: skip
    ports = {d["metadata"]["name"]: d["spec"].get("ports", []) for d in services}
    addresses = {f"{name}:{entry['port']}" for name, entries in ports.items() for entry in entries}
    called = set(re.findall(r"http://([\w-]+:\d+)", yaml.safe_dump_all(found)))
    assert {"mlflow:5000"} <= called <= addresses, "each address has a Service, with pods"


def check_runtime(runtime: Document, expected: Document) -> None:
    """Check the Job that Kubeflow's operator makes of it, with names that the operator expects."""
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    step = replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": runtime["metadata"]}
    pod = pod_of(job | {"spec": replicated["template"]["spec"]})
    (container,) = pod["containers"]
    assert (replicated["name"], container["name"], step) == ("node", "node", "trainer")
    left_out = {"containers": [], "initContainers": []}
    assert {**expected, **pod, **left_out} == {**expected, **left_out}
    for ours, usual in zip(containers(pod), containers(expected), strict=True):
        sizes = ["--world", "2", "--nodes", "2"] if ours["name"] == "preflight" else []
        words = [*ours["command"], *ours.get("args", [])]
        assert words == [*usual["command"][:-1], "run.dir=/runs/digits", *sizes]
        for key in ("image", "resources", "securityContext", "volumeMounts"):
            assert ours[key] == usual[key]
    policy = runtime["spec"]["mlPolicy"]["torch"]["envInjection"]["targets"]
    assert policy == [{"jobName": "node", "containerNames": ["preflight"]}]


STORE = {"store": "s3://my-data/imagenet/", "store_endpoint": "https://s3.example.org:9000"}


def devices_of(job: Document) -> list[str]:
    """Return the words that choose a device, of each container."""
    words = [word for container in containers(pod_of(job)) for word in container["command"]]
    return [word for word in words if word.startswith("run.device=")]


@pytest.mark.parametrize("store", [{}, STORE], ids=["volumes", "store"])
@pytest.mark.parametrize("hardware", [{"gpus": 1}, {"gpus": 8}, {"gpus": 0, "nproc": 2, "single_node": True}])
@pytest.mark.parametrize(("nodes", "allowed"), [(1, ()), (2, ()), (8, ()), (4, (2, 3, 4))])
def test_every_rendered_variant_is_valid(
    nodes: int, allowed: tuple[int, ...], hardware: dict[str, Any], store: dict[str, Any]
) -> None:
    more = {"storage_class": "fast", "mlflow_auth": nodes > 2, "min_nodes": min(allowed, default=None)}
    request = RenderOptions(nodes=nodes, overrides=("batch.global=192",), **more, **hardware, **store)
    found = documents(request)
    assert problems(found) == []
    job = one(found, "Job", "trainer")
    pod = pod_of(job)
    assert ("affinity" in pod) == (nodes > 1 and not request.single_node)
    assert pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") == (request.gpus or None)
    assert devices_of(job) == 2 * ["run.device=cuda"] if request.gpus else not devices_of(job)
    variables = node.environment(nodes, request.gpus or request.nproc, allowed)
    assert settings(found).items() >= variables.items()
    claims = [d for d in found if d["kind"] == "PersistentVolumeClaim"]
    modes = {claim["metadata"]["name"]: claim["spec"]["accessModes"] for claim in claims}
    if store:
        assert modes.keys() == {"mlflow"}
        assert {"name": "runs", "emptyDir": {"sizeLimit": "50Gi"}} in pod["volumes"]
        assert settings(found)["AWS_ENDPOINT_URL"] == STORE["store_endpoint"]
    else:
        assert modes["runs"] == ["ReadWriteOnce" if request.single_node else "ReadWriteMany"]


OPTIONS: dict[str, Any] = {
    "runtime_class": "nvidia", "queue": "team-a", "no_recovery": True,
    "mlflow_auth": True, "pull_secret": "registry", "single_node": True, "gpus": 8,
    "store": "s3://my-data/imagenet", "service_account": "trainer",
}  # fmt: skip


def test_every_pair_of_options_is_valid() -> None:
    for pair in itertools.combinations(OPTIONS, 2):
        options = {name: OPTIONS[name] for name in pair}
        assert problems(documents(RenderOptions(overrides=("batch.global=128",), **options))) == [], pair


def test_an_option_is_written_where_it_belongs() -> None:
    options = {name: value for name, value in OPTIONS.items() if name not in ("gpus", "store")}
    found = documents(RenderOptions(overrides=("run.device=auto",), **options))
    job = one(found, "Job", "trainer")
    pod = pod_of(job)
    assert devices_of(job) == 2 * ["run.device=auto"], "not cuda"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert job["spec"]["template"]["metadata"] == {
        "labels": {"app": "trainer"}, "annotations": {"kueue.x-k8s.io/safe-to-forcefully-delete": "true"},
    }  # fmt: skip
    assert pod["runtimeClassName"] == "nvidia"
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("trainer", False)
    assert not [d for d in found if d["kind"] in ("Role", "ServiceAccount")]


PACK = {"data.source": "pack", "model.arch": "resnet18"}


@pytest.mark.parametrize(
    ("given", "root", "mirror", "size"),
    [({}, None, "s3://my-data/imagenet$(RUN_DIR)", "1Gi"),
     ({**PACK, "data.root": "/data"}, "s3://my-data/imagenet/data", "s3://my-data/imagenet$(RUN_DIR)", "1Gi"),
     ({**PACK, "data.root": "s3://other/pack", "data.cache": "/data/cache", "data.cache_gib": "200"},
      "s3://other/pack", "s3://my-data/imagenet$(RUN_DIR)", "220Gi"),
     ({"checkpoint.mirror": "s3://other/run"}, None, "s3://other/run", "1Gi")],
    ids=["digits", "pack", "its own bucket, with a cache", "its own mirror"],
)  # fmt: skip
def test_data_and_runs_are_stored(given: dict[str, str], root: str | None, mirror: str, size: str) -> None:
    overrides = [f"{key}={value}" for key, value in given.items()]
    pod = pod_of(one(documents(RenderOptions(overrides=overrides, **STORE)), "Job", "trainer"))
    for container in containers(pod):
        words = dict(word.split("=", 1) for word in words_of(container)[1:])  # the last one counts
        assert (words.get("data.root"), words["checkpoint.mirror"]) == (root, mirror)
    (data,) = (volume for volume in pod["volumes"] if volume["name"] == "data")
    assert data["emptyDir"]["sizeLimit"] == size


PUBLIC = {"10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"}


@pytest.mark.parametrize(
    ("endpoint", "cidr", "peers", "port"),
    [("https://s3.example.org", None, {"0.0.0.0/0": PUBLIC, "::/0": {"fc00::/7", "fe80::/10"}}, 443),
     ("http://10.0.0.5:9000", None, {"10.0.0.5/32": set()}, 9000),
     ("http://[fd00::5]", None, {"fd00::5/128": set()}, 80),
     ("https://s3.mine.internal", "10.1.0.0/16", {"10.1.0.0/16": set()}, 443),
     ("http://seaweedfs.storage.svc.cluster.local:8333", None, "storage", 8333)],
)  # fmt: skip
def test_trainers_reach_the_store_and_nothing_else_outside(
    endpoint: str | None, cidr: str | None, peers: Any, port: int, defaults: list[Document]
) -> None:
    found = documents(RenderOptions(store="s3://bucket", store_endpoint=endpoint, store_cidr=cidr))
    assert problems(found) == []
    assert settings(found).get("AWS_ENDPOINT_URL") == endpoint
    policies, usual = ([d for d in all_ if d["kind"] == "NetworkPolicy"] for all_ in (found, defaults))
    assert [policy for policy in policies if policy not in usual] == [one(found, "NetworkPolicy", "trainer")]
    before, now = (one(all_, "NetworkPolicy", "trainer")["spec"] for all_ in (defaults, found))
    assert {**now, "egress": 0} == {**before, "egress": 0}
    added = [rule for rule in now["egress"] if rule not in before["egress"]]
    assert len(now["egress"]) == len(before["egress"]) + 1
    assert [rule["ports"] for rule in added] == [[{"port": port, "protocol": "TCP"}]]
    if isinstance(peers, str):
        labels = {"kubernetes.io/metadata.name": peers}
        assert added[0]["to"] == [{"namespaceSelector": {"matchLabels": labels}}]
    else:
        blocks = [peer["ipBlock"] for peer in added[0]["to"]]
        assert {block["cidr"]: {*block.get("except", [])} for block in blocks} == peers


@pytest.mark.parametrize("run", ["My_run.2", "x" * 90])
def test_a_run_is_sent_to_mlflow_by_a_job_of_its_own(run: str, defaults: list[Document]) -> None:
    request = RenderOptions(image=IMAGE, namespace="mine", overrides=("model.arch=mynet:net",))
    ((name, text),) = render_sync(request, run).items()
    job = yaml.safe_load(text)
    assert problems_of(job) == []
    assert name == f"{job['metadata']['name']}.yaml"
    assert re.fullmatch("sync-[a-z0-9]([-a-z0-9]{0,57}[a-z0-9])?", job["metadata"]["name"])
    (container,) = pod_of(job)["containers"]
    words = ["pipeline", "sync", f"/runs/{run}", "--trust", "mynet:net"]
    assert (container["image"], container["command"][2:]) == (IMAGE, words)
    labels = job["spec"]["template"]["metadata"]["labels"]
    policies = {d["metadata"]["name"]: d["spec"] for d in defaults if d["kind"] == "NetworkPolicy"}
    assert policies["sync"]["podSelector"]["matchLabels"] == labels
    assert policies["sync"]["egress"] == policies["trainer"]["egress"][1:], "MLflow and DNS"
    (source,) = policies["mlflow"]["ingress"][0]["from"]
    assert labels["app"] in source["podSelector"]["matchExpressions"][0]["values"]


def test_a_recipe_of_any_yaml_style_survives_its_configmap(tmp_path: Path, defaults: list[Document]) -> None:
    recipe, mounted = tmp_path / "mine.yaml", tmp_path / "recipe.yaml"
    mounted.write_text(settings(defaults)["recipe.yaml"])
    assert load(str(mounted), ["run.dir=runs/digits"]) == load("digits", [])
    for text in (
        "# a comment\n%YAML 1.1\n---\n# another\ndata: {root: /data}\n...\n",
        "{data: {root: /data}, train: {epochs: 3, precision: 'fp32'}}\n",
        "  data:\n    root: /data\n  train:\n    epochs: 3\n",
        "# a comment\n\ndata:  # another\n  root: /data\r\ntrain:\n  epochs: 3",
    ):
        recipe.write_text(text)
        config = settings(documents(RenderOptions(recipe=str(recipe))))
        mounted.write_text(config["recipe.yaml"])
        assert load(str(mounted), ["run.dir=x"]) == load(str(recipe), ["run.dir=x"])
        assert (yaml.safe_load(mounted.read_text())["recipe"], config["RUN_DIR"]) == ("mine", "/runs/mine")
        is_kept = "# another" in mounted.read_text()
        assert is_kept == ("# a comment\n\n" in text), "comments are kept where possible"


def test_render_prints_what_it_writes_and_replaces_only_that(tmp_path: Path) -> None:
    words = ("k8s", "render", "digits", "--nodes", "1:5", "--image", IMAGE)
    printed = quick(*words)
    found = list(yaml.safe_load_all(printed.out))
    assert found == documents(RenderOptions(nodes=5, min_nodes=1, image=IMAGE))
    assert settings(found).items() >= node.environment(5, 1, (1, 2, 3, 4)).items()
    images = {container["image"] for container in containers(pod_of(one(found, "Job", "trainer")))}
    assert images == {IMAGE}
    sync = quick("k8s", "render", "--sync", "digits", "--out", str(tmp_path / "sync"))
    assert f"kubectl apply -f {tmp_path / 'sync/sync-digits.yaml'}" in sync.out

    words = (*words, "--out", str(tmp_path / "k8s"))
    for _ in range(2):
        assert "other contents" not in quick(*words).out
    files = [path.read_text() for path in sorted((tmp_path / "k8s").glob("*.yaml"))]
    assert printed.out.strip() == "---\n".join(files).strip()
    assert "(10-config.yaml, 50-trainer.yaml had other contents)" in quick(*words, "--nodes", "3").out
    assert "k8s/60-recovery.yaml" in quick(*words, "--no-recovery", code=2).error, "it would be applied"
    mine = tmp_path / "k8s/10-config.yaml"
    mine.write_text("kind: ConfigMap\nmetadata: {name: mine}\n")
    assert "was not written by" in quick(*words, code=2).error
    assert "mine" in mine.read_text()


NET = """
from torch.nn import AdaptiveAvgPool2d, Conv2d, Flatten, Sequential
def net(num_classes):
    return Sequential(Conv2d(3, num_classes, 3), AdaptiveAvgPool2d(1), Flatten())
"""


def test_code_is_sent_and_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module, and a package of two ConfigMaps, are sent without what must not be."""
    monkeypatch.setattr("sys.path", [*sys.path])  # the model is found in the folder
    monkeypatch.delitem(sys.modules, "mynet", raising=False)  # of another test
    code, parts, target = tmp_path / "mine", tmp_path / "parts", tmp_path / "code"
    (code / "pkg/__pycache__").mkdir(parents=True)
    (code / "mynet.py").write_text("from pkg import net\n")
    (code / "pkg/__init__.py").write_text(NET)
    (code / "pkg/table.bin").write_bytes(random.Random(0).randbytes(300_000))
    for name in ("notes.txt", ".env", "pkg/.secret", "pkg/__pycache__/x.pyc"):
        (code / name).write_text("not sent")
    (code / "pkg/link").symlink_to("/etc/passwd")

    request = RenderOptions(code=str(code), overrides=("model.arch=mynet:net",))
    found = documents(request)
    os.utime(code / "mynet.py", (1, 1))
    assert documents(request) == found, "applied twice it is unchanged"
    assert problems(found) == []
    pod = pod_of(one(found, "Job", "trainer"))
    (volume,) = [volume["projected"] for volume in pod["volumes"] if volume["name"] == "archives"]
    maps = [one(found, "ConfigMap", source["configMap"]["name"]) for source in volume["sources"]]
    assert len(maps) == 2
    parts.mkdir()
    for name, text in (item for entry in maps for item in entry["binaryData"].items()):
        assert len(text) < 250_000, "with kubectl's annotation"
        (parts / name).write_bytes(b64decode(text))
    unpacker, *others = containers(pod)
    source, digest, *_, destination = unpacker["command"][5:]
    assert (source, destination) == ("/archives", "/code")
    unpack(parts, digest, target)
    unpacked = {str(path.relative_to(target)) for path in target.rglob("*") if "__pycache__" not in str(path)}
    assert unpacked == {"mynet.py", "pkg", "pkg/__init__.py", "pkg/table.bin"}
    for container in others:
        env = {variable["name"]: variable["value"] for variable in container["env"]}
        assert env == {"PYTHONPATH": "/code", "PIPELINE_CODE": f"sha256:{digest}"}
        assert {"name": "code", "mountPath": "/code", "readOnly": True} in container["volumeMounts"]
    monkeypatch.setenv("PIPELINE_CODE", env["PIPELINE_CODE"])
    receipt = provenance(load("digits", request.overrides), torch.device("cpu"))
    assert receipt["code"] == f"sha256:{digest}"
    job = yaml.safe_load(render_sync(request, "digits")["sync-digits.yaml"])
    assert problems_of(job) == []
    assert containers(pod_of(job))[0] == unpacker

    (code / "mynet.py").write_text(NET)
    assert not {entry["metadata"]["name"] for entry in documents(request)} >= {maps[0]["metadata"]["name"]}
    (parts / "part-1").write_bytes(b"other")
    with pytest.raises(RequestError, match="SHA-256"):
        unpack(parts, digest, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("name", "kind"), [("../out.py", "0"), ("/tmp/out.py", "0"), ("link.py", "2")])
def test_no_name_in_an_archive_of_code_leads_outside(tmp_path: Path, name: str, kind: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind.encode(), "/etc/passwd" if kind == "2" else ""
    with tarfile.open(tmp_path / "part-0", "w:xz") as archive:
        archive.addfile(entry)
    digest = sha256((tmp_path / "part-0").read_bytes()).hexdigest()
    with pytest.raises(RequestError, match="no file below its folder"):
        unpack(tmp_path, digest, tmp_path / "code")
    assert {path.name for path in tmp_path.rglob("*")} == {"part-0"}


def test_a_data_job_has_no_network_access(defaults: list[Document]) -> None:
    """Only the policy for all pods applies to the job, since no other policy selects its labels."""
    (job,) = yaml.safe_load_all((K8S / "examples/stage-imagenet.yaml").read_text())
    labels = job["spec"]["template"]["metadata"]["labels"]
    policies = {d["metadata"]["name"]: d["spec"] for d in defaults if d["kind"] == "NetworkPolicy"}
    selected = {name: policy["podSelector"].get("matchLabels", {}) for name, policy in policies.items()}
    matching = [name for name, selector in selected.items() if selector.items() <= labels.items()]
    assert matching == ["default-deny"]
