"""`pipeline predict --csv`: a row for each picture, written as soon as the picture is classified.

Promise: rows are not held in memory. A command that was killed continues: the same command with the
same --out removes a torn last line, and skips the pictures that have a row.
"""

import csv
import fcntl
import re
import sys
from contextlib import nullcontext
from pathlib import Path

from pipeline.addons.models.predict import TOP_K, classify, list_images
from pipeline.addons.models.trained import eval_weights, read_model, weights_digest
from pipeline.errors import RequestError, StorageError
from pipeline.record.terminal import Terminal

_RANKS = ("", *(f"_{rank}" for rank in range(2, TOP_K + 1)))
COLUMNS = ("path", *(name + rank for rank in _RANKS for name in ("class", "probability")), "defect", "model")
_FORMULA = re.compile(r"[=@]|[+-](?![\d.]+$)")  # beginning of a class name that a spreadsheet would run


def predict_csv(target: str, paths: list[str], out: Path | None) -> str | int:
    """Run `pipeline predict --csv`; return what was written to the file, or 0 for standard output.

    Raises RequestError if the rows in the file are not of this model, StorageError if no row
    has a prediction or the file cannot be written.
    """
    terminal = Terminal()
    contents = read_model(target)
    model = weights_digest(eval_weights(contents))[:16]
    number = bad = 0
    try:
        done = _images_in(out, model) if out and out.exists() else set()
        images, left_out = list_images(paths, done)
        if left_out:
            terminal.log(left_out)
        with open(out, "a", encoding="utf-8") if out else nullcontext(sys.stdout) as file:
            if out:  # two commands would both write the rows that are missing
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rows = csv.writer(file, lineterminator="\n")
            if not (out and file.tell()):
                rows.writerow(COLUMNS)
            for number, (image, defect, top) in enumerate(classify(contents, target, images), 1):
                cells = [] if defect else [cell for name, share in top for cell in (name, f"{share:.6f}")]
                cells = [f"'{cell}" if _FORMULA.match(cell) else cell for cell in cells]
                rows.writerow([image, *cells, *[""] * (2 * TOP_K - len(cells)), defect, model])
                file.flush()
                bad += bool(defect)
                if out or not sys.stdout.isatty():
                    terminal.progress(f"{number:,} of {len(images):,} images")
    except OSError as error:
        reason = "another command writes it" if isinstance(error, BlockingIOError) else error.strerror
        raise StorageError(f"--out {out} cannot be written: {reason}") from None
    if number and number == bad and not done:
        raise StorageError(f"none of {bad:,} images has a prediction: their rows say why (column defect)")
    return f"{out}: {number:,} rows, {bad:,} of them of bad images; it had {len(done):,}" if out else 0


def _images_in(file: Path, model: str) -> set[str]:
    """Return the images that have a row in a file, and remove a last line that a kill has torn."""
    done: set[str] = set()
    header = ",".join(COLUMNS) + "\n"
    with open(file, "r+b") as lines:
        for number, line in enumerate(lines):
            text = line[:100_000].decode(errors="replace")
            cells = next(csv.reader([text]))
            if not text.endswith("\n") and (number or header.startswith(text)):
                lines.truncate(lines.tell() - len(line))
            elif cells[-1:] != [model] if number else text != header:
                problem = f"line {number + 1} of {file} is not of 'pipeline predict --csv' with this model"
                raise RequestError(problem, "name another file")
            elif number:
                done.add(cells[0])
    return done
