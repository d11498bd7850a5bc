"""`pipeline verify --against`: compare a run's weights with those of published receipts.

Promise: nothing is trained. Of the receipts in a folder, those with the run's configuration are
compared (what training follows from; not places, workers, tracking, the device, or where the run
ends). Equal weights are named, with the receipt or the page that has them. Other weights are exit 0
if something known explains them, and the line says what: another torch or CPU, say. They are exit 1
only if nothing explains them: then the code computes something else.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import errors
from pipeline.addons.models.inputs import check_run_folder
from pipeline.addons.ops.compare import Run
from pipeline.addons.ops.receipt import read_receipt
from pipeline.config.load import training_keys
from pipeline.config.schema import Config
from pipeline.errors import RequestError, one_line, printable_line
from pipeline.record.folder import RunFolder

_VERSIONS = (
    "torch", "torchvision", "glibc", "numpy", "pillow", "simplejpeg", "timm", "model_sha256", "cuda", "cudnn", "nccl",
    "driver", "python",
)  # fmt: skip
_SHOWN_DIGITS = len("sha256:") + 16
_SHOWN_KEYS = 3


def against(run_dir: Path, folder: Path, page: Path | None) -> int:
    """Run `pipeline verify --against`; print one line, and return the exit code.

    folder: a run's folder, or a folder of such folders. page: a text; the line names it, in place
    of the receipt's folder, if it has the digest of the weights.
    """
    check_run_folder(run_dir)
    check_run_folder(folder)
    run = Run(read_receipt(RunFolder(run_dir)), RunFolder(run_dir))
    config = run.config()
    published, distances = [], []
    for found in _receipts(folder, run_dir):
        try:
            other = Run(read_receipt(found), found)
            distances.append(_different_keys(config, other.config()))
            published.append(other)
        except RequestError as error:
            print(f"skipped: {error}", file=sys.stderr, flush=True)
    if not published:
        raise RequestError(f"no receipt in {folder} can be read", "see the lines above")
    changed = min(distances, key=len)
    nearest = published[distances.index(changed)].folder.path
    if changed:
        keys = training_keys(config)
        shown = ", ".join(f"{key}={keys.get(key)}" for key in changed[:_SHOWN_KEYS])
        more = f" and {len(changed) - _SHOWN_KEYS} more" if len(changed) > _SHOWN_KEYS else ""
        line = f"no receipt in {folder} has this configuration ({shown}{more}, unlike {nearest})"
        print(printable_line(line), flush=True)
        return errors.OK
    fitting = [receipt for receipt, keys in zip(published, distances, strict=True) if not keys]
    results = [_compare(run, receipt, config, page) for receipt in fitting]
    code, line = min(results, key=lambda result: result[0])
    print(printable_line(line), flush=True)
    return errors.OK if code < 2 else errors.CRASH


def _receipts(folder: Path, run_dir: Path) -> list[RunFolder]:
    """Return the folders with a receipt: `folder` itself, or those in it, without `run_dir`."""
    is_run = (folder / "receipt.json").exists()
    found = [folder] if is_run else sorted(path.parent for path in folder.glob("*/receipt.json"))
    others = [path for path in found if path.resolve() != run_dir.resolve()]
    if not others:
        other = " other than that of RUN_DIR" if found else ""
        raise RequestError(f"{folder} holds no receipt{other}", "give a run's folder, or a folder of such folders")
    return [RunFolder(path) for path in others]


def _different_keys(config: Config, other: Config) -> list[str]:
    here, there = training_keys(config), training_keys(other)
    return [key for key in here | there if here.get(key) != there.get(key)]


def _compare(run: Run, published: Run, config: Config, page: Path | None) -> tuple[int, str]:
    """Return a line about the weights of both runs, and how far they agree.

    That is 0 if the weights are the same, 1 if a difference is explained or nothing can be
    compared, 2 if nothing explains it.
    """
    weights = {row["step"]: row["weights"] for row in run.rows}
    stated = {row["step"]: row["weights"] for row in published.rows}
    place, common = published.folder.path, sorted(weights.keys() & stated.keys())
    if not common:
        return 1, f"no step has an evaluation both in {run.folder.path} and in {place}: nothing can be compared"
    step = next((step for step in common if weights[step] != stated[step]), None)
    if step is None:
        return 0, _identical(weights, stated, place, page)
    difference = f"differs: at step {step} weights is {weights[step]}, and {stated[step]} in {place}"
    causes = list(_causes(run.receipt, published.receipt, config))
    if not causes:
        return 2, f"{difference}; no known change explains it"
    return 1, f"{difference}; this explains it: {', '.join(causes)}"


def _identical(weights: dict[int, str], stated: dict[int, str], place: Path, page: Path | None) -> str:
    step = max(weights.keys() & stated.keys())
    if step < max(weights.keys() | stated.keys()):
        return f"these are the weights that {place} names for step {step}: {weights[step]}"
    try:
        is_on_page = page and weights[step][:_SHOWN_DIGITS] in page.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RequestError(
            f"{page} cannot be read: {error.strerror}", "give a text file, or leave --page out"
        ) from None
    return f"these are the weights that {page if is_on_page else place} names: {weights[step]}"


def _portable_change(here: list[str], there: list[str]) -> Iterator[str]:
    """Yield how the runs differ in that the model of CPU does not matter, with the reason."""
    now, then = (" or ".join(found).replace("unknown", "no reason is recorded") for found in (here, there))
    if (here == ["yes"]) == (there == ["yes"]):
        if here != there:
            yield f"neither run is portable ({now} here, {then} there)"
    elif there == ["yes"]:
        yield f"this run is not portable ({now}), the receipt's is"
    else:
        yield f"this run is portable, the receipt's is not ({then})"


def _causes(here: dict[str, Any], there: dict[str, Any], config: Config) -> Iterator[str]:
    """Yield what explains other weights: first what certainly changes them."""

    def values(receipt: dict[str, Any], name: str) -> list[str]:
        return sorted({one_line(start.get(name, "unknown"), 100) for start in receipt["starts"]})

    def changes(name: str, title: str) -> Iterator[str]:
        now, then = (" or ".join(values(receipt, name)) for receipt in (here, there))
        if now != then:
            yield f"{title} is {now} here and {then} there"

    for name in _VERSIONS:
        yield from changes(name, name)
    if not config.run.exact:
        yield from changes("world", "the number of processes")
    if here["data"] != there["data"]:
        yield f"the data is {str(here['data'])[:16]} here and {str(there['data'])[:16]} there"
    yield from _portable_change(values(here, "portable"), values(there, "portable"))
    yield from changes("threads", "the number of threads")
    yield from changes("device_type", "the kind of device")
    facts = [values(receipt, name) for receipt in (here, there) for name in ("portable", "device_type")]
    is_portable = facts == [["yes"], ["cpu"]] * 2
    if not is_portable:
        yield from changes("device", "the CPU or GPU")
    if not (config.is_deterministic or is_portable):
        yield "run.deterministic is false"
