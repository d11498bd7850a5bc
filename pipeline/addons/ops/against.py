"""`pipeline verify --against`: compare a run's weights with those of published receipts.

Promise: nothing is trained. Of the receipts in a folder, those with the run's configuration are
compared (what training follows from; not places, workers, tracking, the device, or where the run
ends). Equal weights are named, with the receipt that has them. Other weights are exit 0
if something known explains them, and the line says what: another torch or CPU, say. They are exit 1
only if nothing explains them: then the code computes something else.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from pipeline import errors
from pipeline.addons.models.inputs import check_run_folder
from pipeline.addons.ops.compare import CAUSES, changed_facts
from pipeline.addons.ops.fixed_keys import training_keys
from pipeline.addons.ops.run import Run
from pipeline.errors import RequestError, list_first, printable_line

_SAME, _EXPLAINED, _UNEXPLAINED = range(3)
_SHOWN_DIGITS = len("sha256:") + 16  # on a page


def against(run_dir: Path, folder: Path, page: Path | None = None) -> int:
    """Run `pipeline verify --against`; print one line, and return the exit code.

    folder: a run's folder, or a folder of such folders. page: a text, which the line names if it
    has the digest of the weights. Raises OSError.
    """
    run = Run.read(run_dir)
    check_run_folder(folder)
    published = list(_published(folder, run))
    if not published:
        problem = f"no receipt in {folder} can be read"
        raise RequestError(problem, "give a run's folder, or a folder of such folders")
    changed, nearest = min(published, key=lambda found: len(found[0]))
    if changed:
        unlike = f"unlike {nearest.folder.path} in {list_first(changed, 3)}"
        result, line = _EXPLAINED, f"no receipt in {folder} has this configuration ({unlike})"
    else:
        result, line = min(_compare(run, other, page) for changed, other in published if not changed)
    print(printable_line(line), flush=True)
    return errors.CRASH if result == _UNEXPLAINED else errors.OK


def _published(folder: Path, run: Run) -> Iterator[tuple[list[str], Run]]:
    """Yield each other run in `folder`, or that folder's own, and the keys in which it differs."""
    here = training_keys(run.config())
    own = folder / "receipt.json"
    for path in [own] if own.exists() else sorted(folder.glob("*/receipt.json")):
        if path.resolve() == run.folder.receipt.resolve():
            continue
        try:
            other = Run.read(path.parent)
            there = training_keys(other.config())
        except RequestError as error:
            print(f"skipped: {error}", file=sys.stderr, flush=True)
        else:
            yield [key for key in here | there if here.get(key) != there.get(key)], other


def _compare(run: Run, other: Run, page: Path | None) -> tuple[int, str]:
    """Return how far the weights of both runs agree, and a line about it."""
    weights, stated = ({step: row["weights"] for step, row in found.rows.items()} for found in (run, other))
    place, common = other.folder.path, [step for step in weights if step in stated]
    if not common:
        nothing = "nothing can be compared"
        return _EXPLAINED, f"no step has an evaluation in {run.folder.path} and in {place}: {nothing}"
    step = next((step for step in common if weights[step] != stated[step]), None)
    if step is None:
        digest = weights[common[-1]]
        if page and digest[:_SHOWN_DIGITS] in page.read_text(encoding="utf-8"):
            place = page
        at = f" for step {common[-1]}" if common[-1] < max(weights | stated) else ""
        return _SAME, f"these are the weights that {place} names{at}: {digest}"
    difference = f"differs: at step {step} weights is {weights[step]}, and {stated[step]} in {place}"
    if causes := ", ".join(_causes(run, other)):
        return _EXPLAINED, f"{difference}; this explains it: {causes}"
    return _UNEXPLAINED, f"{difference}; no known change explains it"


def _causes(run: Run, other: Run) -> Iterator[str]:
    machines = {(found.facts("portable"), found.facts("device_type")) for found in (run, other)}
    is_portable = machines == {("yes", "cpu")}
    free = {"world"} if run.config().run.exact else set()
    free |= {"device"} if is_portable else set()
    if run.receipt["data"] != other.receipt["data"]:
        yield "the data is another"
    yield from changed_facts(run, other, [name for name in CAUSES if name not in free])
    if not (run.config().is_deterministic or is_portable):
        yield "run.deterministic is false"
