"""A real MLflow server that can be killed, and a server of another kind."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import mlflow
from harness import SMALL, Job, Result, environment, free_port, make_database, quick, read_rows
from mlflow.entities import LoggedModel, Run
from ui import ENVIRONMENT


def tracked_job(folder: Path, digits: Path, *more: str, nproc: int = 1, **env: str) -> Job:
    """Return a small training of the digits that may have a tracker."""
    small = [word for word in SMALL if not word.startswith("track.uri")]
    words = ["digits", f"data.root={digits}", *small, "data.workers=0", *more]
    return Job(folder, words, nproc=nproc, env=env)


def sync(job: Job, code: int | None = None, **env: str) -> Result:
    """Send a run to MLflow. code: that the command must exit with."""
    return quick("sync", str(job.folder), code=code, **env)


class Server:
    """A real MLflow server that can be killed and restarted on the same port and database.

    As a context manager it is ready inside.
    """

    def __init__(self, folder: Path, *more: str, python: str = sys.executable, **env: str) -> None:
        """more: arguments, in place of files on its disk. python: that of another environment."""
        self.folder, self.python, self.more = folder, python, more
        if "--no-serve-artifacts" not in more:
            self.more = ("--artifacts-destination", f"{folder}/artifacts", *more)
        self.env = env
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.client = mlflow.MlflowClient(self.uri)

    def start(self) -> "Server":
        if self.python == sys.executable:
            make_database(self.folder / "mlflow.db")
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                [self.python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port),
                 "--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db", *self.more],
                stdout=log, stderr=log, start_new_session=True, cwd=self.folder,
                env=environment(**ENVIRONMENT, **self.env),
            )  # fmt: skip
        return self

    def wait_ready(self) -> "Server":
        end = time.monotonic() + 120
        while True:
            try:
                self.client.search_experiments()
                return self
            except mlflow.MlflowException:
                assert time.monotonic() < end, (self.folder / "server.log").read_text()[-3000:]
                time.sleep(0.2)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Self:
        self.start().wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def run_of(self, job: Job) -> Run:
        """Return the MLflow run of a training; fail if there is not exactly one."""
        (found,) = self.runs(job)
        return found

    def runs(self, job: Job) -> list[Run]:
        tags = [row["run"] for row in read_rows(job.folder / "journal.jsonl") if "run" in row]
        experiments = [experiment.experiment_id for experiment in self.client.search_experiments()]
        return list(self.client.search_runs(experiments, f"tags.`pipeline.run` = '{[*tags, 'none'][0]}'"))

    def models(self, job: Job) -> list[LoggedModel]:
        """Return the models that a training has logged."""
        run = self.run_of(job).info
        return list(self.client.search_logged_models([run.experiment_id], f"source_run_id = '{run.run_id}'"))

    def check_points(self, job: Job) -> None:
        """Fail unless the server has each metric of the journal exactly once."""
        rows = [row for row in read_rows(job.folder / "journal.jsonl") if "metrics" in row]
        points = [(row["step"], *item, row["time"]) for row in rows for item in row["metrics"].items()]
        assert self.points(self.run_of(job)) == sorted(points)

    def points(self, run: Run) -> list[tuple[int, str, float, int]]:
        """Return (step, key, value, timestamp) of all metrics of a run, sorted."""
        return sorted(
            (point.step, key, point.value, point.timestamp)
            for key in run.data.metrics
            for point in self.client.get_metric_history(run.info.run_id, key)
        )


@contextlib.contextmanager
def foreign_server(
    status: int = 200, answer: Callable[[str], Iterable[bytes]] = lambda _: [b"{}"], **headers: str
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Start a foreign server; yield its address and (path, Authorization) of each request.

    answer: returns the parts of the answer to a path.
    """
    seen: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers.get("Authorization", "")))
            # unread, it would reset the connection
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):
                for part in answer(self.path):
                    self.wfile.write(part)

        do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()
