"""Follow a page of the documentation word by word: `python tests/follow_page.py PAGE…`.

Clones the last commit into a temporary folder, and runs the commands of the page's `sh` blocks, in
order, in one shell that ends at the first failure. Prints each command with its seconds. A server
runs in the background until the page's end; the next command runs once its URL answers.

The clone's .venv refers to the environment of this Python, whose packages are those of the lock
file. With --install it is created as the page says, which downloads gigabytes.
"""

import argparse
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
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

# `start` prints a command, `finish` its seconds. A server is left in a session of its own.
_SHELL = r"""
set -e -o pipefail
start() { began=$EPOCHREALTIME; printf '\n$ %s\n' "$1"; }
# the exit codes of `timeout`: 124 or 137 (SIGKILL), with --preserve-status the command's own, here 75 (run me again)
stopped() { [ "$1" = 75 ] || [ "$1" = 124 ] || [ "$1" = 137 ]; }
finish() { printf '[%.1f s]\n' "$(echo "$EPOCHREALTIME $began" | awk '{print $1 - $2}')"; }
serve() {
    setsid bash -c "exec $2" > "$1" 2>&1 < /dev/null &
    echo $! >> "$1.pid"
    for _ in $(seq 180); do
        url=$(grep --only-matching --max-count=1 'http://127[0-9.:]*' "$1" || true)
        if ! kill -0 $!; then break; fi
        if [ -n "$url" ] && python3 -c 'import sys, urllib.request as http, urllib.error
try: http.urlopen(sys.argv[1], timeout=5)
except urllib.error.HTTPError: pass
except OSError: sys.exit(1)' "$url"; then echo "$url answers"; return; fi
        sleep 1
    done
    tail -n 20 "$1"; echo 'the server does not answer'; return 1
}
"""


def commands(page: Path) -> Iterator[str]:
    """Yield each command of the `sh` blocks of a page, with continued lines and here-documents."""
    for language, block in FENCE.findall(page.read_text()):
        if language not in ("sh", ""):
            continue
        lines = iter(block.splitlines())
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


def reason_not_run(command: str) -> str | None:
    """Return why a command is not run here, or None if it is."""
    return next((reason for start, reason in NOT_RUN.items() if re.match(start, command)), None)


def follow(page: Path, folder: Path, *, install: bool = False) -> int:
    """Run the commands of a page in a new clone in `folder`; return the exit code of the shell."""
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    if not install:
        _link_environment(clone / ".venv")
    script = [_SHELL]
    for number, command in enumerate(commands(page)):
        script.append(f"start {shlex.quote(command)}")
        if reason := reason_not_run(command):
            script.append(f"echo {shlex.quote(f'[not run: {reason}]')}")
        elif re.sub(r"^(\w+=\S* +)+", "", command).startswith(SERVERS):
            script += [f"serve {folder}/server-{number}.log {shlex.quote(f'env {command}')}", "finish"]
        elif command.startswith("timeout "):
            script += [f"{command} || stopped $?", "finish"]
        else:
            script += [command, "finish"]
    (folder / "page.sh").write_text("\n".join(script) + "\n")
    environment = {
        **os.environ,
        "BROWSER": "true",
        "PORT": str(_free_port()),
    }  # no window opens; for `make ui`
    environment["OMP_WAIT_POLICY"] = "passive"  # on busy cores, threads would spin for most of their time
    if not install:
        environment["PYTHONPATH"] = str(clone)  # the clone's code runs in the linked environment
    for name in ("VIRTUAL_ENV", "MLFLOW_TRACKING_URI"):
        environment.pop(name, None)
    try:
        return subprocess.run(
            ["bash", folder / "page.sh"], cwd=clone, env=environment, check=False
        ).returncode
    finally:
        for file in folder.glob("server-*.pid"):
            _stop(int(file.read_text()))


def _link_environment(target: Path) -> None:
    """Make `target` a finished environment, for `make setup`, with the packages of this one."""
    target.mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != "ready":
            (target / entry.name).symlink_to(entry)
    (target / "ready").touch()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _stop(session: int) -> None:
    """End all processes of a server that was started in a session of its own."""
    try:
        os.killpg(session, signal.SIGTERM)
    except ProcessLookupError:
        return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--install", action="store_true", help="create .venv as the page says")
    options = parser.parse_args()
    for page in options.pages:
        with tempfile.TemporaryDirectory(prefix="follow-") as folder:
            code = follow(page.resolve(), Path(folder), install=options.install)
        print(
            f"\n{page}: {'every command ran' if code == 0 else f'stopped with exit code {code}'}", flush=True
        )
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
