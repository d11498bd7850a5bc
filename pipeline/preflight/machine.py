"""What a machine can do, tried out on it: `checks` look at the request, these at the ground that it stands on.

Each returns what it found, or raises a Verdict whose line ends in a remedy. They take a second or two each, some import
torch, and what one of them writes it removes again. None asks for a peer.
"""

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

from pipeline import machine
from pipeline.config.schema import Config
from pipeline.data.sources import Source
from pipeline.errors import RequestError, StorageError, TemporaryError
from pipeline.plan import Plan
from pipeline.preflight import request as checks
from pipeline.record.folder import RunFolder
from pipeline.record.sender import tracking_uri
from pipeline.world import World

_GIB = 2**30
_OF_PROCESS, _OF_WORKER = _GIB, _GIB // 4
"""Memory of a process with torch on a CPU, and of a loader worker beside what it shares: both measured, rounded up."""
_WRITTEN = 8 * 2**20
_SLOW_MIB_S = 5
_SAMPLES = 8
_EXCHANGED = 4 * 2**20
_DOCKER = "/var/run/docker.sock"
_LOCAL = ("ext4", "ext3", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "f2fs")


def cpus(here: World) -> str:
    """There is one for each process."""
    if here.cpus < here.local_size:
        raise RequestError(
            f"{here.local_size} processes share {here.cpus} CPUs: start fewer, or give the container more (its quota and"
            " affinity count, not the host's number)"
        )
    return f"{here.cpus} for {here.local_size} process{'es' * (here.local_size > 1)}"


def memory(plan: Plan) -> str:
    """It holds the processes, their workers and the batches in /dev/shm."""
    has = machine.available_memory()
    workers = plan.workers * plan.local_world
    wants = plan.local_world * _OF_PROCESS + workers * _OF_WORKER + plan.batches_ahead_bytes
    if has is not None and wants > has:
        raise RequestError(
            f"{plan.local_world} processes and {workers} loader workers want about {wants / _GIB:.1f} GiB, and there are"
            f" {has / _GIB:.1f}: give the container more, or set data.workers, data.prefetch or evaluate.batch lower"
        )
    return f"about {wants / _GIB:.1f} GiB of {has / _GIB:.1f}" if has is not None else f"about {wants / _GIB:.1f} GiB"


def shared_memory(plan: Plan, here: World) -> str:
    """It is there for the workers' batches; that it is too small is the plan's to say."""
    if plan.workers and here.shared_memory is None:
        raise RequestError(
            "/dev/shm is not there, and loader workers hand their batches over in it: mount a tmpfs on it (docker:"
            " --shm-size, Kubernetes: an emptyDir with medium: Memory), or set data.workers=0"
        )
    there = "none is there" if here.shared_memory is None else f"of {here.shared_memory / 2**20:,.0f}"
    return f"{plan.batches_ahead_bytes / 2**20:,.1f} MiB {there}"


def writing(folder: RunFolder) -> str:
    """The disk below run.dir takes what is written and synced, and not too slowly."""
    place = folder.place()
    probe = place / f".doctor-{uuid.uuid4().hex}"
    start = time.perf_counter()
    try:
        with open(probe, "wb") as file:
            file.write(os.urandom(_WRITTEN))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(
            f"{place} does not take 8 MiB ({error.strerror}): make room, or give another run.dir"
        ) from None
    finally:
        probe.unlink(missing_ok=True)
    rate = _WRITTEN / 2**20 / (time.perf_counter() - start)
    if rate < _SLOW_MIB_S:
        raise TemporaryError(
            f"{place} takes {rate:.1f} MiB/s with its sync: a save waits for the one before it; use a faster disk, or raise"
            " checkpoint.every"
        )
    return f"{place} takes {rate:,.0f} MiB/s, synced"


def sharing(folder: RunFolder, here: World) -> str:
    """Where a job has several machines: run.dir is on something that they may all see."""
    if here.size == here.local_size:
        return "one machine: nobody else has to see run.dir"
    place = folder.place()
    kind = _file_system(place)
    if kind in _LOCAL:
        raise TemporaryError(
            f"run.dir is on {kind} at {place}, which is of this machine alone: rank 0 may come back on another one and find"
            " no checkpoint; put it on a volume that all nodes mount (NFS, ReadWriteMany), unless all are on one machine"
        )
    return f"{place} is on {kind}"


def room(config: Config, plan: Plan, folder: RunFolder) -> str:
    """The disk holds the checkpoints that are kept, and the one being written."""
    from pipeline.model.architectures import count_parameters

    copies = 1 + config.optimizer.moments + (config.train.ema is not None)
    each = 4 * copies * count_parameters(config.model, plan.num_classes)
    there = sum(path.stat().st_size for path in folder.checkpoints.glob("step-*.pt"))
    wants = (config.checkpoint.keep + 2) * each - there  # the best, and one being written
    free = shutil.disk_usage(folder.place()).free
    if wants > free:
        raise StorageError(
            f"{config.checkpoint.keep} checkpoints, the best and one being written want {wants / _GIB:.2f} GiB more, and"
            f" {free / _GIB:.2f} GiB are free: make room, give another run.dir, or lower checkpoint.keep"
        )
    return f"{max(0, wants) / _GIB:.2f} GiB for checkpoints of {free / _GIB:,.0f} GiB free"


def decoding(source: Source) -> str:
    """A few images from all over the data become pixels."""
    from pipeline.data.access import UnreadableError
    from pipeline.data.images import BadImageError, decode

    bad, start = {}, time.perf_counter()
    for images in (source.train, source.val):
        for at in range(min(_SAMPLES, len(images))):
            sample = at * len(images) // min(_SAMPLES, len(images))
            try:
                decode(images.read(sample))
            except (BadImageError, UnreadableError) as defect:
                bad[images.name(sample)] = str(defect)
    if bad:
        name, why = next(iter(bad.items()))
        raise StorageError(
            f"{len(bad)} of {2 * _SAMPLES} images tried cannot be decoded, {name} first ({why}): 'pipeline data check'"
            " names them all"
        )
    return f"{_SAMPLES} images of each split, {1000 * (time.perf_counter() - start) / 2 / _SAMPLES:.1f} ms each"


def exchange(config: Config, here: World) -> str:
    """Processes on this machine add up numbers together: over NCCL where they have GPUs, else over gloo."""
    if here.local_size == 1:
        return "one process here: nothing to exchange"
    import torch
    from torch.multiprocessing.spawn import spawn

    nccl = config.run.device != "cpu" and torch.cuda.is_available()
    count = here.local_size if nccl else 2
    rendezvous = Path(f"/tmp/.doctor-{uuid.uuid4().hex}")
    try:
        spawn(_add_up, (count, str(rendezvous), nccl), nprocs=count)  # type: ignore[no-untyped-call]
        seconds = float(rendezvous.with_suffix(".seconds").read_text())
    except Exception as error:
        last = str(error).strip().splitlines()[-1]
        raise TemporaryError(
            f"{count} processes could not add up over {'NCCL' if nccl else 'gloo'} ({last}): look at the driver, at"
            " NCCL_DEBUG=INFO, at the loopback interface"
        ) from None
    finally:
        rendezvous.unlink(missing_ok=True)
        rendezvous.with_suffix(".seconds").unlink(missing_ok=True)
    rate = 4 * _EXCHANGED / seconds / 1e9
    return f"{count} processes add up at {rate:.1f} GB/s over {'NCCL' if nccl else 'gloo'}"


def _add_up(rank: int, count: int, rendezvous: str, nccl: bool) -> None:
    import torch
    from torch import distributed as dist

    device = torch.device("cuda", rank) if nccl else torch.device("cpu")
    dist.init_process_group("nccl" if nccl else "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=count)
    numbers = torch.ones(_EXCHANGED, device=device)
    dist.all_reduce(numbers)  # makes the connections
    start = time.perf_counter()
    dist.all_reduce(numbers)
    if float(numbers[0]) != count * count:
        raise ValueError(f"the sum is {float(numbers[0])}, not {count * count}")
    if rank == 0:
        Path(rendezvous).with_suffix(".seconds").write_text(str(time.perf_counter() - start))
    dist.destroy_process_group()


def artifacts(config: Config, folder: RunFolder) -> str:
    """MLflow's server keeps a file and gives it back."""
    uri = tracking_uri(config, folder) or "none"
    if not uri.startswith("http"):
        return "no server to ask"
    content = uuid.uuid4().bytes
    path = f"api/2.0/mlflow-artifacts/artifacts/doctor/{content.hex()}"
    try:
        for method, body in (("PUT", content), ("GET", None), ("DELETE", None)):
            with checks.open_tracker(uri, path, method, body) as answer:
                given = answer.read()
            if method == "GET" and given != content:
                raise TemporaryError(
                    f"MLflow gave back {len(given)} bytes that are not the file it was sent: look at a proxy in between"
                )
    except urllib.error.HTTPError as error:
        if error.code in (404, 503):
            return "the server keeps no files itself (--no-serve-artifacts): the trainer writes to its store directly"
        raise TemporaryError(
            f"MLflow answers {error.code} to a file: look at its --artifacts-destination, can the server write there?"
        ) from None
    except OSError as error:
        raise TemporaryError(f"MLflow does not take a file ({error}): look at the server's log") from None
    return "a file goes to the server and comes back"


def containers() -> str:
    """Docker and compose answer, where an engine is meant to run."""
    if shutil.which("docker") is None or not ("DOCKER_HOST" in os.environ or _is_served(_DOCKER)):
        return "no engine here: only `docker compose` and `pipeline rehearse` want one"
    engine = _said(["docker", "version", "--format", "{{.Server.Version}}"])
    if engine is None:
        raise TemporaryError("Docker's engine does not answer: start it, or join the group docker")
    compose = _said(["docker", "compose", "version", "--short"])
    if compose is None:
        raise TemporaryError(f"Docker {engine} has no compose: install the plugin Compose v2")
    return f"Docker {engine}, Compose {compose}"


def _is_served(address: str) -> bool:
    """Whether somebody listens on that socket, be it to refuse us."""
    with socket.socket(socket.AF_UNIX) as line:
        try:
            line.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            return True
    return True


def _said(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _file_system(place: Path) -> str:
    """Its type, of the mount that holds `place`."""
    found, deepest = "unknown", -1
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, rest = line.partition(" - ")
        point = Path(mount.split()[4].encode().decode("unicode_escape"))
        if place.resolve().is_relative_to(point) and len(point.parts) >= deepest:
            found, deepest = rest.split()[0], len(point.parts)
    return found
