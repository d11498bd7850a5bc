"""Compute a digest of each kind of work that a run does, to compare models of CPU.

    python tests/kinds.py                           print the rows of the page
    python tests/kinds.py --check docs/receipts/kinds.md  compare them with the page

Further options: `--cpu Haswell` computes in qemu-x86_64, as that model; `--quick` leaves out what
takes long there. One process computes all kinds, because the imports take most of the time in qemu.
"""

import argparse
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from pipeline.addons.run import portable

if __name__ == "__main__":
    os.environ.update(portable.VARIABLES | {"OMP_NUM_THREADS": "1"})  # torch reads them when it is imported

import torch
from kinds_list import KINDS, NOT_IN_QEMU, SLOW
from torch import Tensor

from pipeline.operate.torch_settings import configure_torch

PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow", "simplejpeg")
EXTENSIONS = ("avx2", "fma3", "avx512_f", "avx512_bf16", "avx512_fp16", "amx_bf16")


def digest(tensors: Iterable[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        values = tensor.detach().contiguous().view(-1)
        total.update(values.view(torch.uint8).numpy().tobytes() if len(values) else b"")
    return total.hexdigest()[:16]


def software() -> str:
    """Return the row of the packages, and the C library, on which the bits may depend."""
    versions = [f"{package} {version(package).partition('+')[0]}" for package in PACKAGES]
    return f"| software | {', '.join([*versions, ' '.join(platform.libc_ver())])} |"


def this_machine() -> str:
    """Return the row of this machine, without the date."""
    found = torch.cpu.get_capabilities()
    extensions = " ".join(name for name in EXTENSIONS if found.get(name))
    caches = ", ".join(f"{found.get(name, 0) >> 10:,} KiB" for name in ("l1d_cache_size", "l2_cache_size"))
    if emulated := os.environ.get("QEMU_CPU"):  # its /proc is the host's
        text = subprocess.run(["qemu-x86_64", "--version"], capture_output=True, text=True, check=True).stdout
        name = f"{emulated}, emulated by qemu {re.findall(r'version ([0-9]+.[0-9]+)', text)[0]}"
    else:
        lines = Path("/proc/cpuinfo").read_text()
        model, family, number = (
            re.findall(rf"^{key}\s*: (.*)$", lines, re.MULTILINE)[0]
            for key in ("model name", "cpu family", "model")
        )
        name = f"{model} (family {family}, model {number})"
    return f"| {name} | {extensions} | {caches} | {torch.__version__} |"


def constants(page: Path) -> dict[str, str]:
    """Return the digest of each kind that the page has."""
    return dict(re.findall(r"^\| (.+) \| `([0-9a-f]{16})` \|$", page.read_text(), re.MULTILINE))


def compute(*, is_quick: bool) -> dict[str, str]:
    """Return the digest of each kind, as a portable run computes it."""
    portable.use_exact_roots()
    configure_torch(deterministic=True, precision="fp32", threads=1)
    left_out = (SLOW if is_quick else set()) | (NOT_IN_QEMU if "QEMU_CPU" in os.environ else set())
    found = {}
    for name in (name for name in KINDS if name not in left_out):
        found[name] = digest(KINDS[name]())
        print(f"| {name} | `{found[name]}` |", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", metavar="PAGE", type=Path)
    parser.add_argument("--quick", action="store_true", help="only kinds that take seconds in qemu")
    parser.add_argument("--cpu", metavar="MODEL", help="compute in qemu-x86_64, for example as Haswell")
    options = parser.parse_args()
    if options.cpu and "QEMU_CPU" not in os.environ:
        os.environ["QEMU_CPU"] = options.cpu
        os.execvp("qemu-x86_64", ["qemu-x86_64", sys.executable, *sys.argv])
    print(software())
    found, machine = compute(is_quick=options.quick), this_machine()
    if options.check:
        expected = constants(options.check)
        if wrong := [name for name, value in found.items() if expected.get(name) != value]:
            print(f"different from the page, on {machine}: {', '.join(wrong)}")
            return 1
        print(f"{len(found)} kinds have the bits of the page")
    print(machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
