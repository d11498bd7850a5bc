"""The provenance of a run: commit, image, packages, machine. No run depends on these facts.

They are the tags of a run: the journal records them at each start.
"""

import getpass
import importlib
import os
import platform
import subprocess
import sys
from contextlib import suppress
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pipeline import __version__
from pipeline.config.schema import Config
from pipeline.config.sections import Model
from pipeline.device import driver_version
from pipeline.record.folder import RunFolder
from pipeline.record.journal import run_id
from pipeline.train.job import Job


def facts(job: Job, resumed_from: Path | None, device: torch.device) -> dict[str, Any]:
    """Return the tags of a run: what it is made of, on which machine."""
    config, plan = job.config, job.plan
    known = {"recipe": config.recipe}
    if config.changes:
        known["changes"] = config.changes
    if resumed_from and not job.folder.contains(resumed_from):  # continues another run
        other = RunFolder(resumed_from.parent.parent)
        if resumed_from.parent == other.checkpoints and (origin := run_id(other.journal)):
            known["continues"] = origin
    return {
        **known,
        "world": plan.world,
        "processes_a_node": plan.local_world,
        "threads": plan.threads,
        **({"portable": "yes" if plan.is_portable else plan.portable_reason} if plan.portable_reason else {}),
        "epochs": config.train.epochs,
        "data": job.source.digest,
        **provenance(config, device),
    }


def provenance(config: Config, device: torch.device) -> dict[str, str]:
    """Return the facts that are known, by the names that MLflow's UI uses where it has one."""
    facts = {
        "mlflow.source.name": f"pipeline train {config.recipe}",
        "mlflow.source.type": "LOCAL",
        "mlflow.user": _user(),
        # the build arguments of the image, which are `unknown` if they were not given
        "mlflow.source.git.commit": os.environ.get("PIPELINE_COMMIT", "").replace("unknown", "") or _commit(),
        "mlflow.docker.image.uri": os.environ.get("PIPELINE_IMAGE", "").replace("unknown", ""),
        "mlflow.docker.image.id": os.environ.get("PIPELINE_IMAGE_ID", "").replace("unknown", ""),
        "code": os.environ.get("PIPELINE_CODE", ""),  # of `k8s render --code`, in place of the image's
        "version": __version__,
        "python": platform.python_version(),
        "glibc": platform.libc_ver()[1],
        "torch": torch.__version__,
        **{name: metadata.version(name) for name in ("torchvision", "numpy", "pillow")},
        **{name: getattr(sys.modules.get(name), "__version__", None) for name in ("simplejpeg", "timm")},
        **_module_of(config.model),
        "device_type": device.type,
        "device": _cpu_model(),
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["driver"], facts["cuda"] = driver_version(), torch.version.cuda
        facts["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {name: value for name, value in facts.items() if value}


def _module_of(options: Model) -> dict[str, str]:
    module = importlib.import_module(options.arch.partition(":")[0]) if options.is_function else None
    file = getattr(module, "__file__", None)
    if file is None:
        return {}
    return {"model_file": os.path.basename(file), "model_sha256": sha256(Path(file).read_bytes()).hexdigest()}


def _user() -> str:
    with suppress(OSError, KeyError):
        return getpass.getuser()
    return f"uid {os.getuid()}"  # a user id without a name, as in a container


def _commit() -> str | None:
    """Return the commit of this package's checkout, with `-dirty` if the package was changed.

    None: it is in no repository, or in one that does not track it (an environment inside another
    project, say).
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[2]), *words]
        output = subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=5)
        return output.decode(errors="replace").strip()

    with suppress(OSError, subprocess.SubprocessError):
        git("ls-files", "--error-unmatch", "__init__.py")
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--", ".") else "")
    return None


def _cpu_model() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.machine()
