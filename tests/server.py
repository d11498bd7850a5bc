"""Start and kill a real MLflow server, and read what it has stored."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlflow
from harness import Job, environment, free_port, read_rows
from mlflow.entities import Run

_WORDS = (
    "model.arch=shufflenet_v2_x0_5", "batch.global=48", "run.device=cpu", "run.threads=1", "data.workers=0",
    "train.max_steps=8", "evaluate.every=4 steps", "track.every=2 steps", "track.uri=none",
)  # fmt: skip


def train(folder: Path, digits: Path, *more: str) -> Job:
    """Return a finished run whose journal has everything, and which no server has."""
    job = Job(folder, ["digits", f"data.root={digits}", *_WORDS, *more])
    result = job.run()
    assert result.code == 0, result.err
    return job


class Server:
    """A real MLflow server that can be killed and restarted on the same port and database."""

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
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                [self.python, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port),
                 "--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db", *self.more],
                stdout=log, stderr=log, start_new_session=True, cwd=self.folder,
                env=environment(
                    MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false", MLFLOW_DISABLE_TELEMETRY="true", **self.env
                ),
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

    def run_of(self, job: Job) -> Run:
        """Return the MLflow run of a training; fail if there is not exactly one."""
        found = self.runs(job)
        assert len(found) == 1, found
        return found[0]

    def runs(self, job: Job) -> list[Run]:
        tag = next((row["run"] for row in read_rows(job.folder / "journal.jsonl") if "run" in row), "none yet")
        experiments = [experiment.experiment_id for experiment in self.client.search_experiments()]
        return list(self.client.search_runs(experiments, f"tags.`pipeline.run` = '{tag}'"))

    def last_step(self, job: Job) -> int:
        return max(point.step for point in self.client.get_metric_history(self.run_of(job).info.run_id, "train/loss"))

    def points(self, run: Run) -> list[tuple[int, str, float, int]]:
        """Return (step, key, value, timestamp) of all metrics of a run, sorted."""
        return sorted(
            (point.step, key, point.value, point.timestamp)
            for key in run.data.metrics
            for point in self.client.get_metric_history(run.info.run_id, key)
        )
