"""The manifests: k8s/ equals the rendered defaults, all variants are valid, mistakes are found."""

import copy
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from harness import pipeline
from manifests import Document, containers, one, pod_of, problems, problems_alone, request_of, settings

import pipeline as package
from pipeline.addons.deploy import node
from pipeline.addons.deploy.commands import EXAMPLES
from pipeline.addons.deploy.k8s import RenderOptions, render, render_example, render_sync
from pipeline.config.load import load

IMAGE = f"registry.example/train@sha256:{64 * '0'}"
K8S = Path(package.__file__).parents[1] / "k8s"


def documents(request: RenderOptions) -> list[Document]:
    return [document for text in render(request).values() for document in yaml.safe_load_all(text)]


@pytest.fixture(scope="module")
def defaults() -> list[Document]:
    return documents(RenderOptions())


def test_the_k8s_folder_equals_the_rendered_defaults() -> None:
    assert {path.name: path.read_text() for path in sorted(K8S.glob("*.yaml"))} == render(RenderOptions())
    examples = [render_example(RenderOptions(), name) for name in EXAMPLES]
    assert {path.name: path.read_text() for path in (K8S / "examples").iterdir()} == {
        name: text for example in examples for name, text in example.items()
    }
    assert not [path for path in K8S.iterdir() if "kustomization" in path.name], "kubectl apply -f would fail on it"


@pytest.mark.parametrize("path", sorted((K8S / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_is_valid_and_agrees_with_the_other_manifests(path: Path, defaults: list[Document]) -> None:
    images = {
        container["image"] for d in defaults if "template" in d.get("spec", {}) for container in containers(pod_of(d))
    }
    claims = {d["metadata"]["name"] for d in defaults if d["kind"] == "PersistentVolumeClaim"} | {"archives"}
    example = list(yaml.safe_load_all(path.read_text()))
    for resource in example:
        assert resource["metadata"]["namespace"] == "ddp-pipeline"
        if resource["kind"] == "TrainJob":  # kubernetes_validate has no schema for it
            assert resource["spec"].keys() == {"runtimeRef", "trainer"}, "the runtime defines the pods"
            runtime = resource["spec"]["runtimeRef"]
            assert one(example, runtime["kind"], runtime["name"])
            assert resource["spec"]["trainer"]["numNodes"] == one(defaults, "Job", "trainer")["spec"]["completions"]
            continue
        document = _job_of(resource) if resource["kind"] == "TrainingRuntime" else resource
        if document is not resource:
            _assert_same_pod(document["spec"]["template"], one(defaults, "Job", "trainer")["spec"]["template"])
        assert problems_alone(document) == []
        if document["kind"] in ("Job", "Deployment"):
            assert {container["image"] for container in containers(pod_of(document))} <= images
            volumes = pod_of(document)["volumes"]
            assert {v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v} <= claims
        else:
            assert document["kind"] in ("Service", "NetworkPolicy"), "all other kinds have pods"


def _job_of(runtime: Document) -> Document:
    """Return the Job that the operator makes from a TrainingRuntime, without the fields it adds."""
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    step = replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
    assert (replicated["name"], container["name"], step) == ("node", "node", "trainer"), (
        "the operator expects these names"
    )
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": runtime["metadata"]}
    return job | {"spec": replicated["template"]["spec"]}


def _assert_same_pod(template: Document, rendered: Document) -> None:
    """Assert that the pods differ only in their environment, which the operator sets."""
    pod, expected = template["spec"], rendered["spec"]
    assert template["metadata"] == rendered["metadata"]
    assert {**expected, **pod, "containers": []} == {**expected, "containers": []}
    (container,), (trainer,) = pod["containers"], expected["containers"]
    assert [*container["command"], *container["args"]] == [*trainer["command"][:-1], "run.dir=/runs/digits"]
    for key in ("image", "resources", "securityContext", "volumeMounts"):
        assert container[key] == trainer[key]


@pytest.mark.parametrize("path", sorted((K8S / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_service_address_in_an_example_exists(path: Path) -> None:
    text = path.read_text()
    replaced = re.search(r"in place of k8s/(\S+\.yaml)", " ".join(text.replace("#", "").split()))
    rendered = [manifest for name, manifest in render(RenderOptions()).items() if not replaced or name != replaced[1]]
    found = [document for manifest in (text, *rendered) for document in yaml.safe_load_all(manifest)]
    services = {
        f"{d['metadata']['name']}:{port['port']}": d["spec"]["selector"]
        for d in found
        if d["kind"] == "Service"
        for port in d["spec"].get("ports", [])
    }
    called = set(re.findall(r"http://([\w-]+:\d+)", yaml.safe_dump_all(found)))
    assert "mlflow:5000" in called
    assert called <= services.keys()
    servers = [d["spec"]["template"]["metadata"]["labels"] for d in found if d["kind"] == "Deployment"]
    assert all(any(services[name].items() <= labels.items() for labels in servers) for name in called)


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "hardware", [{"gpus": 1}, {"gpus": 8}, {"gpus": 0}, {"gpus": 0, "nproc": 2, "single_node": True}]
)
def test_every_rendered_variant_is_valid(nodes: int, hardware: dict[str, Any]) -> None:
    more = {"storage_class": "fast", "pull_secret": "registry", "mlflow_auth": nodes > 2}
    request = RenderOptions(nodes=nodes, overrides=("batch.global=128",), **more, **hardware)
    found = documents(request)
    assert problems(found) == []
    pod = pod_of(one(found, "Job", "trainer"))
    assert ("affinity" in pod) == (nodes > 1 and not request.single_node)
    modes = {d["metadata"]["name"]: d["spec"]["accessModes"] for d in found if d["kind"] == "PersistentVolumeClaim"}
    assert modes["runs"] == (["ReadWriteOnce"] if request.single_node else ["ReadWriteMany"])
    assert pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") == (request.gpus or None)
    assert settings(found).items() >= node.environment(nodes, request.gpus or request.nproc).items()


@pytest.mark.parametrize(
    ("gpus", "overrides", "devices"),
    [(1, (), ["run.device=cuda"]), (0, (), []), (1, ("run.device=auto",), ["run.device=auto"])],
)
def test_pods_with_gpus_require_them(gpus: int, overrides: tuple[str, ...], devices: list[str]) -> None:
    job = one(documents(RenderOptions(gpus=gpus, overrides=overrides)), "Job", "trainer")
    for container in containers(pod_of(job)):
        assert [word for word in container["command"] if word.startswith("run.device=")] == devices


OPTIONS: dict[str, Any] = {
    "runtime_class": "nvidia", "priority_class": "high", "queue": "team-a", "gang": "native", "rdma": "rdma/hca_shared",
    "topology": "topology.kubernetes.io/zone", "recovery": False, "mlflow_auth": True,
    "pull_secret": "registry", "single_node": True, "gpus": 8, "numa_binding": "node", "store": "s3://my-data/imagenet",
    "service_account": "trainer",
}  # fmt: skip


@pytest.mark.parametrize("pair", list(itertools.combinations(OPTIONS, 2)), ids="+".join)
def test_every_pair_of_options_is_valid(pair: tuple[str, str]) -> None:
    if set(pair) == {"gang", "queue"}:
        return  # refused: test_wrong_requests.py
    found = documents(RenderOptions(overrides=("batch.global=128",), **{name: OPTIONS[name] for name in pair}))
    assert problems(found) == []


def test_an_option_is_written_where_it_belongs() -> None:
    found = documents(
        RenderOptions(**{name: value for name, value in OPTIONS.items() if name not in ("gang", "gpus", "store")})
    )
    job = one(found, "Job", "trainer")
    pod = pod_of(job)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert job["spec"]["template"]["metadata"] == {
        "labels": {"app": "trainer"}, "annotations": {"kueue.x-k8s.io/safe-to-forcefully-delete": "true"},
    }  # fmt: skip
    assert (pod["runtimeClassName"], pod["priorityClassName"]) == ("nvidia", "high")
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("trainer", False)
    (affinity,) = pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert affinity["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"
    preflight, trainer = containers(pod)
    assert preflight["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert trainer["resources"]["limits"]["rdma/hca_shared"] == 1
    assert trainer["command"][0] == "setpriv"
    assert settings(found)["NCCL_NET"] == "IB"
    assert not [d for d in found if d["kind"] in ("Role", "ServiceAccount")]


STORE = RenderOptions(store="s3://my-data/imagenet/", store_endpoint="https://s3.example.org:9000")


@pytest.mark.parametrize("nodes", [(1, None), (3, None), (4, 2)], ids=["1", "3", "2:4"])
@pytest.mark.parametrize("hardware", [{"gpus": 8}, {"gpus": 0, "nproc": 2, "single_node": True}], ids=["gpus", "cpu"])
def test_with_an_object_store_no_volume_is_shared(nodes: tuple[int, int | None], hardware: dict[str, Any]) -> None:
    high, low = nodes
    found = documents(replace(STORE, nodes=high, min_nodes=low, overrides=("batch.global=192",), **hardware))
    assert problems(found) == []
    assert [d["metadata"]["name"] for d in found if d["kind"] == "PersistentVolumeClaim"] == ["mlflow"]
    assert "ReadWriteMany" not in yaml.safe_dump_all(found)
    volumes = {volume["name"]: volume for volume in pod_of(one(found, "Job", "trainer"))["volumes"]}
    assert volumes["runs"] == {"name": "runs", "emptyDir": {"sizeLimit": "50Gi"}}
    assert volumes["data"] == {"name": "data", "emptyDir": {"sizeLimit": "1Gi"}}
    assert settings(found)["AWS_ENDPOINT_URL"] == "https://s3.example.org:9000"


PACK = {"data.source": "pack", "model.arch": "resnet18"}


@pytest.mark.parametrize(
    ("given", "root", "mirror", "size"),
    [
        ({}, None, "s3://my-data/imagenet$(RUN_DIR)", "1Gi"),
        ({**PACK, "data.root": "/data"}, "s3://my-data/imagenet/data", "s3://my-data/imagenet$(RUN_DIR)", "1Gi"),
        ({**PACK, "data.root": "s3://other/pack", "data.cache": "/data/cache", "data.cache_gib": "200"},
         "s3://other/pack", "s3://my-data/imagenet$(RUN_DIR)", "220Gi"),
        ({"checkpoint.mirror": "s3://other/run"}, None, "s3://other/run", "1Gi"),
    ],
    ids=["digits", "pack", "its own bucket, with a cache", "its own mirror"],
)  # fmt: skip
def test_data_and_runs_are_in_the_store(given: dict[str, str], root: str | None, mirror: str, size: str) -> None:
    request = replace(STORE, overrides=[f"{key}={value}" for key, value in given.items()])
    pod = pod_of(one(documents(request), "Job", "trainer"))
    for container in containers(pod):
        words = dict(word.split("=", 1) for word in request_of(container)[1:])  # the last one counts
        assert (words.get("data.root"), words["checkpoint.mirror"]) == (root, mirror)
    (data,) = (volume for volume in pod["volumes"] if volume["name"] == "data")
    assert data["emptyDir"]["sizeLimit"] == size


PUBLIC = {"10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"}


@pytest.mark.parametrize(
    ("endpoint", "cidr", "peers", "port"),
    [
        (None, None, {"0.0.0.0/0": PUBLIC, "::/0": {"fc00::/7", "fe80::/10"}}, 443),
        ("https://storage.googleapis.com", None, {"0.0.0.0/0": PUBLIC, "::/0": {"fc00::/7", "fe80::/10"}}, 443),
        ("http://10.0.0.5:9000", None, {"10.0.0.5/32": set()}, 9000),
        ("http://[fd00::5]", None, {"fd00::5/128": set()}, 80),
        ("https://s3.mine.internal", "10.1.0.0/16", {"10.1.0.0/16": set()}, 443),
        ("http://seaweedfs.storage.svc:8333", None, "storage", 8333),
        ("http://seaweedfs.storage.svc.cluster.local:8333", None, "storage", 8333),
    ],
)
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
    assert [rule["ports"] for rule in added] == [[{"port": port}]]
    if isinstance(peers, str):
        assert added[0]["to"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": peers}}}]
    else:
        blocks = [peer["ipBlock"] for peer in added[0]["to"]]
        assert {block["cidr"]: {*block.get("except", [])} for block in blocks} == peers


def test_a_rendered_file_holds_no_credential_and_no_bucket_unless_given(
    monkeypatch: pytest.MonkeyPatch, defaults: list[Document]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASECRETID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-key-of-mine")
    text = "".join(render(STORE).values())
    assert "AKIASECRETID" not in text
    assert "secret-key-of-mine" not in text
    assert re.findall(r"^\s+(?:name|key): (store-.*?)(?: #.*)?$", text, re.MULTILINE) == ["store-credentials"]
    assert not re.search("s3://|AWS_|emptyDir: # of", yaml.safe_dump_all(defaults))


def test_a_native_gang_is_a_field_of_kubernetes_1_37() -> None:
    job = one(documents(RenderOptions(nodes=4, gang="native")), "Job", "trainer")
    assert job["spec"]["scheduling"] == {"schedulingPolicy": {"gang": {"minCount": 4}}}
    with pytest.raises(kubernetes_validate.ValidationError, match="scheduling"):
        kubernetes_validate.validate(job, "1.36", strict=True)


def test_without_options_nothing_depends_on_an_addition_to_the_cluster(defaults: list[Document]) -> None:
    text = yaml.safe_dump_all(defaults)
    for word in ("runtimeClassName", "priorityClassName", "kueue", "scheduling:", "IPC_LOCK", "setpriv", "gang"):
        assert word not in text, word


LOCKS_MEMORY = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(1 << 20)
print(os.getuid(), os.getgid(), "locked" if libc.mlock(buffer, 1 << 20) == 0 else "refused")
"""
# as a container runtime starts a process: these capabilities, none of them ambient
CONTAINER = """
import ctypes, os, resource, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
uid, capabilities, command = int(sys.argv[1]), [14, 7], sys.argv[2:]  # IPC_LOCK, SETUID
for capability in set(range(41)) - set(capabilities):
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
os.setgroups([10001])
os.setgid(10001)
os.setuid(uid)
mask = sum(1 << capability for capability in capabilities)
header, data = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", mask, mask, 0, 0, 0, 0)
assert libc.capset(header, data) == 0
os.execvp(command[0], command)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as the container runtime")
def test_a_trainer_with_rdma_may_lock_memory_and_is_not_root() -> None:
    pod = pod_of(one(documents(RenderOptions(rdma="rdma/hca")), "Job", "trainer"))
    (trainer,) = pod["containers"]
    words = trainer["command"][: trainer["command"].index("tini")]
    start = [sys.executable, "-c", CONTAINER]
    locks = ["python3", "-c", LOCKS_MEMORY]
    user = subprocess.run([*start, "10001", *locks], capture_output=True, text=True, check=False)
    assert user.stdout.split() == ["10001", "10001", "refused"], "the capability alone does not help a user"
    done = subprocess.run([*start, "0", *words, *locks], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["10001", "10001", "locked"], done.stderr


@pytest.mark.parametrize("run", ["digits", "My_run.2", "x" * 90])
def test_a_run_is_sent_to_mlflow_by_a_job_of_its_own(run: str, defaults: list[Document]) -> None:
    ((name, text),) = render_sync(RenderOptions(image=IMAGE, namespace="mine"), run).items()
    job = yaml.safe_load(text)
    assert problems_alone(job) == []
    assert name == f"{job['metadata']['name']}.yaml"
    assert re.fullmatch("sync-[a-z0-9]([-a-z0-9]{0,57}[a-z0-9])?", job["metadata"]["name"])
    (container,) = pod_of(job)["containers"]
    assert (container["image"], container["command"][2:]) == (IMAGE, ["pipeline", "sync", f"/runs/{run}"])
    own = RenderOptions(image=IMAGE, overrides=("model.arch=mynet:net",))
    ((_, text),) = render_sync(own, run).items()
    (container,) = pod_of(yaml.safe_load(text))["containers"]
    assert container["command"][2:] == ["pipeline", "sync", f"/runs/{run}", "--trust", "mynet:net"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert not one(defaults, "Service", "trainer")["spec"]["selector"].items() <= labels.items()
    policies = {d["metadata"]["name"]: d["spec"] for d in defaults if d["kind"] == "NetworkPolicy"}
    assert policies["sync"]["podSelector"]["matchLabels"] == labels
    assert policies["sync"]["egress"] == policies["trainer"]["egress"][1:], "MLflow and DNS"
    (source,) = policies["mlflow"]["ingress"][0]["from"]
    assert labels["app"] in source["podSelector"]["matchExpressions"][0]["values"]
    (variable,) = container["env"]
    reference = variable["valueFrom"]["configMapKeyRef"]
    assert reference["key"] in one(defaults, "ConfigMap", reference["name"])["data"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_follows_the_options(name: str) -> None:
    request = RenderOptions(nodes=4, gpus=0, image=IMAGE, mlflow_image=IMAGE, namespace="mine", pull_secret="registry")
    ((_, text),) = render_example(request, name).items()
    found = list(yaml.safe_load_all(text))
    assert {document["metadata"]["namespace"] for document in found} == {"mine"}
    assert "ddp-pipeline" not in text
    assert f"image: {IMAGE}" in text
    assert text.count("imagePullSecrets") == 1
    assert ("numNodes: 4" in text) == (name == "trainjob")
    assert "nvidia.com/gpu" not in text


def test_sync_and_example_write_one_file(tmp_path: Path) -> None:
    for words, name in ((("--sync", "digits"), "sync-digits"), (("--example", "stage-imagenet"), "stage-imagenet")):
        result = pipeline(
            "k8s", "render", *words, "--namespace", "mine", "--image", IMAGE, "--out", str(tmp_path / name)
        )
        assert result.code == 0, result.err
        (file,) = (tmp_path / name).iterdir()
        assert file.name == f"{name}.yaml"
        assert f"kubectl apply -f {file}" in result.out
        job = yaml.safe_load(file.read_text())
        assert job["metadata"]["namespace"] == "mine"
        assert pod_of(job)["containers"][0]["image"] == IMAGE


def test_an_elastic_job_has_as_many_pods_as_may_train_and_knows_which_numbers_divide() -> None:
    found = documents(RenderOptions(nodes=5, min_nodes=1, gang="native"))
    assert problems(found) == []
    job = one(found, "Job", "trainer")["spec"]
    assert (job["completions"], job["parallelism"]) == (5, 5)
    assert job["scheduling"]["schedulingPolicy"]["gang"]["minCount"] == 1
    assert settings(found).items() >= node.environment(5, 1, 1, (1, 2, 3, 4)).items()
    assert settings(found)["PET_NNODES"] == "1:5"
    rendered = pipeline("k8s", "render", "--nodes", "1:5", "--gang", "native")
    assert list(yaml.safe_load_all(rendered.out)) == found


@pytest.mark.skipif(
    not shutil.which("checkov"), reason="needs checkov (pip install checkov, in an environment of its own)"
)
@pytest.mark.parametrize(
    "options",
    [{}, {"rdma": "rdma/hca", "queue": "team-a", "topology": "zone", "runtime_class": "nvidia"},
     {"gang": "native", "mlflow_auth": True, "gpus": 0, "single_node": True, "recovery": False},
     {"store": "s3://my-data/imagenet", "service_account": "trainer"}],
    ids=["defaults", "rdma", "native", "store"],
)  # fmt: skip
def test_checkov_finds_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    request = RenderOptions(**options)
    texts = {**render(request), **({} if request.store else render_sync(request, "digits"))}
    if not options:
        texts = {str(path.relative_to(K8S)): path.read_text() for path in K8S.rglob("*.yaml")}
    for name, text in texts.items():
        (tmp_path / Path(name).name).write_text(text)
    command = ["checkov", "--config-file", str(K8S.parent / ".checkov.yaml"), "--skip-download", "--compact"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "-d", str(tmp_path), "--output", "json"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 100
    assert [(c["check_id"], c["resource"]) for c in report["results"]["failed_checks"]] == []


def test_numa_binding_is_an_option_of_torchrun() -> None:
    text = render(RenderOptions(numa_binding="node"))["50-trainer.yaml"]
    assert "command: [tini, --, torchrun, --numa-binding=node, -m, pipeline, train, " in text


def test_the_recipe_in_the_configmap_is_the_local_recipe(tmp_path: Path, defaults: list[Document]) -> None:
    (tmp_path / "recipe.yaml").write_text(settings(defaults)["recipe.yaml"])
    assert load(str(tmp_path / "recipe.yaml"), ["run.dir=runs/digits"]) == load("digits", [])
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("data: {root: /data}\nmodel: {arch: resnet18}\n")
    config = settings(documents(RenderOptions(recipe=str(recipe), overrides=("train.epochs=3",))))
    assert config["RUN_DIR"] == "/runs/mine"
    assert yaml.safe_load(config["recipe.yaml"])["recipe"] == "mine"


@pytest.mark.parametrize(
    "text",
    [
        "---\ndata: {root: /data}\nmodel: {arch: resnet18}\n",
        "# a comment\n%YAML 1.1\n---\n# another\ndata: {root: /data}\n...\n",
        "{data: {root: /data}, train: {epochs: 3, precision: 'fp32'}}\n",
        "  data:\n    root: /data\n  train:\n    epochs: 3\n",
        "---\nrecipe: mine\ndata: {root: /data}\n",
        "# a comment\n\ndata:  # another\n  root: /data\r\ntrain:\n  epochs: 3",
    ],
)
def test_a_recipe_of_any_yaml_style_survives_its_configmap(tmp_path: Path, text: str) -> None:
    recipe, mounted = tmp_path / "mine.yaml", tmp_path / "recipe.yaml"
    recipe.write_text(text)
    mounted.write_text(settings(documents(RenderOptions(recipe=str(recipe))))["recipe.yaml"])
    assert load(str(mounted), ["run.dir=x"]) == load(str(recipe), ["run.dir=x"])
    assert ("# another" in mounted.read_text()) == ("# a comment\n\n" in text), "comments are kept where possible"


def _set(path: str, value: Any) -> Callable[[list[Document]], None]:
    """Return a function that sets `Kind/name: field|field` to `value`, or deletes it if None."""
    head, _, keys = path.partition(": ")

    def edit(found: list[Document]) -> None:
        parent: Any = one(found, *head.split("/"))
        *parents, last = [int(key) if key.isdecimal() else key for key in keys.split("|")]
        for key in parents:
            parent = parent[key]
        if value is None:
            del parent[last]
        else:
            parent[last] = value

    return edit


_POD = "Job/trainer: spec|template|spec"
_SERVER = "Deployment/mlflow: spec|template|spec"
MISTAKES = {
    "a field that does not exist": _set("Job/trainer: spec|completion", 2),
    "more pods than the rendezvous waits for": _set("Job/trainer: spec|completions", 3),
    "fewer at a time": _set("Job/trainer: spec|parallelism", 1),
    "pods without lasting names": _set("Job/trainer: spec|completionMode", "NonIndexed"),
    "two pods of one index": _set("Job/trainer: spec|podReplacementPolicy", "TerminatingOrFailed"),
    "no back-off for the loss of node 0": _set("Job/trainer: spec|backoffLimit", 1),
    "a wrong recipe tried again and again": _set("Job/trainer: spec|podFailurePolicy|rules|0|onExitCodes|values", [4]),
    "exit codes of a container that has none": _set(
        "Job/trainer: spec|podFailurePolicy|rules|0|onExitCodes|containerName", "trainer"
    ),
    "a drain that counts": _set("Job/trainer: spec|podFailurePolicy|rules|1|action", "Count"),
    "restarts in place": _set(f"{_POD}|restartPolicy", "OnFailure"),
    "no subdomain": _set(f"{_POD}|subdomain", None),
    "another subdomain": _set(f"{_POD}|subdomain", "trainers"),
    "too little grace": _set(f"{_POD}|terminationGracePeriodSeconds", 30),
    "two images": _set(f"{_POD}|initContainers|0|image", "ddp-pipeline:0.0.9"),
    "a preflight of another recipe": _set(f"{_POD}|initContainers|0|command|4", "digits"),
    "a shell as process 1": _set(f"{_POD}|containers|0|command|0", "sh"),
    "a failure without a message": _set(f"{_POD}|initContainers|0|terminationMessagePolicy", None),
    "a GPU that is not there, unnoticed": _set(f"{_POD}|containers|0|command|7", "run.device=auto"),
    "all pods must succeed": _set("Job/trainer: spec|successPolicy", None),
    "a lost node waited for": _set(f"{_POD}|tolerations|0|tolerationSeconds", 300),
    "/dev/shm on disk": _set(f"{_POD}|volumes|3|emptyDir", {}),
    "/dev/shm as large as the memory": _set(f"{_POD}|volumes|3|emptyDir|sizeLimit", "24Gi"),
    "a claim that is not there": _set(f"{_POD}|volumes|2|persistentVolumeClaim|claimName", "run"),
    "service links": _set(f"{_SERVER}|enableServiceLinks", None),
    "a token": _set(f"{_POD}|automountServiceAccountToken", True),
    "root": _set(f"{_POD}|securityContext|runAsNonRoot", False),
    "no seccomp": _set(f"{_SERVER}|securityContext|seccompProfile", None),
    "a capability": _set(f"{_POD}|containers|0|securityContext|capabilities|add", ["IPC_LOCK"]),
    "a writable root": _set(f"{_SERVER}|containers|0|securityContext|readOnlyRootFilesystem", False),
    "the host's network": _set(f"{_POD}|hostNetwork", True),
    "a namespace that lets all in": _set("Namespace/ddp-pipeline: metadata|labels", {"team": "vision"}),
    "another namespace": _set("Service/mlflow: metadata|namespace", "default"),
    "a Service that selects nobody": _set("Service/trainer: spec|selector|app", "train"),
    "a Service with an address": _set("Service/trainer: spec|clusterIP", "10.0.0.1"),
    "names only for the ready": _set("Service/trainer: spec|publishNotReadyAddresses", None),
    "a rendezvous at nobody's": _set("ConfigMap/trainer: data|PET_RDZV_ENDPOINT", "trainer-0:29500"),
    "a rendezvous that waits for a dark node": _set("ConfigMap/trainer: data|PET_RDZV_BACKEND", "c10d"),
    "no restarts": _set("ConfigMap/trainer: data|PET_MAX_RESTARTS", "0"),
    "more processes than GPUs": _set("ConfigMap/trainer: data|PET_NPROC_PER_NODE", "2"),
    "a shutdown shorter than a save": _set("ConfigMap/trainer: data|TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10"),
    "hosts without the port": _set(f"{_SERVER}|containers|0|args|1", "mlflow,localhost:*"),
    "a tracking address of nobody": _set("ConfigMap/trainer: data|MLFLOW_TRACKING_URI", "http://tracker:5000"),
    "a password that is nowhere": _set(
        f"{_SERVER}|containers|0|args",
        ["--allowed-hosts", "mlflow:5000,localhost:*,127.0.0.1:*", "--app-name", "basic-auth"],
    ),
    "a scratch volume without end": _set(f"{_POD}|volumes|4|emptyDir", {}),
    "a server's scratch volume without end": _set(f"{_SERVER}|volumes|1|emptyDir", {}),
    "pods without a policy": _set("NetworkPolicy/default-deny: spec|podSelector", {"matchLabels": {"app": "mlflow"}}),
    "pods without a policy that reach out": _set("NetworkPolicy/default-deny: spec|policyTypes", ["Ingress"]),
    "a policy that lets all in": _set("NetworkPolicy/default-deny: spec|ingress", [{}]),
    "two writers of SQLite": _set("Deployment/mlflow: spec|strategy|type", "RollingUpdate"),
    "a health check that is always green": _set(f"{_SERVER}|containers|0|readinessProbe|httpGet|path", "/health"),
    "a cold start cut short": _set(f"{_SERVER}|containers|0|startupProbe|failureThreshold", 3),
    "a port for the ranks, who choose theirs": _set("NetworkPolicy/trainer: spec|ingress|0|ports", [{"port": 29500}]),
    "a recovery with more rights": _set("Role/recovery: rules|0|resources", ["pods", "secrets"]),
    "a recovery with the rights of the cluster": _set("RoleBinding/recovery: roleRef|kind", "ClusterRole"),
    "a recovery without its token": _set("Deployment/recovery: spec|template|spec|automountServiceAccountToken", False),
    "a token for all pods of the account": _set("ServiceAccount/recovery: automountServiceAccountToken", True),
    "a recovery that stays on a lost node": _set("Deployment/recovery: spec|template|spec|tolerations", []),
    "a recovery without the API server": _set("NetworkPolicy/recovery: spec|egress", []),
    "no names": _set("NetworkPolicy/trainer: spec|egress|2", {"ports": [{"port": 53, "protocol": "UDP"}]}),
}


_EGRESS = "NetworkPolicy/trainer: spec|egress|2"
STORE_MISTAKES = {
    "a run that ends with its pod": _set(f"{_POD}|containers|0|command|8", "run.trace=true"),
    "one mirror for all runs": _set(f"{_POD}|containers|0|command|8", "checkpoint.mirror=s3://my-data/imagenet/runs"),
    "a shared claim": _set("PersistentVolumeClaim/mlflow: spec|accessModes", ["ReadWriteMany"]),
    "data on a claim": _set(f"{_POD}|volumes|1", {"name": "data", "persistentVolumeClaim": {"claimName": "mlflow"}}),
    "a run folder without end": _set(f"{_POD}|volumes|2|emptyDir", {}),
    "a cache that cannot be written": _set(f"{_POD}|containers|0|volumeMounts|1|readOnly", True),
    "a preflight without credentials": _set(f"{_POD}|initContainers|0|envFrom|2", None),
    "a key in the ConfigMap": _set("ConfigMap/trainer: data|AWS_SECRET_ACCESS_KEY", "x"),
    "the store's port closed": _set(f"{_EGRESS}|ports|0|port", 443),
    "every port": _set(f"{_EGRESS}|ports", None),
    "the metadata service": _set(f"{_EGRESS}|to|0|ipBlock|except", ["10.0.0.0/8"]),
}


@pytest.mark.parametrize("mistake", STORE_MISTAKES)
def test_a_planted_mistake_with_a_store_is_found(mistake: str) -> None:
    found = documents(STORE)
    assert problems(found) == []
    STORE_MISTAKES[mistake](found)
    assert problems(found), mistake


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(defaults: list[Document], mistake: str) -> None:
    assert problems(defaults) == []
    found = copy.deepcopy(defaults)
    MISTAKES[mistake](found)
    assert problems(found), mistake


def test_render_prints_what_it_writes_to_files(tmp_path: Path) -> None:
    words = ("k8s", "render", "digits", "--nodes", "4", "--cpu", "--nproc", "2", "--image", IMAGE, "batch.global=64")
    printed = pipeline(*words)
    written = pipeline(*words, "--out", str(tmp_path / "k8s"))
    assert (printed.code, written.code) == (0, 0)
    assert list(yaml.safe_load_all(printed.out)) == [
        document
        for path in sorted((tmp_path / "k8s").glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]
    job = one(list(yaml.safe_load_all(printed.out)), "Job", "trainer")
    assert {container["image"] for container in containers(pod_of(job))} == {IMAGE}


def test_the_manifest_of_a_server_with_a_password_does_not_contain_it() -> None:
    found = documents(RenderOptions(mlflow_auth=True))
    (server,) = pod_of(one(found, "Deployment", "mlflow"))["containers"]
    assert server["envFrom"] == [{"secretRef": {"name": "mlflow-auth"}}]
    assert "env" not in server
    assert not [d for d in found if d["kind"] == "Secret"], "the user creates the Secret"
    for mistake in ("envFrom", "startupProbe"):
        wrong = copy.deepcopy(found)
        (server,) = pod_of(one(wrong, "Deployment", "mlflow"))["containers"]
        if mistake == "envFrom":
            del server["envFrom"]
        else:
            server["startupProbe"]["exec"]["command"] = ["true"]
        assert problems(wrong), mistake


@pytest.mark.parametrize("path", sorted((K8S / "examples").glob("stage*.yaml")), ids=lambda path: path.stem)
def test_a_data_job_has_no_network_access(path: Path, defaults: list[Document]) -> None:
    """Only the policy for all pods applies to the job, since no other policy selects its labels."""
    (job,) = yaml.safe_load_all(path.read_text())
    labels = job["spec"]["template"]["metadata"]["labels"]
    matching = [
        d["metadata"]["name"]
        for d in defaults
        if d["kind"] == "NetworkPolicy" and d["spec"]["podSelector"].get("matchLabels", {}).items() <= labels.items()
    ]
    assert matching == ["default-deny"]
