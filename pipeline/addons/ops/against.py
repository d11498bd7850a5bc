"""`pipeline verify --against`: compare a run's weights with those of published receipts.

Promise: nothing is trained. Of the receipts in a folder, those with the run's configuration are
compared (what training follows from; not places, workers, tracking, the device, or where the run
ends). Equal weights are named, with the receipt that has them. Other weights are exit 0
if something known explains them, and the line says what: another torch or CPU, say. They are exit 1
only if nothing explains them: then the code computes something else.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pipeline import errors
from pipeline.addons.models.inputs import check_run_folder
from pipeline.addons.ops.compare import Run, changed_facts
from pipeline.config.load import training_keys
from pipeline.errors import RequestError, list_first, printable_line

# what explains other weights: first what certainly changes them
_CAUSES = (
    "torch", "torchvision", "glibc", "numpy", "pillow", "simplejpeg", "timm", "model_sha256", "cuda", "cudnn", "nccl",
    "driver", "python", "world", "portable", "threads", "device_type", "device",
)  # fmt: skip
_SAME, _EXPLAINED, _UNEXPLAINED = range(3)
_SHOWN_DIGITS = len("sha256:") + 16  # on a page


def against(run_dir: Path, folder: Path, page: Path | None = None) -> int:
    """Run `pipeline verify --against`; print one line, and return the exit code.

    folder: a run's folder, or a folder of such folders. page: a text, which the line names if it
    has the digest of the weights. Raises OSError.
    """
    text = page.read_text(encoding="utf-8") if page else ""
    run = Run.read(run_dir)
    check_run_folder(folder)
    keys = training_keys(run.config())
    published = list(_published(folder, run))
    if not published:
        raise RequestError(
            f"no receipt in {folder} can be read", "give a run's folder, or a folder of such folders"
        )
    changed, nearest = min(published, key=lambda found: len(found[0]))
    if changed:
        shown = list_first([f"{key}={keys.get(key)}" for key in changed], 3)
        line = f"no receipt in {folder} has this configuration ({shown}, unlike {nearest.folder.path})"
        print(printable_line(line), flush=True)
        return errors.OK
    results = [_compare(run, other) for different, other in published if not different]
    result, line = min(results, key=lambda found: found[0])
    if result == _SAME and line.rpartition(" ")[2][:_SHOWN_DIGITS] in text:
        line = re.sub(r"that .* names", f"that {page} names", line)
    print(printable_line(line), flush=True)
    return errors.CRASH if result == _UNEXPLAINED else errors.OK


def _published(folder: Path, run: Run) -> Iterator[tuple[list[str], Run]]:
    """Yield each other run in `folder`, or that folder's own, and the keys in which it differs."""
    is_run = (folder / "receipt.json").exists()
    here = training_keys(run.config())
    for path in [folder] if is_run else sorted(path.parent for path in folder.glob("*/receipt.json")):
        if path.resolve() == run.folder.path.resolve():
            continue
        try:
            other = Run.read(path)
            there = training_keys(other.config())
        except RequestError as error:
            print(f"skipped: {error}", file=sys.stderr, flush=True)
        else:
            yield [key for key in here | there if here.get(key) != there.get(key)], other


def _compare(run: Run, other: Run) -> tuple[int, str]:
    """Return how far the weights of both runs agree, and a line about it."""
    weights, stated = ({step: row["weights"] for step, row in found.rows.items()} for found in (run, other))
    place, common = other.folder.path, sorted(weights.keys() & stated.keys())
    if not common:
        return (
            _EXPLAINED,
            f"no step has an evaluation in {run.folder.path} and in {place}: nothing can be compared",
        )
    step = next((step for step in common if weights[step] != stated[step]), None)
    if step is not None:
        difference = f"differs: at step {step} weights is {weights[step]}, and {stated[step]} in {place}"
        if causes := list(_causes(run, other)):
            return _EXPLAINED, f"{difference}; this explains it: {', '.join(causes)}"
        return _UNEXPLAINED, f"{difference}; no known change explains it"
    step = common[-1]
    at = f" for step {step}" if step < max(weights | stated) else ""
    return _SAME, f"these are the weights that {place} names{at}: {weights[step]}"


def _causes(run: Run, other: Run) -> Iterator[str]:
    """Yield what explains other weights."""
    config = run.config()
    is_portable = all(
        (found.facts("portable"), found.facts("device_type")) == (["yes"], ["cpu"]) for found in (run, other)
    )
    free = {"world"} if config.run.exact else set()
    free |= {"device"} if is_portable else set()
    if run.receipt["data"] != other.receipt["data"]:
        yield "the data is another"
    yield from changed_facts(run, other, [name for name in _CAUSES if name not in free])
    if not (config.is_deterministic or is_portable):
        yield "run.deterministic is false"
