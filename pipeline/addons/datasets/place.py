"""Opening the data of a run: it is where it was, the run's folder is not in it, its classes fit."""

import os
import unicodedata
from pathlib import Path

from pipeline.addons.datasets.file_errors import is_non_empty_folder
from pipeline.addons.datasets.index import Index
from pipeline.addons.datasets.manifest import find_cached_index
from pipeline.addons.datasets.names import printable_name
from pipeline.addons.datasets.sources import data_root, open_source
from pipeline.addons.models import class_weights
from pipeline.config.schema import Config
from pipeline.data.interface import Source
from pipeline.errors import RequestError, TemporaryError
from pipeline.operate.request import previous_config
from pipeline.record.folder import RunFolder
from pipeline.record.journal import last_event


def open_data(config: Config, folder: RunFolder) -> Source:
    """Open the data and return it; make the digits if they are missing.

    Raises TemporaryError if data.root or a folder of images in it is missing, or empty like a
    volume that is not mounted, but an earlier start of this run had it; OutageError, a
    TemporaryError, if a bucket does not answer.
    """
    has_journal = os.path.exists(folder.journal)  # a path may be too long to look up
    start = last_event(folder.journal, "started") if has_journal else {}
    was_started = bool(start) or folder.has_checkpoints()
    if was_started:
        _check_is_there(config, previous_config(folder), start.get("tags", {}).get("data"))
    source = open_source(config, check_sizes=was_started)
    _check_run_is_outside(config, source)
    class_weights.check(config, source)
    return source


def _check_run_is_outside(config: Config, source: Source) -> None:
    """Raise RequestError if run.dir is among the images: a scan would take it for a class."""
    if source.index and source.index.folders and not source.index.table:
        root = data_root(config)
        folders = [root / name for name in source.index.folders]
        folders += [] if "train" in source.index.folders else [root]  # class folders
        place = Path(os.path.realpath(config.run_dir))
        if {Path(os.path.realpath(path)) for path in folders} & {place, *place.parents}:
            problem = f"run.dir={config.run_dir} is among the images of data.root={root}"
            raise RequestError(problem, "give a folder outside of them")


def _check_is_there(config: Config, before: Config | None, digest: str | None) -> None:
    """Raise TemporaryError if data or a folder of it is away. before, digest: of the last start."""
    root = config.data.root or (str(data_root(config)) if config.data.source == "table" else None)
    keys = {"source", "root", "table"}
    is_same = before and before.data.model_dump(include=keys) == config.data.model_dump(include=keys)
    if root is None or config.is_in_store or not is_same or config.data.source == "digits":
        return
    lost, remedy = "", "restore it, or give its new location with data.root=FOLDER"
    if is_non_empty_folder(Path(root)):
        index = find_cached_index(Path(root), config.run_dir / "index", digest) if digest else None
        missing = _missing_folder(index, Path(root)) if index and config.run.resume != "never" else None
        if not missing:
            return
        lost = f": {printable_name(os.fsencode(missing))}/"
        remedy = f"restore it, give its new location with data.root=FOLDER, or {config.start_again}"
    problem = f"data.root={root}{lost} is missing or empty, and the run in {config.run_dir} was trained on it"
    raise TemporaryError(problem, remedy)


def _missing_folder(index: Index, root: Path) -> str | None:
    """Return a folder with images of the index that is missing or empty now, or None."""
    for folder in index.folders:
        # another system may have written the index, and spell the folder in another of these forms
        spellings = {folder, *(unicodedata.normalize(form, folder) for form in ("NFC", "NFD"))}
        if any(is_non_empty_folder(root / spelling) for spelling in spellings):
            continue
        if any(name.startswith(os.fsencode(folder) + b"/") for name in index.names()):
            return folder
    return None
