"""Follow a page of the documentation word by word: `python tests/follow_page.py PAGE…`.

Clones the last commit into a temporary folder, and runs the commands of the page's `sh` blocks, in
order, in one shell that prints each command, and ends at the first failure. A server runs in the
background until the page's end; the next command runs once its URL answers.

The clone's .venv refers to the environment of this Python, whose packages are those of the lock
file.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from harness import ROOT, environment, free_port

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SERVERS = ("make ui", "mlflow server", "mlflow models serve")
NOT_RUN = {
    r"git clone": "replaced by a clone of this repository",
    r"cd ddp-pipeline": "the clone is the working folder already",
    r"docker ": "needs a Docker engine: tests/test_containers.py",
    r"pipeline rehearse": "needs a Docker engine: tests/test_containers.py",
    r"kubectl ": "needs a cluster: make cluster-test",
    r"make test": "runs this very test",
    r".*\b(my\.yaml|data\.root=/data)": "needs the reader's own data: your-data.md has a complete example",
}
"""Beginnings of commands (regular expressions) that are not run, and why."""

# `set -v` prints each command. A server is left in a session of its own.
_SHELL = r"""
set -e -o pipefail
# exit codes of `timeout`: 124 or 137 (SIGKILL), with --preserve-status the command's: 75 (run me again)
stopped() { [ "$1" = 75 ] || [ "$1" = 124 ] || [ "$1" = 137 ]; }
serve() {
    setsid bash -c "exec $2" > "$1" 2>&1 < /dev/null &
    echo $! >> "$1.pid"
    for _ in $(seq 180); do
        url=$(grep --only-matching --max-count=1 'http://127[0-9.:]*' "$1" || true)
        if ! kill -0 $!; then break; fi
        if [ -n "$url" ] && curl --silent --output /dev/null "$url"; then echo "$url answers"; return; fi
        sleep 1
    done
    tail -n 20 "$1"; echo 'the server does not answer'; return 1
}
set -v
"""


def commands(page: Path) -> Iterator[str]:
    """Yield each command of the `sh` blocks of a page, with continued lines and here-documents."""
    for language, block in FENCE.findall(page.read_text()):
        lines = iter(block.splitlines() if language in ("sh", "") else ())
        for line in lines:
            command = line
            while command.endswith("\\"):
                command += "\n" + next(lines)
            if here := re.search(r"<<-?\s*['\"]?(\w+)", command):
                for inner in lines:
                    command += "\n" + inner
                    if inner.strip() == here[1]:
                        break
            if command.strip() and not command.lstrip().startswith("#"):
                yield command


def follow(page: Path, folder: Path) -> int:
    """Run the commands of a page in a new clone in `folder`; return the exit code of the shell."""
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    (clone / ".venv").mkdir()  # a finished environment for `make setup`, with the packages of this one
    for entry in Path(sys.prefix).iterdir():
        if entry.name != "ready":
            (clone / ".venv" / entry.name).symlink_to(entry)
    (clone / ".venv/ready").touch()
    script = [_SHELL]
    for number, command in enumerate(commands(page)):
        reason = next((reason for start, reason in NOT_RUN.items() if re.match(start, command)), None)
        if reason:
            script.append(f": {shlex.quote(command)} is not run: {shlex.quote(reason)}")
        elif re.sub(r"^(\w+=\S* +)+", "", command).startswith(SERVERS):
            script.append(f"serve {folder}/server-{number}.log {shlex.quote(f'env {command}')}")
        else:
            script.append(f"{command} || stopped $?" if command.startswith("timeout ") else command)
    (folder / "page.sh").write_text("\n".join(script) + "\n")
    env = environment(BROWSER="true", PORT=str(free_port()))  # for `make ui`, where no window opens
    env.pop("VIRTUAL_ENV", None)
    env |= {"PYTHONPATH": str(clone)}  # the clone's code runs in the linked environment
    env |= {"OMP_WAIT_POLICY": "passive"}  # on busy cores, threads would spin for most of their time
    command = ["bash", folder / "page.sh"]
    try:
        return subprocess.run(command, cwd=clone, env=env, check=False).returncode
    finally:
        for file in folder.glob("server-*.pid"):  # each in a session of its own
            with suppress(ProcessLookupError):
                os.killpg(int(file.read_text()), signal.SIGTERM)


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory(prefix="follow-") as folder:
            code = follow(page.resolve(), Path(folder))
        print(f"\n{page}: {f'stopped with exit code {code}' if code else 'every command ran'}", flush=True)
        if code:
            sys.exit(code)
