"""Run `docker` commands, and build the images once for all tests."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CPU = ("-f", "docker-compose.yml", "-f", "docker-compose.cpu.yml")
REVISION = "0123abc"


def docker(*arguments: str, timeout: float = 600, check: bool = True, cwd: Path = ROOT, **env: str) -> str:
    """Run a docker command; return its standard output and standard error together."""
    done = subprocess.run(
        ["docker", *arguments], cwd=cwd, env=os.environ | env, timeout=timeout, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert not check or done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout[-3000:]}"
    return done.stdout


def build_images() -> None:
    """Build both images with Compose, or skip the test if no Docker engine answers.

    BASE_IMAGE in the environment selects another base image.
    """
    if not shutil.which("docker") or "Server Version" not in docker("info", check=False):
        pytest.skip("no Docker engine answers here")
    if not re.search(r"version v?[2-9]", docker("compose", "version", check=False)):
        pytest.skip("the Docker engine here has no Compose v2")
    docker("compose", *CPU, "build", timeout=1800, REVISION=REVISION)
