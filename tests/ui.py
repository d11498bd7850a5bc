"""Show the runs in `runs/` in MLflow, opened on the newest one: `make ui`."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import webbrowser
from pathlib import Path

ENVIRONMENT = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
# Without the query MLflow opens its view of traces.
QUERY = "?workflowType=machine_learning"


def address(runs: Path, port: str) -> str:
    """Return the page of the run that was last sent to the database in `runs`, or that of all."""
    base, database = f"http://127.0.0.1:{port}/#/experiments", str(runs.absolute() / "mlflow.db")
    for path in sorted(runs.glob("*/mlflow.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        for server, sent in json.loads(path.read_text()).items():
            if server.endswith(database):
                return f"{base}/{sent['experiment_id']}/runs/{sent['run_id']}{QUERY}"
    return f"{base}{QUERY}"


def is_ready(port: str) -> bool:
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).status == 200
    return False


def main() -> int | str:
    """Show the runs until Ctrl-C; return the exit code, or an error."""
    runs, port = Path("runs"), sys.argv[1]
    if not (runs / "mlflow.db").exists():
        return f"there is no {runs / 'mlflow.db'} yet: train with 'make train' first"
    if is_ready(port):
        return f"port {port} has a server already: stop it, or use another: make ui PORT=5001"
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", port, "--workers", "1",
         "--backend-store-uri", f"sqlite:///{runs}/mlflow.db",
         "--artifacts-destination", f"{runs}/mlartifacts", "--uvicorn-opts=--log-level=warning"],
        env={**os.environ, **ENVIRONMENT}, start_new_session=True,  # Ctrl-C would make it print a traceback
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        while server.poll() is None and not is_ready(port):
            time.sleep(0.2)
        if server.poll() is None:
            url = address(runs, port)
            print(f"\n  {url}\n  (stop with Ctrl-C)\n", flush=True)
            if sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
                webbrowser.open(url)
        return server.wait()
    except KeyboardInterrupt:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
        return 0


if __name__ == "__main__":
    sys.exit(main())
