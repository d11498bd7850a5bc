"""Compute a digest of each kind of work that a run does, to compare models of CPU.

    python tests/kinds.py                           print all digests
    python tests/kinds.py --check docs/receipts/kinds.md  compare them with the page
    python tests/kinds.py --write docs/receipts/kinds.md  and add this machine to it, if it is new
    python tests/kinds.py --first Muon              print each operation, to diff two machines

Further options: `--cpu Haswell` computes in qemu-x86_64, as that model; `--quick` leaves out what
takes long there; `--new` has `--write` replace the constants. One process computes all kinds,
because the imports take most of the time in qemu.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipeline import portable

if __name__ == "__main__":
    os.environ.update(portable.VARIABLES | {"OMP_NUM_THREADS": "1"})  # torch reads them when it is imported

import torch
from kinds_list import KINDS
from kinds_page import Machine, Page, this_machine
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.randomness import configure_torch


def digest(tensors: Iterable[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        values = tensor.detach().contiguous().view(-1)
        total.update(values.view(torch.uint8).numpy().tobytes() if len(values) else b"")
    return total.hexdigest()[:16]


def prepare() -> None:
    """Set torch up as a portable run does."""
    portable.use_exact_roots()
    configure_torch(deterministic=True, precision="fp32", threads=1)


def digests(*, is_quick: bool, in_qemu: bool) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each kind."""
    prepare()
    for name, kind in KINDS.items():
        if (kind.is_quick or not is_quick) and (kind.runs_in_qemu or not in_qemu):
            yield name, digest(kind.make())


class _Trace(TorchDispatchMode):
    """Prints each operation with the digest of its results, also those of backward passes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [
            value
            for value in (result if isinstance(result, tuple) else [result])
            if isinstance(value, Tensor)
        ]
        if "empty" not in str(func):  # not set yet
            print(func, [tuple(tensor.shape) for tensor in found], digest(found), flush=True)
        return result


def emulate(model: str, *, is_quick: bool) -> tuple[dict[str, str], Machine]:
    """Return the digests that this script computes in qemu, and the emulated machine."""
    command = ["qemu-x86_64", "-cpu", model, sys.executable, __file__, "--emulated", model]
    lines = []
    with subprocess.Popen([*command, *["--quick"] * is_quick], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    if process.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    machine, *rows = lines
    return {name: found for found, _, name in (row.partition("  ") for row in rows)}, Machine(
        *machine.split("; ")
    )


def differing(found: dict[str, str], page: Page) -> list[str]:
    """Return the names of the kinds whose digest is not that of the page."""
    return [name for name, value in found.items() if page.constants.get(name) != value]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", metavar="PAGE", type=Path)
    parser.add_argument("--write", metavar="PAGE", type=Path)
    parser.add_argument("--new", action="store_true", help="replace the page's constants")
    parser.add_argument("--quick", action="store_true", help="only kinds that take seconds in qemu")
    parser.add_argument("--cpu", metavar="MODEL", help="compute in qemu-x86_64, for example as Haswell")
    parser.add_argument("--first", metavar="KIND", choices=KINDS, help="print each operation")
    parser.add_argument("--emulated", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first:
        prepare()
        with _Trace():
            list(KINDS[options.first].make())
        return 0
    if options.cpu:
        found, machine = emulate(options.cpu, is_quick=options.quick)
    else:
        machine, found = this_machine(options.emulated), {}
        if options.emulated:
            print("; ".join((machine.name, machine.extensions, machine.caches)), flush=True)
        for name, value in digests(is_quick=options.quick, in_qemu=bool(options.emulated)):
            found[name] = value
            print(f"{value}  {name}", flush=True)
    return compare(found, machine, options) if options.check or options.write else 0


def compare(found: dict[str, str], machine: Machine, options: argparse.Namespace) -> int:
    """Compare digests with the page, and write it if that was asked. Return the exit code."""
    page = Page(options.check or options.write)
    if options.write and options.new:
        page.replace_constants(found)
    if wrong := differing(found, page):
        print(f"different from {page.software}, on {machine.name}: {', '.join(wrong)}")
        return 1
    print(f"{len(found)} kinds have the bits of the page on {machine.name}")
    if options.write and not options.quick and not page.knows(machine):
        page.add(machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
