"""From the journal to MLflow: the only place that imports mlflow, and a process of its own (`pipeline sync`).

Promise: one MLflow run per training, across restarts and re-deliveries; each point once; the true status. Why: the run is
found by a tag that the journal's first row holds, before one is made; a point is sent as its journal row says it, time
stamp included, and MLflow's SQL stores drop a point equal in key, step, value and time stamp, so what is sent twice after
a crash between sending and noting it arrives once. How far delivery came is noted in `mlflow.json`, for each server.

A call that fails costs seconds and nothing else: it is tried again while training goes on, once more at its end, and
`pipeline sync RUN_DIR` delivers whatever is left, from the journal alone.
"""

import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.config import Config, from_yaml
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read
from pipeline.record.sender import READY, tracking_uri
from pipeline.verdict import RequestError, TemporaryError

_BATCH = 1000  # MLflow's limit on the metrics of one call
_POLL_S = 0.5
_LAST_WORDS_S = 4  # after the trainer is killed: FAILED is written by then, or at the next train or sync
RUN_TAG = "pipeline.run"


@dataclass
class Progress:
    """How far one server has been told."""

    run_id: str
    experiment_id: str
    offset: int = 0
    """Bytes of the journal delivered."""
    model_step: int = -1
    """Step of the checkpoint whose model is logged."""


class Follower:
    """Delivers one run's journal to one server."""

    def __init__(self, folder: RunFolder, config: Config, uri: str, patience: int) -> None:
        os.environ |= {
            "MLFLOW_HTTP_REQUEST_TIMEOUT": str(patience),
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # our own loop tries again; mlflow's would block for minutes
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        }
        import mlflow

        mlflow.set_tracking_uri(uri)
        self._client = mlflow.MlflowClient(uri)
        self._folder = folder
        self._config = config
        self._uri = uri
        self._address = uri.split("@")[-1]  # what is written down holds no password
        self._progress: Progress | None = None

    def open_run(self) -> None:
        """Find the run on the server, or make it. Raises whatever mlflow raises."""
        if self._progress is not None:
            return
        run_tag = next((row["run"] for row, _ in read(self._folder.journal) if "run" in row), None)
        if run_tag is None:
            raise RequestError(f"{self._folder.path} holds no journal.jsonl: there is nothing to send")
        noted = self._load().get(self._address)
        name = self._config.track.experiment or self._config.recipe
        experiment_id = self._experiment(name)
        found = self._client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{run_tag}'", max_results=1)
        if found:
            same = noted if noted and noted["run_id"] == found[0].info.run_id else {}
            self._progress = Progress(**{**same, "run_id": found[0].info.run_id, "experiment_id": experiment_id})
            return
        from mlflow.entities import Param

        run = self._client.create_run(experiment_id, run_name=self._folder.path.name, tags={RUN_TAG: run_tag})
        self._progress = Progress(run.info.run_id, experiment_id)
        self._client.log_batch(run.info.run_id, params=[Param(key, value) for key, value in _flat(self._config)])
        self._note()

    def deliver(self) -> None:
        """Send what the journal holds and the server lacks."""
        self.open_run()
        progress = self._progress
        assert progress is not None
        for points, event, end in _portions(self._folder.journal, progress.offset):
            if points:
                self._client.log_batch(progress.run_id, metrics=points)
            if event:
                self._tell(event, progress)
            progress.offset = end
            self._note()

    def declare_failed(self) -> None:
        """The training is gone without a last word."""
        assert self._progress is not None
        self._client.set_terminated(self._progress.run_id, "FAILED")

    def _tell(self, event: dict[str, Any], progress: Progress) -> None:
        run_id = progress.run_id
        match event["event"]:
            case "started":
                from mlflow.entities import RunTag

                self._client.update_run(run_id, status="RUNNING")
                self._client.log_batch(run_id, tags=[RunTag(key, str(value)) for key, value in event["tags"].items()])
                for path in (self._folder.config, self._folder.plan):
                    if path.exists():
                        self._client.log_artifact(run_id, str(path))
            case "ended":
                best = event.get("best")
                if event["status"] == "FINISHED" and best and best["step"] != progress.model_step:
                    path = self._folder.checkpoints / best["file"]
                    if path.exists():
                        self._log_model(run_id, path, best["step"])
                        progress.model_step = best["step"]
                self._client.log_artifact(run_id, str(self._folder.journal))
                self._client.set_terminated(run_id, event["status"], event["time"])

    def _log_model(self, run_id: str, path: Path, step: int) -> None:
        """The model of a checkpoint, as one that takes pixels and gives probabilities."""
        import mlflow.pytorch
        import numpy as np
        import torch

        from pipeline.data.augment import evaluation_geometry
        from pipeline.model.architectures import Served, build
        from pipeline.record.checkpoint import decode, read_verified

        contents = decode(read_verified(path), path)
        model = build(self._config.model, len(contents["classes"]))
        model.load_state_dict(contents["model"])
        served = Served(model).eval()  # a copy of its own: exporting a model in train mode would change the real one
        size, _ = evaluation_geometry(self._config.evaluate, self._config.augment)
        example = np.zeros((2, 3, size, size), np.float32)  # a batch of one would freeze the batch size
        with torch.inference_mode():
            answer = served(torch.from_numpy(example)).numpy()
        with mlflow.start_run(run_id=run_id):
            mlflow.pytorch.log_model(
                served,
                name="model",
                signature=mlflow.models.infer_signature(example, answer),
                input_example=example,
                pip_requirements=[f"torch=={torch.__version__.split('+')[0]}", "numpy"],
                step=step,
            )

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        for _ in range(2):
            experiment = self._client.get_experiment_by_name(name)
            if experiment is not None:
                return str(experiment.experiment_id)
            try:
                return str(self._client.create_experiment(name, self._artifact_location()))
            except MlflowException:
                continue  # another run made it meanwhile
        raise TemporaryError(f"MLflow experiment {name} can be neither found nor made: is it deleted? restore or rename it")

    def _artifact_location(self) -> str | None:
        """Beside the database of a local store; a server knows its own."""
        if not self._uri.startswith("sqlite:///"):
            return None
        return (Path(self._uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts").as_uri()

    def _load(self) -> dict[str, dict[str, Any]]:
        try:
            noted: dict[str, dict[str, Any]] = json.loads(self._folder.tracker.read_text())
            return noted
        except (OSError, ValueError):
            return {}

    def _note(self) -> None:
        assert self._progress is not None
        self._folder.write(self._folder.tracker, json.dumps({**self._load(), self._address: asdict(self._progress)}, indent=1))


def sync(path: Path, *, follow: bool) -> None:
    """Send the run in `path`. follow: until standard input ends and the last row is sent, whatever the server does.

    TemporaryError if something is left that the server did not take.
    """
    folder = RunFolder(path)
    try:
        config = from_yaml(folder.config.read_text(), str(folder.config))
    except OSError as error:
        raise RequestError(f"{path} is not a run's folder: {folder.config.name}: {error.strerror}") from None
    uri = os.environ.get("PIPELINE_TRACK_URI") or tracking_uri(config)
    if uri is None:
        raise RequestError(f"the run in {path} has track.uri=none: name a server with MLFLOW_TRACKING_URI or PIPELINE_TRACK_URI")
    over = _watch_input(folder) if follow else None
    _take_turn(folder)
    if over:
        os.nice(10)  # training comes first
        _follow(Follower(folder, config, uri, patience=5), folder, over)
    else:
        follower = Follower(folder, config, uri, patience=60)
        try:
            follower.deliver()
            if not has_ended(folder.journal) and not folder.is_held():
                follower.declare_failed()
        except Exception as error:
            raise _unreachable(uri, error) from error


def _follow(follower: Follower, folder: RunFolder, over: threading.Event) -> None:
    failure: Exception | None = None
    told, pause = False, _POLL_S
    while True:
        last = over.is_set()  # read before delivering: what was written until then is seen
        try:
            follower.deliver()
            if last and not has_ended(folder.journal):
                follower.declare_failed()
            failure, pause = None, _POLL_S
            if not told:
                sys.stdout.buffer.write(READY)
                sys.stdout.flush()
                told = True
        except Exception as error:  # whatever a tracker does, it is not training's concern
            if failure is None:
                print(f"{time.strftime('%F %T')} {_unreachable('', error)}", file=sys.stderr, flush=True)
            failure, pause = error, min(30, pause * 2)
        if last:
            break
        over.wait(pause)
    if failure is not None:
        raise _unreachable("", failure)


def _unreachable(uri: str, error: Exception) -> TemporaryError:
    where = f" at {uri.split('@')[-1]}" if uri else ""
    return TemporaryError(f"MLflow{where} did not take it: {str(error)[:300] or type(error).__name__}; the journal keeps it")


def _watch_input(folder: RunFolder) -> threading.Event:
    """Set when standard input ends: the trainer is done or dead. Starts before mlflow is imported, which takes seconds.

    A trainer that was killed leaves nothing behind for longer than a few seconds, this process included.
    """
    over = threading.Event()

    def watch() -> None:
        while os.read(0, 1024):
            pass
        over.set()
        if not has_ended(folder.journal):
            time.sleep(_LAST_WORDS_S)
            os._exit(TemporaryError.code)

    threading.Thread(target=watch, daemon=True).start()
    return over


def _take_turn(folder: RunFolder) -> None:
    """One sender a run: a new one waits for the last words of the one before."""
    descriptor = os.open(folder.path / "mlflow.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    end = time.monotonic() + 3 * _LAST_WORDS_S
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError:
            if time.monotonic() > end:
                raise TemporaryError(f"{folder.path} is being sent by another process: it will deliver what is there") from None
            time.sleep(0.1)


def _portions(journal: Path, start: int) -> Iterator[tuple[list[Any], dict[str, Any] | None, int]]:
    """(points, event after them, offset after both) in portions that one call takes."""
    from mlflow.entities import Metric

    points: list[Any] = []
    end = start
    for row, after in read(journal, start):
        new = [Metric(key, value, row["time"], row["step"]) for key, value in row.get("metrics", {}).items()]
        if len(points) + len(new) > _BATCH:
            yield points, None, end
            points = []
        points += new
        end = after
        if "event" in row:
            yield points, row, end
            points = []
    if points:
        yield points, None, end


def has_ended(journal: Path) -> bool:
    """Whether the journal's last word is that the run has ended."""
    last = None
    for row, _ in read(journal):
        last = row.get("event", last)
    return last == "ended"


def _flat(config: Config) -> Iterator[tuple[str, str]]:
    for key, value in config.model_dump(mode="json", by_alias=True).items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", str(of)) for inner, of in value.items())
        else:
            yield key, str(value)
