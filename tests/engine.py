"""Run `docker` commands."""

import os
import subprocess
from pathlib import Path

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
