"""From the journal to MLflow: the only place that imports mlflow, and a process of its own (`pipeline sync`).

Promise: one MLflow run per training, across restarts and re-deliveries; each point once; the true status. Why: the run is
found by a tag that the journal's first row holds, before one is made; a point is sent as its journal row says it, time
stamp included, and MLflow's SQL stores drop a point equal in key, step, value and time stamp, so what is sent twice after
a crash between sending and noting it arrives once. How far delivery came is noted in `mlflow.json`, for each server.

A call that fails costs seconds and nothing else: it is tried again while training goes on, once more at its end, and
`pipeline sync RUN_DIR` delivers whatever is left, from the journal alone. A password in the address goes to mlflow by
the environment, never in the address itself, so that no message, file or tag of mlflow's can hold it.

A database of one's own is made under another name first: MLflow makes its tables one by one, in seconds, and never opens
one that was killed between two.
"""

import contextlib
import json
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from pipeline.config.credentials import split_credentials, without_password
from pipeline.config.load import from_yaml
from pipeline.config.schema import Config
from pipeline.errors import RequestError, RunError, StorageError, TemporaryError
from pipeline.files import atomic_write
from pipeline.record.description import tell
from pipeline.record.figures import OF_EVALUATION, of_evaluation
from pipeline.record.folder import RunFolder, lock_file
from pipeline.record.journal import final_status, read
from pipeline.record.receipt import Receipt
from pipeline.record.sender import OVER, READY, tracking_uri

_BATCH = 1000  # MLflow's limit on the metrics of one call
_POLL_S = 0.5
_PATIENCE_S = 5  # for one answer, beside a training run: two of them fit into its end
_FILE_PATIENCE_S = 60  # a server may pass a file on to slower storage before it answers
_LAST_WORDS_S = 4  # after the trainer is killed: FAILED is written by then, or at the next train or sync
_FAREWELL_S = 7  # after the trainer is done: for a server that has not answered by then it waits no longer
_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"  # mlflow reads it anew at each call
# has the UI open an experiment on its view of training runs, not on that of traces
_OF_TRAINING = {"mlflow.experimentKind": "custom_model_development"}
_LOCAL = ("", "file")
_STORES = (*_LOCAL, "mlflow-artifacts", "s3", "gs", "wasbs", "abfss")
"""Where a model's files may be: with others mlflow asks hosts that a registry names, or with keys that are not its own."""
_MAX_DESCRIPTION_BYTES = 4 << 20
_OUT_OF_ORDER = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "IO_ERROR")
RUN_TAG = "pipeline.run"
STEP_TAG = "pipeline.step"


@dataclass
class Progress:
    """How far one server has been told."""

    run_id: str
    experiment_id: str
    offset: int = 0
    """Bytes of the journal delivered."""


class Follower:
    """Delivers one run's journal to one server."""

    def __init__(self, folder: RunFolder, config: Config, uri: str, patience: int) -> None:
        self._folder = folder
        self._config = config
        self._uri, credentials = _without_credentials(uri)
        self._progress: Progress | None = None
        self.reached = not uri.startswith("http")  # a database of one's own is there, slow though its making may be
        """Whether the server took the last call."""
        self.loaded = threading.Event()
        """Set once mlflow is imported, which takes seconds."""
        os.environ |= credentials | {
            _TIMEOUT: str(patience),
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # our own loop tries again; mlflow's would block for minutes
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
            "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        }

    def load(self) -> None:
        """Import mlflow, which takes seconds. RequestError where it is not installed."""
        try:
            import mlflow
        except ModuleNotFoundError as error:
            raise _not_installed(error) from None

        mlflow.set_tracking_uri(self._uri)
        self.loaded.set()

    def deliver(self) -> None:
        """Send what the journal holds and the server lacks. Raises whatever mlflow raises."""
        try:
            progress = self._progress = self._progress or self._open_run()
            self.reached = True
            for points, event, end in _portions(self._folder.journal, progress.offset):
                if points:
                    self._client.log_batch(progress.run_id, metrics=points)
                if event:
                    self._tell(event, progress)
                progress.offset = end
                self._note(progress)
        except Exception:
            self.reached = False
            self._progress = None  # looked for again: the server may come back without the run
            raise

    def declare_failed(self) -> None:
        """The training is gone without a last word; its last row says when."""
        assert self._progress is not None
        last = max((row["time"] for row, _ in read(self._folder.journal)), default=None)
        self._client.set_terminated(self._progress.run_id, "FAILED", last)

    def _open_run(self) -> Progress:
        """Find the run on the server, or make it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag

        created = next((row for row, _ in read(self._folder.journal) if "run" in row), None)
        if created is None:
            raise RequestError(f"{self._folder.path} holds no journal.jsonl: there is nothing to send")
        if self._database and not self._database.exists():
            _make_database(self._database, created["run"])
        self._client = MlflowClient(self._uri)
        experiment_id = self._experiment(self._config.track.experiment or self._config.recipe)
        of_run = f"tags.`{RUN_TAG}` = '{created['run']}'"
        found = self._client.search_runs([experiment_id], of_run, max_results=1)
        run = found[0] if found else self._client.create_run(
            experiment_id, created["time"], {RUN_TAG: created["run"]}, self._folder.path.absolute().name
        )  # fmt: skip
        if not run.info.run_id:
            raise TemporaryError("it answers, but not as MLflow does")
        _check_store(run.info.artifact_uri, self._uri)
        missing = [Param(key, value) for key, value in _flat(self._config) if key not in run.data.params]
        if missing:
            self._client.log_batch(run.info.run_id, params=missing)
        # a parameter is for ever what it was at the first start; the value of now is a tag of the same name
        told = {**run.data.params, **{key: value for key, value in run.data.tags.items() if key in run.data.params}}
        changed = [RunTag(key, value) for key, value in _flat(self._config) if told.get(key, value) != value]
        if changed:
            self._client.log_batch(run.info.run_id, tags=changed)
        noted = self._noted().get(self._address, {})
        offset = noted["offset"] if noted.get("run_id") == run.info.run_id else 0
        return Progress(run.info.run_id, experiment_id, offset)

    def _tell(self, event: dict[str, Any], progress: Progress) -> None:
        from mlflow.entities import RunTag

        match event["event"]:
            case "started":
                tags = [RunTag(key, str(value)) for key, value in event["tags"].items()]
                self._client.update_run(progress.run_id, status="RUNNING")
                self._client.log_batch(progress.run_id, tags=[*tags, self._description()])
                self._send_data_set(progress, event["tags"])
                with self._left_for_the_end():
                    self._send_files(progress)
            case "evaluated":
                with self._left_for_the_end():
                    self._send_pictures(progress)
            case "ended":
                self._client.set_terminated(progress.run_id, event["status"], event["time"])
                self._client.log_batch(progress.run_id, tags=[self._description()])
                with _patience(_FILE_PATIENCE_S):
                    self._send_files(progress)
                    if event["status"] == "FINISHED" and event["best"]:
                        path = self._folder.checkpoints / event["best"]["file"]
                        model_id = self._send_model(progress, path, event["best"]["step"])
                        if model_id and self._config.track.register_:
                            self._register(self._config.track.register_, model_id, progress)
                    self._send_pictures(progress)

    @contextlib.contextmanager
    def _left_for_the_end(self) -> Iterator[None]:
        """A store for files that is out of order keeps no point back: they are sent again when the run has ended."""
        try:
            yield
        except Exception as error:
            _log(f"files are left for the end: {_one_line(error)}")

    def _description(self) -> Any:
        from mlflow.entities import RunTag

        return RunTag("mlflow.note.content", tell(self._folder, self._config))

    def _send_data_set(self, progress: Progress, tags: dict[str, Any]) -> None:
        """The data as an input, with its own digest (MLflow takes 36 characters; the tag `data` has them all)."""
        from mlflow.entities import Dataset, DatasetInput, InputTag
        from mlflow.exceptions import MlflowException

        options = self._config.data
        source = json.dumps({"source": options.source, "root": options.root})
        plan = json.loads(self._folder.plan.read_text())
        profile = json.dumps({name: plan[name] for name in ("train_images", "val_images", "num_classes")})
        name = Path(options.root or options.source).name or options.source
        data_set = Dataset(name, tags["data"][:36], options.source, source, profile=profile)
        inputs = [DatasetInput(data_set, [InputTag("mlflow.data.context", "training")])]
        try:
            self._client.log_inputs(progress.run_id, inputs)
        except MlflowException:  # a server looks for a data set before it adds it: another run of it may come between
            self._client.log_inputs(progress.run_id, inputs)

    def _send_pictures(self, progress: Progress) -> None:
        """What each evaluation looks like, as images that step with them; what is there is not sent again."""
        from PIL import Image

        sent = [Path(one.path).name for one in self._client.list_artifacts(progress.run_id, "images")]
        for kept in sorted((self._folder.report / "data").glob("step-*.npz")):
            step = int(kept.stem.removeprefix("step-"))
            judged_at = int(1000 * kept.stat().st_mtime)
            for name, draw in OF_EVALUATION.items():
                if any(one.startswith(f"{name}+step+{step}+") for one in sent):
                    continue
                with tempfile.TemporaryDirectory() as scratch:
                    path = Path(scratch) / "picture.png"
                    try:
                        of_evaluation(draw, kept)(path)
                    except Exception as error:
                        _log(f"{name} of step {step} is not shown: {_one_line(error)}")
                    if path.exists():  # of no mistake there is no picture
                        with Image.open(path) as image:
                            self._client.log_image(
                                progress.run_id, image.convert("RGB"), key=name, step=step, timestamp=judged_at
                            )

    def _register(self, wanted: str, model_id: str, progress: Progress) -> None:
        """The model under its name in the registry, once, with its alias."""
        from mlflow.exceptions import MlflowException

        name, _, alias = wanted.partition("@")
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"models:/{model_id}"
        versions = self._client.search_model_versions(f"name = '{name}'")
        version = next((one for one in versions if one.source == source), None)
        version = version or self._client.create_model_version(name, source, progress.run_id, model_id=model_id)
        if alias:
            self._client.set_registered_model_alias(name, alias, version.version)

    def _send_files(self, progress: Progress) -> None:
        for path in (self._folder.config, self._folder.plan, self._folder.journal):
            if path.exists():
                self._client.log_artifact(progress.run_id, str(path))
        for path in sorted(self._folder.report.glob("*.png")):
            self._client.log_artifact(progress.run_id, str(path), self._folder.report.name)
        # made anew: the trainer may not have written it yet, or never will
        self._client.log_text(progress.run_id, Receipt(self._folder).text(), self._folder.receipt.name)

    def _send_model(self, progress: Progress, path: Path, step: int) -> str | None:
        """The model of a checkpoint, unless it is there; None if it cannot be exported: the run is what it is without."""
        from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric

        sent = self._client.search_logged_models([progress.experiment_id], f"source_run_id = '{progress.run_id}'")
        for model in sent:
            if model.status != LoggedModelStatus.READY:  # a sender that was killed on the way left it
                self._client.delete_logged_model(model.model_id)
            elif model.tags.get(STEP_TAG) == str(step):
                return str(model.model_id)
        with tempfile.TemporaryDirectory() as scratch:
            local = Path(scratch) / "model"
            try:
                description = self._export(path, local)
            except Exception as error:
                _log(f"{path.name} is not logged as a model: {_one_line(error)}")
                return None
            model = self._client.create_logged_model(
                progress.experiment_id, "model", progress.run_id, {STEP_TAG: str(step)}
            )
            description.model_id, description.run_id = model.model_id, progress.run_id
            description.artifact_path = model.artifact_location
            description.save(local / "MLmodel")
            self._client.log_model_artifacts(model.model_id, str(local))
        judged = [
            Metric(key, value, row["time"], step, model_id=model.model_id)
            for row, _ in read(self._folder.journal)
            if row.get("step") == step
            for key, value in row.get("metrics", {}).items()
            if key.startswith("val/")
        ]
        if judged:
            self._client.log_batch(progress.run_id, metrics=judged)  # for the run they are there: these name the model
        self._client.log_outputs(progress.run_id, [LoggedModelOutput(model.model_id, step)])
        self._client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
        return str(model.model_id)

    def _export(self, path: Path, to: Path) -> Any:
        """The checkpoint's model in `to`, as one that takes pixels and gives probabilities; MLflow's description of it."""
        import mlflow.pytorch
        import numpy as np
        import torch
        from mlflow.models import Model, infer_signature

        from pipeline.data.augment import evaluation_geometry
        from pipeline.model.architectures import Served
        from pipeline.record.checkpoint import decode, eval_model, read_verified

        contents = decode(read_verified(path), path)
        model = eval_model(contents, self._config.model)
        served = Served(model).eval()  # in train mode the export would keep dropout and change batch norm's statistics
        size, _ = evaluation_geometry(self._config.evaluate, self._config.augment)
        example = np.zeros((2, 3, size, size), np.float32)  # a batch of one would freeze the batch size
        with torch.inference_mode():
            answer = served(torch.from_numpy(example)).numpy()
        # whoever loads it can do as validation does, without the checkpoint
        description = Model(metadata={"config": contents["config"], "classes": contents["classes"]})
        mlflow.pytorch.save_model(
            served,
            str(to),
            mlflow_model=description,
            signature=infer_signature(example, answer),
            input_example=example,
            serialization_format="pt2",  # never a pickle, on whatever server
            pip_requirements=[f"torch=={torch.__version__.split('+')[0]}", "numpy"],
        )
        return description

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        failure: Exception | None = None
        for _ in range(2):
            experiment = self._client.get_experiment_by_name(name)
            if experiment is not None:
                return str(experiment.experiment_id)
            try:
                return str(self._client.create_experiment(name, self._artifact_location(), _OF_TRAINING))
            except MlflowException as error:  # another run made it meanwhile, or it really cannot be
                failure = error
        raise TemporaryError(f"experiment {name} can be neither found nor made: {failure}")

    @property
    def _database(self) -> Path | None:
        """The file of a local store."""
        if not self._uri.startswith("sqlite:///"):
            return None
        return Path(self._uri.removeprefix("sqlite:///")).absolute()

    def _artifact_location(self) -> str | None:
        """Beside the database of a local store; a server knows its own."""
        return (self._database.parent / "mlartifacts").as_uri() if self._database else None

    @property
    def _address(self) -> str:
        return without_password(self._uri)  # a database's still holds one

    def _noted(self) -> dict[str, dict[str, Any]]:
        try:
            noted: dict[str, dict[str, Any]] = json.loads(self._folder.tracker.read_text())
            return noted
        except (OSError, ValueError):
            return {}

    def _note(self, progress: Progress) -> None:
        noted = {**self._noted(), self._address: asdict(progress)}
        atomic_write(self._folder.tracker, json.dumps(noted, indent=1).encode())


def fetch_model(uri: str) -> dict[str, Any]:
    """Return a logged model (models:/NAME@ALIAS, models:/NAME/VERSION, models:/m-…) as a checkpoint holds one: config,
    classes, model (its weights).

    Nothing of it runs, so mlflow's own loaders are not used: they unpickle and import what a model brings. RequestError
    if it is not there or not one of ours, StorageError if it is damaged, TemporaryError if the server is away.
    """
    database = Path("runs/mlflow.db")
    named = os.environ.get("MLFLOW_TRACKING_URI")
    if not named and not database.exists():
        raise RequestError(f"{uri} is looked for in MLflow, and there is no {database} here: set MLFLOW_TRACKING_URI")
    tracking_uri, credentials = _without_credentials(named or f"sqlite:///{database}")
    os.environ |= credentials | {"MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # mlflow's own 7 take minutes
    os.environ.setdefault(_TIMEOUT, str(_FILE_PATIENCE_S))
    is_server = tracking_uri.startswith("http")
    place = without_password(tracking_uri)
    try:
        import mlflow
        from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

        mlflow.set_tracking_uri(tracking_uri)
        root = ModelsArtifactRepository.get_underlying_uri(uri)
        if not root:
            raise ValueError("it answers, but not as MLflow does")
        _check_store(root, tracking_uri)
        if urlsplit(root).scheme not in (_STORES if named else _LOCAL):
            raise RequestError(
                f"{uri} is at {without_password(root)}, and models are read from {', '.join(filter(None, _STORES))} alone"
                + ("" if named else f" (with {database}: from this machine alone)")
            )
        with tempfile.TemporaryDirectory() as scratch:
            contents = _describe(uri, _fetch(root, "MLmodel", _MAX_DESCRIPTION_BYTES, Path(scratch)).read_text())
            return contents | _weights(uri, contents, root, Path(scratch))
    except RunError:
        raise
    except ModuleNotFoundError as error:
        raise _not_installed(error) from None
    except Exception as error:  # of mlflow, and of all that it calls: the network's, a database's, a file system's
        code = getattr(error, "error_code", "INTERNAL_ERROR")
        kind = RequestError if code not in _OUT_OF_ORDER else TemporaryError if is_server else StorageError
        raise kind(f"{uri} cannot be had from {place}: {_one_line(error)}") from None


def _check_store(root: str, tracking_uri: str) -> None:
    """RequestError if the files are at another host than the server's: mlflow would send it the server's password."""
    from mlflow.utils.credentials import get_default_host_creds

    store, server = urlsplit(root), urlsplit(tracking_uri)
    if store.scheme not in ("http", "https", "mlflow-artifacts") or store.netloc in ("", server.netloc):
        return
    given = get_default_host_creds(root)
    if given.password or given.token or given.auth:
        raise RequestError(
            f"MLflow at {without_password(tracking_uri)} keeps these files at another host, {without_password(root)}, which"
            " would be sent your password: use an experiment or a model whose files are on the server itself"
        )


def _fetch(root: str, name: str, limit: int, scratch: Path) -> Path:
    """Return the path of one file of a model, of at most `limit` bytes: where it lies, or a copy in `scratch`."""
    import mlflow
    from mlflow.utils.file_utils import local_file_uri_to_path

    missing = RequestError(
        f"the model at {without_password(root)} has no {name} that this pipeline wrote (a file of at most {limit:,} bytes):"
        " log it again with 'pipeline sync RUN_DIR'"
    )
    if urlsplit(root).scheme in _LOCAL:
        path = Path(local_file_uri_to_path(root)) / name
    else:
        folder, _, file = f"{root.rstrip('/')}/{name}".rpartition("/")
        listed = mlflow.artifacts.list_artifacts(artifact_uri=folder)
        sizes = {Path(one.path).name: one.file_size for one in listed if not one.is_dir}
        if file not in sizes or (sizes[file] or 0) > limit:
            raise missing
        path = Path(mlflow.artifacts.download_artifacts(artifact_uri=f"{folder}/{file}", dst_path=str(scratch)))
    try:
        found = path.lstat()
    except OSError:
        raise missing from None
    if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
        raise missing
    return path


def _describe(uri: str, text: str) -> dict[str, Any]:
    """Return the configuration and the classes that an MLmodel file names."""
    try:
        description = yaml.safe_load(text)
        flavors, metadata = description["flavors"], description["metadata"]
        brings_code = [name for name, flavor in flavors.items() if flavor.get("code")]
        config, classes = metadata["config"], metadata["classes"]
        if not (isinstance(config, str) and isinstance(classes, list) and all(isinstance(one, str) for one in classes)):
            raise TypeError("no configuration, or no classes")
    except (yaml.YAMLError, RecursionError, ValueError, KeyError, TypeError, AttributeError):
        raise RequestError(f"{uri} is not a model that this pipeline logged: its MLmodel names no classes") from None
    if brings_code:
        raise RequestError(
            f"{uri} brings code of its own ({', '.join(brings_code)}), which is never run: log it without"
        )
    return {"config": config, "classes": classes}


def _weights(uri: str, contents: dict[str, Any], root: str, scratch: Path) -> dict[str, Any]:
    """Return the weights of the model that the configuration names, and no others."""
    from pipeline.model.architectures import skeleton
    from pipeline.record.program import MAX_BYTES, read_weights

    options = from_yaml(contents["config"], uri).model
    if not options.arch.isidentifier():
        raise RequestError(
            f"{uri} names model.arch={options.arch}: a model from MLflow can only be one of torchvision's"
        )
    expected = skeleton(options, len(contents["classes"])).state_dict()
    program = _fetch(root, "data/model.pt2", MAX_BYTES, scratch)
    return {"model": read_weights(program, "model.", expected), "average": None}  # `Served` has it as `model`


def _not_installed(error: ModuleNotFoundError) -> RequestError:
    return RequestError(
        f"the tracker wants a Python package that is not here ({error.name}): pip install mlflow, or track.uri=none"
    )


def _make_database(path: Path, run: str) -> None:
    """Let MLflow make its tables in a file that gets its name when they are there, unless another run was faster."""
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{run}.part")  # one sender a run: nobody else writes it
    part.unlink(missing_ok=True)
    MlflowClient(f"sqlite:///{part}")
    with contextlib.suppress(FileExistsError):
        os.link(part, path)
    part.unlink()


def sync(path: Path, *, follow: bool) -> None:
    """Send the run in `path`. follow: until standard input says that training is over and the last row is sent.

    To the server that the environment names, else to the run's own. TemporaryError if the server does not take it.
    """
    folder = RunFolder(path)
    try:
        config = from_yaml(folder.config.read_text(errors="replace"), str(folder.config))
    except OSError as error:
        raise RequestError(f"{path} is not a run's folder: {folder.config.name}: {error.strerror}") from None
    named = os.environ.get("PIPELINE_TRACK_URI") or os.environ.get("MLFLOW_TRACKING_URI")
    uri = named or tracking_uri(config, folder)
    if uri is None:
        raise RequestError(f"the run in {path} has track.uri=none: name a server with MLFLOW_TRACKING_URI")
    if follow:
        follower = Follower(folder, config, uri, _PATIENCE_S)
        over = _watch_trainer(follower)
        answers = os.dup(1)
        os.dup2(2, 1)  # a word that mlflow prints there would be the end of us once the trainer is dead
        _take_turn(folder)
        os.nice(10)  # training comes first
        follower.load()
        _follow(follower, folder, over, answers)
        return
    _take_turn(folder)
    follower = Follower(folder, config, uri, _FILE_PATIENCE_S)
    follower.load()
    try:
        follower.deliver()
        if not final_status(folder.journal) and not folder.is_held():
            follower.declare_failed()
    except RunError:
        raise
    except Exception as error:
        raise TemporaryError(f"MLflow at {without_password(uri)} did not take it: {_one_line(error)}") from error


def _follow(follower: Follower, folder: RunFolder, over: threading.Event, answers: int) -> None:
    failure: Exception | None = None
    answered, pause = False, _POLL_S
    while True:
        last = over.is_set()  # read before delivering: what was written until then is seen
        try:
            follower.deliver()
            if last and not final_status(folder.journal):
                follower.declare_failed()
            if failure is not None:
                _log("MLflow takes it again")
            failure, pause = None, _POLL_S
        except Exception as error:  # whatever a tracker does, it is not training's concern
            if failure is None:
                _log(f"MLflow does not take it: {_one_line(error)}")
            failure, pause = error, min(30, pause * 2)
        if not answered:
            answered = True
            with contextlib.suppress(OSError):  # nobody may be left to read it
                os.write(answers, f"{READY if failure is None else _one_line(failure)}\n".encode())
        if last:
            break
        over.wait(pause)
    if failure is not None:
        raise TemporaryError(f"MLflow did not take everything: {_one_line(failure)}; the journal keeps it")


def _watch_trainer(follower: Follower) -> threading.Event:
    """Set when the trainer is done or dead. Starts before mlflow is imported, which takes seconds.

    A trainer that was killed leaves nothing behind for longer than a few seconds, this process included; one that waits
    for us waits no longer for a server that does not answer. Both by leaving from here: the main thread may hang.
    """
    over = threading.Event()

    def watch() -> None:
        word = os.read(0, len(OVER))
        over.set()
        if word == OVER:
            follower.loaded.wait()
            time.sleep(_FAREWELL_S)
            while follower.reached:
                time.sleep(_POLL_S)
        else:
            time.sleep(_LAST_WORDS_S)
        _log("given up: the journal keeps what was not taken")
        os._exit(TemporaryError.code)

    threading.Thread(target=watch, daemon=True).start()
    return over


def _take_turn(folder: RunFolder) -> None:
    """One sender a run: a new one waits for the last words of the one before."""
    lock = folder.path / "mlflow.lock"
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise folder.unwritable(error) from None
    if not lock_file(lock, descriptor, 3 * _LAST_WORDS_S):
        raise TemporaryError(f"{folder.path} is being sent by another process: it will deliver what is there")


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


def _without_credentials(uri: str) -> tuple[str, dict[str, str]]:
    """The address alone, and the variables by which mlflow is told the user and password that stood in it."""
    address, name, password = split_credentials(uri)
    if not uri.startswith("http") or not password:
        return uri, {}
    return address, {"MLFLOW_TRACKING_USERNAME": name, "MLFLOW_TRACKING_PASSWORD": password}


@contextlib.contextmanager
def _patience(seconds: int) -> Iterator[None]:
    """Calls in here may take so long."""
    before = os.environ[_TIMEOUT]
    os.environ[_TIMEOUT] = str(seconds)
    try:
        yield
    finally:
        os.environ[_TIMEOUT] = before


def _flat(config: Config) -> Iterator[tuple[str, str]]:
    for key, value in config.model_dump(mode="json", by_alias=True).items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", str(of)) for inner, of in value.items())
        else:
            yield key, str(value)


def _log(line: str) -> None:
    """To standard error, which beside a training run is sync.log."""
    print(f"{time.strftime('%F %T')} {line}", file=sys.stderr, flush=True)


def _one_line(error: BaseException) -> str:
    """What was wrong first: mlflow wraps a refused connection in three layers."""
    while error.__context__ is not None:
        error = error.__context__
    return " ".join(without_password(str(error)).split())[:300] or type(error).__name__
