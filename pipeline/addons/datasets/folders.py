"""Image folders: what is wrong with their layout, what changed in them, and what to evaluate on.

`manifest` scans them.
"""

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pipeline.addons.datasets.manifest import Walk
from pipeline.data.holdout import HoldOut
from pipeline.data.index import Index, Split, describe_ignored
from pipeline.data.names import EXTENSIONS, class_of, escaped_name, is_image, normal_path, printable_name
from pipeline.errors import RequestError, list_first

_SPLIT_NAME = re.compile(
    r"(?:(?P<train>train|training|trn)|(?P<val>val|valid|validation|validate|eval|evaluation|dev|hold[\W_]*out)|"
    r"(?P<test>tests?|testing|tst)|(?P<other>images?|imgs?|jpegimages|labels?|annotations?|masks?|unlabell?ed))"
    r"(?:[\W_]*(?:sets?|data|datasets?|split|images?|imgs?|\d+))*",
    re.IGNORECASE,
)  # fmt: skip
_EACH = "with one folder per class"
_MAKE = {
    "imagenet": "import imagenet ARCHIVES", "imagenette": "get imagenette", "cifar10": "get cifar10",
}  # fmt: skip
"""Command that makes a folder of this name."""


def how_to_make(root: Path) -> str:
    """Return ", or make one with …", a command that suits the folder's name."""
    return f", or make one with 'pipeline data {_MAKE.get(root.name, 'make synthetic')} {shlex.quote(str(root))}'"


def check_layout(root: Path, found: dict[str, dict[str, bytes]]) -> None:
    """Raise RequestError that names what is wrong with the class folders of `root`.

    found: of train/ and val/, as far as they exist, and else of the root (""), the folders in it by
    their classes.
    """
    if "" in found and len(found) == 2:
        raise _missing_split(root, next(iter(found)), [*found[""].values()])
    for parent, folders in found.items():
        if not folders:
            raise _no_classes(root, parent)
    classes, *others = found.values()
    for val in others:
        if classes.keys() != val.keys():
            differing = [
                f"{escaped_name(classes[name])} in train/ only" for name in classes if name not in val
            ]
            differing += [f"{escaped_name(val[name])} in val/ only" for name in val if name not in classes]
            problem = f"the classes of train/ and val/ differ: {list_first(differing, 5)}"
            raise RequestError(problem, "both need the same class folders")
    if all(map(split_of, classes.values())):
        raise _splits_as_classes(root, [*classes.values()])
    if len(classes) < 2:
        problem = f"data.root={root} holds one class folder, {next(iter(classes))}/"
        raise RequestError(problem, "at least two are needed")


def split_of(folder: bytes) -> str | None:
    """Return "train", "val", "test" or "other" for a name of a split or of its parts, else None."""
    match = _SPLIT_NAME.fullmatch(folder.decode(errors="replace").strip())
    return match and match.lastgroup


def _missing_split(root: Path, present: str, folders: list[bytes]) -> RequestError:
    """Return the error of a folder with train/ or val/ alone. folders: all that are in it."""
    missing = "val" if present == "train" else "train"
    similar = [printable_name(name) for name in folders if split_of(name) == missing]
    tests = [printable_name(name) for name in folders if split_of(name) == "test" and missing == "val"]
    advice = f"add {missing}/ {_EACH}"
    if similar:
        advice = f"rename {similar[0]}/ to {missing}/"
    elif tests:
        advice += f", or rename {tests[0]}/ to {missing}/ to validate on it"
    return RequestError(f"data.root={root} has {present}/ but no {missing}/", advice)


def _no_classes(root: Path, parent: str) -> RequestError:
    if not parent:
        return RequestError(f"data.root={root} holds no folders", f"it needs train/ and val/, each {_EACH}")
    if images := sum(map(is_image, os.listdir(os.fsencode(root / parent)))):
        remedy = f"sort them into {parent}/<class>/, with the class names of train/"
        return RequestError(f"{parent}/ is flat: it holds images ({images:,}) but no class folders", remedy)
    return RequestError(f"{parent}/ holds no class folders", "it needs one for each class, with images in it")


def _splits_as_classes(root: Path, classes: list[bytes]) -> RequestError:
    """Return the error of class folders that all have names of splits: Train and Validation."""
    advice = f"give a folder with train/ and val/, each {_EACH}, or with class folders only"
    train, val = (
        next((printable_name(name) for kind in kinds for name in classes if split_of(name) == kind), None)
        for kinds in (("train",), ("val", "test"))
    )
    if train and val:
        advice = f"rename {train}/ to train/ and {val}/ to val/"
    names = list_first([printable_name(name) for name in classes], 5)
    folders = "the folders" if len(classes) > 1 else "the folder"
    return RequestError(f"data.root={root} holds no classes, but {folders} {names}", advice)


def empty_class(folder: bytes, ignored: Counter[str]) -> RequestError:
    """Return the error of a class folder without an image. ignored: what was left out in it."""
    kinds = " ".join(kind.decode() for kind in EXTENSIONS)
    problem = f"class folder {printable_name(folder)}/ holds no image ({kinds}){_left_out(ignored)}"
    return RequestError(problem, "add images or remove the folder")


def scan_validation(
    root: Path, classes: tuple[str, ...], hold_out: HoldOut | None, ignored: Counter[str] | None = None
) -> Split:
    """Return the images to evaluate a model on, labelled as a model of `classes` counts.

    They are those of val/, or of class folders those that `hold_out` chooses (None: all). A class
    may be missing or empty. `ignored` gets the number of what is left out. Raises RequestError if a
    folder is not a class of the model, or if there is no image.
    """
    walk = Walk(root)
    labels = {class_of(name): label for label, name in enumerate(classes)}
    with walk.errors():
        parent = "val" if (root / "val").is_dir() else ""
        folders = walk.classes(parent.encode())
        if not folders:
            raise _no_classes(root, parent)
        if unknown := [folder for name, folder in folders.items() if name not in labels]:
            raise _unknown_classes(root, unknown)
        entries = [
            (file, size, labels[name])
            for name, folder in folders.items()
            for file, size in walk.images(os.path.join(parent.encode(), folder))
        ]
    if ignored is not None:
        ignored.update(walk.ignored)
    if hold_out and not parent:
        chosen = hold_out.chosen((name, label) for name, _, label in entries)
        entries = [entry for entry in entries if entry[0] in chosen]
    if not entries:
        raise RequestError(
            f"data.root={root} holds no image to evaluate the model on{_left_out(walk.ignored)}"
        )
    return Split.from_entries(entries)


def _unknown_classes(root: Path, unknown: list[bytes]) -> RequestError:
    names = list_first([escaped_name(folder) for folder in unknown], 5)
    splits = {split_of(folder): os.fsdecode(folder) for folder in reversed(unknown)}
    split = splits.get("val") or splits.get("test")
    advice = f": to evaluate on {split}/, give data.root={shlex.quote(str(root / split))}" if split else ""
    return RequestError(f"{root} has class folders that the model does not know: {names}{advice}")


def _left_out(ignored: Counter[str]) -> str:
    return f" (left out: {describe_ignored(ignored)})" if ignored else ""


def changes(before: Index, now: Index) -> Iterator[str]:
    """Yield what changed from one index to another: one line for each class or file."""
    for label in sorted(set(before.classes) ^ set(now.classes)):
        yield f"class {label} {'is gone' if label in before.classes else 'is new'}"
    if (before.sums is None) != (now.sums is None):
        yield f"SHA256SUMS is {'new' if before.sums is None else 'gone'}"
    for ours, theirs in ((before.train, now.train), (before.val, now.val)):
        old = {normal_path(ours.name(i)): i for i in range(len(ours))}
        new = {normal_path(theirs.name(i)): i for i in range(len(theirs))}
        for name in sorted(old.keys() | new.keys()):
            if name not in new:
                yield f"{printable_name(name)} is gone"
            elif name not in old:
                yield f"{printable_name(name)} is new"
            elif ours.sizes[old[name]] != theirs.sizes[new[name]]:
                was, has = ours.sizes[old[name]], theirs.sizes[new[name]]
                yield f"{printable_name(name)} had {was:,} bytes and has {has:,}"
            elif before.sums and now.sums and ours.checksum(old[name]) != theirs.checksum(new[name]):
                yield f"{printable_name(name)} has another sum in SHA256SUMS"
