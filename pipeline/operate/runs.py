"""`pipeline runs`: list the runs in a folder from their files alone, without a server.

Promise: the list is read-only and quick: each journal is read once, and only its events are parsed.
A damaged file is a row that names it, and never hides the other runs. Names and values are shown
escaped and without passwords.
"""

import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline import errors
from pipeline.config.credentials import without_password
from pipeline.data.access import check_folder, printable_name
from pipeline.files import parse_json
from pipeline.record.folder import RunFolder
from pipeline.record.journal import read_events
from pipeline.record.receipt import rank

_HEADER = ("run", "step", "best top-1", "status", "recipe and changes")
_ADVICE = "give the folder of your runs, or start a run with 'pipeline train RECIPE'"
_STATUS = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}
"""Words for the status that the last event of a journal has, as on the run's page."""
_FAILURES = {errors.FAILURE, errors.FAILURE_OF_0_1}


@dataclass
class Run:
    """A run, as the files of its folder describe it. None is unknown."""

    path: str
    status: str = "not started"
    exit_code: int | None = None
    """Exit code of a start that failed permanently."""
    reason: str = ""
    """Why that start failed, or which file is damaged."""
    recipe: str | None = None
    changes: str = ""
    started: int | None = None
    """Time of the last start, in milliseconds since 1970."""
    step: int | None = None
    last_step: int | None = None
    top1: float | None = None
    top1_step: int | None = None
    mlflow: list[dict[str, str]] = field(default_factory=list)


def list_runs(root: Path) -> list[Run]:
    """Return the runs in `root` and its subfolders, the newest start first.

    Raises RequestError if `root` is not a folder that can be read, OutageError if its storage
    fails.
    """
    check_folder(root, printable_name(os.fsencode(root)), _ADVICE)
    runs = [_read_run(path, files) for path, files in _find(root)]
    return sorted(runs, key=lambda run: (-(run.started or 0), run.path))


def table(runs: list[Run], root: Path, width: int) -> str:
    """Return the runs in `root` as text: a line for each, and indented lines below it.

    Recipe and changes are below if they are too long for `width` columns in one of the runs.
    """
    if not runs:
        return f"no runs in {printable_name(os.fsencode(root))}: {_ADVICE}"
    rows = [_HEADER, *map(_cells, runs)]
    _, *columns, requests = (max(map(len, cells)) for cells in zip(*rows, strict=True))
    gaps = 2 * len(columns)
    room = max(len(_HEADER[0]), width - sum(columns) - gaps)
    name = max(len(row[0]) for row in rows if len(row[0]) <= room)  # a longer name has a line of its own
    is_beside = name + sum(columns) + gaps + 2 + requests <= width
    lines = []
    for row, run in zip(rows, [None, *runs], strict=True):
        if len(row[0]) > name:
            lines.append(row[0])
        padded = [cell.ljust(size) for cell, size in zip(row[1:-1], columns, strict=True)]
        first = (row[0] if len(row[0]) <= name else "").ljust(name)
        lines.append("  ".join([first, *padded, row[-1] if is_beside else ""]).rstrip())
        if run:
            below = ["" if is_beside else row[-1], run.reason if run.exit_code is None else ""]
            lines += [_wrap(text, width) for text in below if text]
            lines += [f"  {_shown(_link(entry))}" for entry in run.mlflow]
    return "\n".join(lines)


def _wrap(text: str, width: int) -> str:
    return textwrap.fill(_shown(text), width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _find(root: Path) -> Iterator[tuple[Path, set[str]]]:
    """Yield each run's folder in `root` and the names of its files. Follows no symbolic links."""
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as entries:
                inner = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries
                         if not entry.is_symlink() and (entry.is_dir() or entry.is_file())}  # fmt: skip
        except OSError as error:
            print(f"{printable_name(os.fsencode(folder))} cannot be read: {error.strerror}", file=sys.stderr)
            continue
        files = {name for name, is_folder in inner.items() if not is_folder}
        # a start makes the lock and checkpoints/ first, and the journal once it has built the model
        if "journal.jsonl" in files or ("lock" in files and inner.get("checkpoints")):
            yield folder, files
        else:
            folders += [folder / name for name, is_folder in inner.items() if is_folder]


def _read_run(path: Path, files: set[str]) -> Run:
    run, folder, problems = Run(str(path)), RunFolder(path), []
    is_held = folder.is_held()
    for file, add in ((folder.journal, _add_journal), (folder.plan, _add_plan), (folder.delivered, _add_mlflow)):
        try:
            if file.name in files:
                add(run, file)
        except OSError as error:
            problems.append(f"{file.name} cannot be read: {error.strerror}")
        except Exception as error:  # whatever is damaged: the other files and runs are shown
            problems.append(f"{file.name} is damaged: {error if isinstance(error, ValueError) else repr(error)}")
    if problems and problems[0].startswith(folder.journal.name):
        run.status = "damaged"
    run.reason = "; ".join(problems)
    # asked again, because a start may have taken the folder since
    if is_held or (run.status in ("killed", "not started") and folder.is_held()):
        run.status = "running"
    elif run.status != "finished" and files & _FAILURES and (failure := errors.load_failure(path)):
        run.status, run.exit_code, run.reason = "failed", failure.code, str(failure)
    elif run.status == "killed" and "lock" in files and not os.access(path / "lock", os.W_OK):
        run.status = "running or killed"  # only who can write the lock can see if it is held
    return run


def _add_journal(run: Run, path: Path) -> None:
    evaluated: dict[int, tuple[float, float, int]] = {}
    for row in read_events(path):
        event, step = row.get("event"), int(row.get("step", run.step or 0))
        run.step = step if "step" in row else run.step
        if event == "started":
            tags = row["tags"]
            run.started, run.recipe, run.changes = int(row["time"]), str(tags["recipe"]), str(tags.get("changes", ""))
            evaluated = {at: found for at, found in evaluated.items() if at <= step}  # the rest is trained again
        elif event == "evaluated" and not row.get("not_finite"):
            evaluated[step] = rank(row)
        if event not in (None, "created"):
            run.status = _STATUS.get(row.get("status", ""), "killed")
    if run.started is None and (run.step is not None or run.status != "not started"):
        raise ValueError("it has no start of a run")
    if not all(0 <= top1 <= 1 for top1, *_ in evaluated.values()):
        raise ValueError("a top-1 is not between 0 and 1")
    if evaluated:
        run.top1_step, (run.top1, *_) = max(evaluated.items(), key=lambda item: item[1])


def _add_plan(run: Run, path: Path) -> None:
    run.last_step = int(parse_json(path.read_text(encoding="utf-8"))["last_step"])


def _add_mlflow(run: Run, path: Path) -> None:
    for server, entry in parse_json(path.read_text(encoding="utf-8")).items():
        ids = {key: str(entry[key]) for key in ("experiment_id", "run_id")}
        run.mlflow.append({"server": without_password(server), **ids})


def _link(entry: dict[str, str]) -> str:
    """Return the address of a run on an MLflow server; of one in a database, its place there."""
    server, experiment, run = entry["server"], entry["experiment_id"], entry["run_id"]
    if server.startswith("http"):
        return f"{server.rstrip('/')}/#/experiments/{experiment}/runs/{run}"
    return f"{server.removeprefix('sqlite:///')}, run {run[:8]}"


def _cells(run: Run) -> tuple[str, ...]:
    """Return the cells of a run's line: see `_HEADER`."""
    step = "–" if run.step is None else f"{run.step}/{'?' if run.last_step is None else run.last_step}"
    top1 = "–" if run.top1 is None else f"{run.top1:.4f} at {run.top1_step}"
    status = run.status if run.exit_code is None else f"{run.status}: exit {run.exit_code}"
    request = f"{run.recipe or ''} {run.changes}".strip()
    return printable_name(os.fsencode(run.path)), step, top1, status, _shown(request)


def _shown(text: str) -> str:
    """Return a text from a file as one printable line, without passwords."""
    return printable_name(without_password(text))
