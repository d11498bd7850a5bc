"""The tables of docs/receipts/kinds.md: the constants, and the machines on which they were seen."""

import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow", "simplejpeg")
_EXTENSIONS = ("avx2", "fma3", "avx512_f", "avx512_bf16", "avx512_fp16", "amx_bf16")
_CONSTANTS = "| kind | digest |\n| --- | --- |\n"
_MACHINES = "| CPU | vector extensions | caches L1d, L2 | torch | seen |\n| --- | --- | --- | --- | --- |\n"
_SOFTWARE = "| software | "


@dataclass(frozen=True)
class Machine:
    """A model of CPU, and what libraries choose their kernels by."""

    name: str
    extensions: str
    caches: str

    @property
    def row(self) -> str:
        """The machine's row of the table, without the date."""
        return f"| {self.name} | {self.extensions} | {self.caches} | {torch.__version__} |"


def this_machine(emulated: str = "") -> Machine:
    """Return this machine. emulated: the name of qemu's model: its /proc is the host's."""
    found = getattr(torch.cpu, "get_capabilities", dict)()  # {} in older versions of torch
    extensions = " ".join(name for name in _EXTENSIONS if found.get(name))
    caches = ", ".join(f"{found.get(name, 0) >> 10:,} KiB" for name in ("l1d_cache_size", "l2_cache_size"))
    if emulated:
        return Machine(f"{emulated}, emulated by qemu {_qemu_version()}", extensions, caches)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name, family, model = (
        next((line.partition(": ")[2] for line in lines if line.startswith(f"{key}\t")), "unknown")
        for key in ("model name", "cpu family", "model")
    )
    return Machine(f"{name} (family {family}, model {model})", extensions, caches)


def _qemu_version() -> str:
    text = subprocess.run(["qemu-x86_64", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"version (\d+\.\d+)", text)
    return found[1] if found else "of unknown version"


def software() -> str:
    """Return the packages on which the bits may depend, and the C library, with their versions."""
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {version(package).partition('+')[0]}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    return ", ".join([*versions, " ".join(platform.libc_ver())])


class Page:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = path.read_text(encoding="utf-8")

    @property
    def constants(self) -> dict[str, str]:
        """The digest of each kind."""
        return dict(re.findall(r"^\| (.+) \| `([0-9a-f]{16})` \|$", self._text, re.MULTILINE))

    @property
    def software(self) -> str:
        """The software of the constants."""
        found = re.search(rf"^{re.escape(_SOFTWARE)}(.+) \|$", self._text, re.MULTILINE)
        return found[1] if found else "none"

    def knows(self, machine: Machine) -> bool:
        """Return True if the machine is in the table, with this version of torch."""
        return f"\n{machine.row}" in self._text

    def add(self, machine: Machine) -> None:
        rows = [*self._rows(_MACHINES), f"{machine.row} {datetime.now(UTC).date()} |"]
        self.replace(_MACHINES, sorted(rows))

    def replace_constants(self, digests: dict[str, str]) -> None:
        """Write new constants, which no machine has been seen to compute yet."""
        rows = [f"| {name} | `{found}` |" for name, found in digests.items()]
        self.replace(_CONSTANTS, [f"{_SOFTWARE}{software()} |", *rows])
        self.replace(_MACHINES, [])

    def _rows(self, head: str) -> list[str]:
        """Return the rows of the table that begins with `head`."""
        return re.findall(r"\|.*\|", self._text.partition(head)[2].partition("\n\n")[0])

    def replace(self, head: str, rows: list[str]) -> None:
        """Replace the rows of the table that begins with `head`."""
        before, _, after = self._text.partition(head)
        self._text = f"{before}{head}{chr(10).join([*rows, ''])}" + re.sub(r"\A(\|.*\n)*", "", after)
        self._path.write_text(self._text, encoding="utf-8")
