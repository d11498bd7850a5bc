"""Checks of this machine: CPUs, memory, disk, image decoding, all-reduce.

Each returns a line for the user, or raises a RunError whose message ends with what to do. A check
takes a second or two, and leaves no file. None communicates with ranks on other machines.
"""

import os
import shutil
import subprocess
import tempfile
import time

from pipeline import machine
from pipeline.config.schema import Config
from pipeline.data.interface import Source
from pipeline.errors import RequestError, StorageError, TemporaryError, summary
from pipeline.operate.request import nearest_existing
from pipeline.plan import Plan
from pipeline.record.folder import RunFolder
from pipeline.world import World

_GIB = 2**30
_PROCESS_BYTES, _WORKER_BYTES = _GIB, _GIB // 4
"""Memory of a CPU process with torch, and of a loader worker without its batches (measured)."""
_SAMPLES = 8
_LOCAL_FILE_SYSTEMS = ("ext2/ext3", "xfs", "btrfs", "zfs", "overlayfs", "tmpfs", "f2fs")
"""As stat(1) names them; ext4 has the name of its predecessors."""


def check_cpu_per_process(here: World) -> str:
    """Check that there is at least one CPU for each process."""
    if here.cpus < here.local_size:
        remedy = "start fewer, or give the container more (its quota and affinity count)"
        raise RequestError(f"{here.local_size} processes share {here.cpus} CPUs", remedy)
    return f"{here.cpus} available, {here.local_size} needed"


def check_memory(plan: Plan, *, on_gpu: bool) -> str:
    """Check that memory is enough for the processes, their workers and their batches."""
    workers = plan.workers * plan.local_world
    batches = plan.prefetch_bytes
    if on_gpu:
        pixels = plan.micro_batch * plan.image_size**2, plan.eval_batch * plan.eval_size**2
        # pinned: one in use, one ahead, one being copied; torch rounds each up to a power of two
        batches += 3 * plan.local_world * sum(1 << (3 * size - 1).bit_length() for size in pixels)
    needed = (plan.local_world * _PROCESS_BYTES + workers * _WORKER_BYTES + batches) / _GIB
    available = machine.available_memory() / _GIB
    if needed > available:
        problem = f"{plan.local_world} processes and {workers} loader workers need about {needed:.1f} GiB"
        remedy = "give the container more, or lower data.workers, data.prefetch or evaluate.batch"
        raise RequestError(f"{problem}, but only {available:.1f} GiB are available", remedy)
    return f"about {needed:.1f} of {available:.1f} GiB needed"


def check_run_folder_is_shared(config: Config, folder: RunFolder, here: World) -> str:
    """Check that run.dir is on a file system that all machines of the job can mount.

    It need not be if checkpoint.mirror has the checkpoints for a start on another machine.
    """
    if here.size == here.local_size or config.checkpoint.mirror:
        return "run.dir need not be shared: there is one machine, or checkpoint.mirror"
    place = nearest_existing(folder.path)
    command = ["stat", "--file-system", "--format=%T", str(place)]
    kind = subprocess.run(command, capture_output=True, encoding="utf-8", check=False).stdout.strip()
    if kind in _LOCAL_FILE_SYSTEMS:
        problem = f"run.dir is on {kind} at {place}, which only this machine can see"
        remedy = "use a volume that all nodes mount (NFS, ReadWriteMany), or set checkpoint.mirror"
        raise TemporaryError(f"{problem}: rank 0 on another machine would find no checkpoint", remedy)
    return f"{place} is on {kind or 'an unknown file system'}"


def check_disk_space(config: Config, plan: Plan, folder: RunFolder) -> str:
    """Check that the disk holds the checkpoints to keep, the best one and the one being written."""
    from pipeline.addons.models.functions import meta_model

    copies = 1 + config.optimizer.moments + (1 if config.train.ema is not None else 0)
    model = meta_model(config.model, plan.num_classes)
    checkpoint_bytes = 4 * copies * sum(parameter.numel() for parameter in model.parameters())
    present = sum(path.stat().st_size for path in folder.checkpoints.glob("step-*.pt"))
    keep = config.checkpoint.keep
    needed = max(0, (keep + 2) * checkpoint_bytes - present) / _GIB
    free = shutil.disk_usage(nearest_existing(folder.path)).free / _GIB
    if needed > free:
        problem = f"{keep} checkpoints, the best and one being written need {needed:.2f} GiB more"
        remedy = "make room, give another run.dir, or lower checkpoint.keep"
        raise StorageError(f"{problem}, but only {free:.2f} GiB are free", remedy)
    return f"{needed:.2f} GiB needed for checkpoints, {free:,.0f} GiB free"


def check_images_decode(config: Config, source: Source, plan: Plan, here: World) -> str:
    """Check that a few images from all parts of each split can be decoded, and how fast."""
    from pipeline.addons.datasets.images import jpeg_decoder
    from pipeline.data.augment import SampleKey, augment
    from pipeline.data.interface import UnreadableError

    for images in (source.val, source.train):
        count = min(_SAMPLES, len(images))
        samples = [i * len(images) // count for i in range(count)]
        for sample in samples:
            try:
                picture = images.open(sample)
                picture.region(0, 0, picture.height, picture.width)
            except UnreadableError as error:
                problem = f"{images.name(sample)} cannot be decoded ({error})"
                raise StorageError(problem, "list all such images with 'pipeline data check'") from None
    start = time.process_time()
    for sample in samples:  # which were read and decoded once before
        key = SampleKey(0, sample, 0)
        augment(images.open(sample), config.augment, plan.image_size, config.run.seed, key)
    rate = here.cpus * len(samples) / (time.process_time() - start)
    speed = f"{here.cpus} CPUs make about {float(f'{rate:.2g}'):,.0f} training images/s"
    return f"{_SAMPLES} images of each split, JPEG by {jpeg_decoder()}; {speed}"


def check_all_reduce(config: Config, here: World) -> str:
    """Check that processes here can all-reduce, over NCCL if they have GPUs, otherwise gloo."""
    if here.local_size == 1:
        return "one process: not needed"
    import torch
    from torch.multiprocessing.spawn import spawn

    has_gpus = config.run.device != "cpu" and torch.cuda.is_available()
    backend, count = ("nccl", here.local_size) if has_gpus else ("gloo", 2)
    if has_gpus and torch.cuda.device_count() < count:
        return "not tried: this process sees only its own GPU"
    try:
        with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
            words = (count, f"file://{folder}/rendezvous", backend)
            spawn(_all_reduce, words, nprocs=count)  # type: ignore[no-untyped-call]
    except Exception as error:
        problem = f"all-reduce of {count} processes failed over {backend} ({summary(str(error), 300)})"
        remedy = "look at the driver, at NCCL_DEBUG=INFO and at the loopback interface"
        raise TemporaryError(problem, remedy) from None
    return f"{count} processes over {backend}"


def _all_reduce(rank: int, count: int, rendezvous: str, backend: str) -> None:
    import torch
    from torch import distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=count)
    tensor = torch.ones(1, device=f"cuda:{rank}" if backend == "nccl" else "cpu")
    dist.all_reduce(tensor)
    assert float(tensor) == count
    dist.destroy_process_group()
