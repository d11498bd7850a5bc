"""Check the Dockerfile and the compose files without a Docker engine."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import ROOT, listening
from object_store import BIN, Weed

import pipeline
from pipeline.addons.deploy import node

FILES = sorted(ROOT.glob("docker-compose*.yml"))
EXAMPLES = dict(re.findall(r"^#(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
"""The lines of .env.example that a reader uncomments."""


class Loader(yaml.SafeLoader):
    """A YAML loader that knows Compose's tag `!reset`, which removes a value."""


Loader.add_constructor("!reset", lambda loader, node: None)


def service(name: str, file: str = "docker-compose.yml") -> dict[str, Any]:
    return yaml.load((ROOT / file).read_text(), Loader)["services"][name]


def check(*command: str | Path) -> None:
    """Run a linter, which must find nothing."""
    found = subprocess.run([BIN / command[0], *command[1:]], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_compose_files_and_the_dockerfile_follow_their_specifications(tmp_path: Path) -> None:
    for path in FILES:
        plain = tmp_path / path.name  # check-jsonschema does not know the tag
        plain.write_text(re.sub(r"\n *\w+: !reset null", "", path.read_text()))
    check("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *tmp_path.iterdir())
    check("hadolint", ROOT / "Dockerfile")


@pytest.mark.parametrize(
    ("name", "file"), [("mlflow", ""), ("trainer", ""), ("postgres", ".postgres"), ("store", ".s3")]
)
def test_a_service_has_minimal_privileges(name: str, file: str) -> None:
    found = service(name, f"docker-compose{file}.yml")
    assert found["read_only"] is True
    assert found["cap_drop"] == ["ALL"]
    assert set(found.get("cap_add", [])) <= {"CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID"}
    assert not found.get("cap_add") or name == "postgres", "only postgres's image starts as root"
    memory, pids = (str(found[key]).rpartition(":-")[2].rstrip("}") for key in ("mem_limit", "pids_limit"))
    assert int(pids) > 0
    assert (memory == "0") == (name == "trainer")
    said = " ".join((ROOT / "SECURITY.md").read_text().split())
    assert "trainer has none until `.env` sets `TRAINER_MEMORY`" in said
    assert all("size=" in place for place in found["tmpfs"])
    assert found["security_opt"] == ["no-new-privileges:true"]
    assert "docker.sock" not in str(found)
    assert all(str(port).startswith("127.0.0.1:") for port in found.get("ports", []))


def test_the_trainer_has_the_environment_of_a_single_node() -> None:
    found = service("trainer")
    environment = node.environment(1, "${NPROC:-gpu}")
    assert {key: value for key, value in found["environment"].items() if key in environment} == environment
    assert found["entrypoint"] == "torchrun ${TORCHRUN_OPTIONS:-} -m pipeline train"
    assert tuple(found["entrypoint"].replace("${TORCHRUN_OPTIONS:-}", "").split()) == node.COMMAND
    assert int(found["stop_grace_period"].removesuffix("s")) > node.SHUTDOWN_TIMEOUT_S


def test_compiled_code_lies_on_the_node_and_not_beside_the_runs() -> None:
    """Triton's cache fails on a file system that several machines share."""
    caches = re.findall(r"(\w+)_CACHE_DIR=(\S+)", (ROOT / "Dockerfile").read_text())
    assert [name for name, _ in caches] == ["TORCHINDUCTOR", "TRITON"]
    assert {Path(folder).parent for _, folder in caches} == {Path("/cache")}
    assert "cache:/cache" in service("trainer")["volumes"]


def compose_config(folder: Path, variables: dict[str, str]) -> str:
    """Return the configuration that Compose resolves with `variables` in .env."""
    (folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    files = [word for path in FILES if path.stem != "docker-compose.cpu" for word in ("--file", str(path))]
    command = ["docker", "compose", *files, "--project-directory", str(folder), "config"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_each_line_of_the_example_env_file_can_be_uncommented(tmp_path: Path) -> None:
    used = {name for path in FILES for name in re.findall(r"\$\{(\w+)", path.read_text())}
    assert used <= EXAMPLES.keys(), "every variable is there"
    assert not re.search(r"# |\$\(", "".join(EXAMPLES.values())), "a comment, or a command"
    if not shutil.which("docker") or subprocess.run(["docker", "compose", "version"], check=False).returncode:
        pytest.skip("needs Docker's command with Compose v2")
    with_values = compose_config(tmp_path, EXAMPLES)
    names = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_FLASK_SERVER_SECRET_KEY")
    required = dict.fromkeys(names, "x")
    defaults = yaml.safe_load(compose_config(tmp_path, required))
    for name, value in EXAMPLES.items():
        changed = compose_config(tmp_path, required | {name: value})
        is_default = yaml.safe_load(changed) == defaults
        assert is_default or (value in changed and value in with_values), f"{name}={value}"
    assert "run.dir=/runs/digits\n      - train.epochs=12\n" in with_values


def test_versions_and_base_images_agree_in_all_files() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"ARG VERSION={pipeline.__version__}\n" in dockerfile
    texts = "".join(path.read_text() for path in (*FILES, ROOT / ".env.example"))
    bases, others = (set(re.findall(r"nvidia/cuda:[\w.-]+", text)) for text in (dockerfile, texts))
    assert bases == others


def test_everything_that_pip_installs_is_pinned_and_hashed() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install (.*)", dockerfile)
    assert len(installs) == 5
    assert all("--require-hashes" in words or "--no-index" in words for words in installs), installs
    for name in set(re.findall(r"source=(requirements[\w-]*\.lock)", dockerfile)):
        text = (ROOT / name).read_text()
        assert "://" not in text, "no URL of a package index"
        assert all("--hash=sha256:" in package for package in re.split(r"\n(?=\w)", text.strip())), name
        assert f"!{name}" in (ROOT / ".dockerignore").read_text()
    pinned = [(ROOT / name).read_text() for name in ("requirements.lock", "requirements-build.lock")]
    assert len({re.search(r"^setuptools==\S+", text, re.MULTILINE)[0] for text in pinned}) == 1  # type: ignore[index]


def test_the_trainer_of_the_store_keeps_nothing_and_has_the_key_of_the_store() -> None:
    trainer, store = (service(name, "docker-compose.s3.yml") for name in ("trainer", "store"))
    assert trainer["volumes"] == [{"type": "volume", "target": "/runs"}], "without a name nobody finds it"
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    assert [trainer["environment"][key] for key in keys] == [store["environment"][key] for key in keys]
    assert trainer["command"] == service("trainer")["command"].replace(
        " ${OVERRIDES", " checkpoint.mirror=s3://${BUCKET:-pipeline}/${RUN:-digits} ${OVERRIDES"
    )
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert not re.search(r"AWS_(ACCESS|SECRET)\w+=", dockerfile), "no layer has a key"
    assert service("trainer")["environment"].keys() > set(keys), "passed on to a store of your own, too"


class Store(Weed):
    """The server of the image `store`, with other ports and another folder."""

    def command(self) -> list[str]:
        text = (ROOT / "Dockerfile").read_text().partition(" AS store\n")[2].partition("ENTRYPOINT ")[2]
        words = json.loads(text.partition("]")[0].replace("\\\n", "") + "]")
        s3_port, *ports = self.more_ports
        names = ("master.port", "volume.port", "filer.port", "master.port.grpc", "volume.port.grpc",
                 "filer.port.grpc", "s3.port.grpc")  # fmt: skip
        given = [f"-{name}={port}" for name, port in zip(names, ports, strict=False)]
        changes = {
            "python3": sys.executable, "/opt/forward.py": str(ROOT / "docker/forward.py"),
            "8333": str(self.port), "8334": str(s3_port), "-s3.port=8334": f"-s3.port={s3_port}",
            "weed": str(BIN / "weed"), "-dir=/store": f"-dir={self.folder / 'data'}",
        }  # fmt: skip
        assert changes.keys() <= set(words)
        return [changes.get(word, word) for word in words] + given


def test_the_store_opens_only_its_s3_port_to_other_containers(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.start()
    try:
        store.wait_ready()
        client, name, contents = store.client(), store.make_bucket(), os.urandom(20 << 20)
        client.put_object(Bucket=name, Key="large", Body=contents)
        assert client.get_object(Bucket=name, Key="large")["Body"].read() == contents
        members = []
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with suppress(ProcessLookupError):  # it has ended
                if os.getsid(pid) == store.process.pid:
                    members.append(pid)
        opened = listening(members)
        assert len(opened) > 5
        assert {port for address, port in opened if address != "127.0.0.1"} == {store.port}
        store.process.terminate()
        assert store.process.wait(30) == 0
    finally:
        store.kill()


def test_the_overlays_can_be_combined() -> None:
    """Each overlay changes its own part of the server's command line."""
    postgres, auth = (service("mlflow", f"docker-compose.{name}.yml") for name in ("postgres", "auth"))
    assert "command" not in postgres
    assert "--backend-store-uri=postgresql+psycopg2://mlflow@postgres/mlflow" in postgres["entrypoint"]
    assert set(service("mlflow")["command"]) < set(auth["command"])
    assert "entrypoint" not in auth
    assert all(value.startswith("${MLFLOW_") and ":?" in value for value in auth["environment"].values())
