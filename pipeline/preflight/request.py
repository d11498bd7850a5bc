"""What can be wrong with a request, a check each: a start makes them in order, `doctor` makes all and tells of each.

A check returns what it found, or raises the Verdict that a start would end with. The checks of resumption, model and GPUs
import torch and come last; no other check needs it. None asks for a peer: a replaced node is checked while the others
train. None changes anything, except that it makes the digits where they are missing.
"""

import base64
import http.client
import json
import os
import socket
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline import errors, machine
from pipeline.config.credentials import split_credentials, without_password
from pipeline.config.load import from_yaml, refuse_changes
from pipeline.config.schema import Config
from pipeline.data import sources
from pipeline.data.access import holds_something
from pipeline.data.sources import Source
from pipeline.errors import RequestError, RunError, TemporaryError
from pipeline.plan import Plan, make_plan, request_digest
from pipeline.record.folder import RunFolder
from pipeline.record.sender import tracking_uri
from pipeline.world import World

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.train.resume import Found

_TRACKER_TIMEOUT_S = 10
_NAMES_TIMEOUT_S = 60


def run_folder(config: Config) -> RunFolder:
    """It can be written, and so can the tracker's database beside it."""
    folder = RunFolder(config.run_dir)
    folder.check_writable()
    tracking_uri(config, folder)
    return folder


def previous_failure(config: Config, here: World, folder: RunFolder) -> None:
    """The last start of this request did not fail permanently."""
    left = errors.load_failure(folder.path, request_digest(config, here))
    if left and config.run.resume == "auto":
        print(f"the previous start of this request ended so: {folder.way_on()}", file=sys.stderr)
        raise left


def device(config: Config, here: World) -> None:
    """A GPU is there if one is asked for."""
    if config.run.device == "cuda" and not machine.has_gpu():
        raise machine.no_gpu_error()
    if config.model.batchnorm == "sync" and here.size > 1 and (config.run.device == "cpu" or not machine.has_gpu()):
        raise RequestError("model.batchnorm=sync: torch normalises over processes on GPUs only; take local or average")


def data(config: Config, folder: RunFolder) -> Source:
    """It is there and laid out right. The digits are made where they are missing."""
    if _lost_its_data(config, folder):
        raise TemporaryError(
            f"data.root={config.data.root} is not there, and the run in {folder.path} was trained on it: bring it back, or"
            " name its new place with data.root=FOLDER"
        )
    return sources.open_source(config, check_sizes=folder.has_checkpoints())


def plan(config: Config, here: World, source: Source) -> Plan:
    """The numbers divide, and /dev/shm holds the batches."""
    return make_plan(config, here, source.size)


def changes(config: Config, folder: RunFolder) -> None:
    """What a resumption may not change is as it was."""
    if not folder.has_checkpoints() or config.run.resume != "auto":
        return
    try:
        before = from_yaml(folder.config.read_text(errors="replace"), str(folder.config))
    except (OSError, RunError):
        return  # the checkpoint holds it as well, and is asked later
    refuse_changes(before, config)


def resumption(config: Config, folder: RunFolder, source: Source, log: Callable[[str], None]) -> "Found | None":
    """The checkpoint that a start resumes from verifies, and is of this configuration and data."""
    from pipeline.train.resume import find

    return find(config, folder, source, log)


def model(config: Config, plan: Plan, *, is_resumed: bool) -> "dict[str, Tensor] | None":
    """The model can be built, fed, frozen and cut as planned. Returns its first weights if model.init names some.

    A run that is resumed has its weights from the checkpoint and needs no others.
    """
    from pipeline.model.architectures import skeleton, try_out
    from pipeline.model.partition import try_to_cut
    from pipeline.train import pretrained

    try_out(config.model, plan.num_classes, plan.bn_batch, plan.first_size, plan.eval_size)
    model = skeleton(config.model, plan.num_classes)
    if config.model.freeze:
        pretrained.freeze(model, config.model.freeze)
    if plan.stages > 1:
        try_to_cut(config.model, plan.num_classes, plan.stages, plan.image_size)
    if config.model.init and not is_resumed:
        return pretrained.read(config.model, model)
    return None


def names(endpoint: str) -> str:
    """This node's own name and the rendezvous' resolve, or do so soon: pods are given names one after another."""
    head = endpoint.rpartition(":")[0] or endpoint
    end = time.monotonic() + _NAMES_TIMEOUT_S
    found = {}
    for name in (socket.getfqdn(), head):
        while name not in found:
            try:
                found[name] = socket.gethostbyname(name)
            except OSError as error:
                if time.monotonic() > end:
                    raise TemporaryError(
                        f"the name {name} does not resolve ({error.strerror}) for {_NAMES_TIMEOUT_S} s: look at the"
                        " Service (publishNotReadyAddresses, selector) and at the pod's subdomain"
                    ) from None
                time.sleep(1)
    return ", ".join(f"{name} is {address}" for name, address in found.items())


def gpus(config: Config, here: World) -> str:
    """This wheel can use the GPUs that are there."""
    if config.run.device == "cpu" or not machine.has_gpu():
        return "none is there" if not machine.has_gpu() else "there, and run.device=cpu leaves them alone"
    from pipeline.device import choose_device

    return f"{choose_device(config, here)} and its neighbours can be used"


def tracker(config: Config, folder: RunFolder) -> str:
    """MLflow's server, where there is one, answers a call that a run makes (its /health says nothing of the others)."""
    uri = tracking_uri(config, folder) or "none: the journal alone"
    if not uri.startswith(("http://", "https://")):
        return f"no server to ask ({without_password(uri)})"
    shown = without_password(uri)
    try:
        with open_tracker(uri, "api/2.0/mlflow/experiments/search?max_results=1") as answer:
            json.load(answer)
    except urllib.error.HTTPError as error:
        remedy = {
            401: "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
            403: f"start the server with --allowed-hosts naming {urllib.parse.urlsplit(shown).netloc}, port included",
        }.get(error.code, "look at the server's log")
        if error.code in (301, 302, 303, 307, 308):
            there = without_password(error.headers.get("Location", "nowhere"))
            remedy = f"it sends to {there}, where no password is taken: give that address itself"
        raise TemporaryError(f"MLflow at {shown} answers {error.code}: {remedy}") from None
    except (OSError, http.client.HTTPException, ValueError, ssl.SSLError) as error:
        raise TemporaryError(f"MLflow at {shown} does not answer as one ({error}): is the server up?") from None
    return f"{shown} answers"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: urllib would send the password on, to whatever host the answer names."""

    def redirect_request(self, *_: Any) -> None:
        return None


def open_tracker(uri: str, path: str, method: str = "GET", body: bytes | None = None) -> Any:
    """MLflow's answer, with the user and password that its address or the environment name. Raises what urllib raises."""
    address, name, password = split_credentials(uri)
    parts = urllib.parse.urlsplit(address)
    request = urllib.request.Request(
        f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}/{path}", body, method=method
    )
    user = name or os.environ.get("MLFLOW_TRACKING_USERNAME")
    if user:
        request.add_header("Authorization", _basic(user, password or os.environ.get("MLFLOW_TRACKING_PASSWORD", "")))
    return urllib.request.build_opener(_NoRedirect).open(request, timeout=_TRACKER_TIMEOUT_S)


def _basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _lost_its_data(config: Config, folder: RunFolder) -> bool:
    """Return whether this data.root is gone, or empty as a volume that is not mounted, and was there at a start before."""
    if config.data.root is None or holds_something(Path(config.data.root)) or not folder.has_checkpoints():
        return False
    try:
        before = from_yaml(folder.config.read_text(errors="replace"), str(folder.config))
    except (OSError, RunError):
        return False
    return before.data.source == config.data.source != "digits" and before.data.root == config.data.root
