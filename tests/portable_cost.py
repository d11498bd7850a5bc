"""Measure the speed of updates with run.portable=true and with false, in one thread, in turns.

    python tests/portable_cost.py docs/reproducibility.md

writes the page's table. Each turn is a process of its own, because libraries read their variables
when they are loaded.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from pipeline import portable

ROWS = {"resnet18": (224, 8), "convnext_tiny": (224, 8), "vit_s_16": (224, 8), "resnet18 ": (32, 48)}
"""Side and number of the images of an update, by the model."""
HEAD = (
    "| model | images of an update | images/s, portable | images/s, not | ratio | lowest, highest |\n"
    "| --- | --- | --- | --- | --- | --- |\n"
)


def measure(name: str, seconds: float, *, is_portable: bool) -> float:
    """Return the images of updates in a second of CPU time, from `seconds` after a first update.

    With one thread this is what an idle machine does in a second.
    """
    from kinds_list import plan_of, updates

    from pipeline.model.architectures import build
    from pipeline.randomness import configure_torch

    if is_portable:
        portable.use_exact_roots()
    configure_torch(deterministic=True, precision="fp32", threads=1)
    size, images = ROWS[name]
    words = (f"model.arch={name.strip()}", f"augment.size={size}", f"batch.global={images}", "optimizer.name=adamw",
             "optimizer.nesterov=false")  # fmt: skip
    options = plan_of(*words)[0].model
    steps = updates(lambda: build(options, 10), *words)
    next(steps)
    start, count = time.process_time(), 0
    while time.process_time() - start < seconds:
        next(steps)
        count += images
    return count / (time.process_time() - start)


def turn(name: str, seconds: float, *, is_portable: bool) -> float:
    """Return what `measure` returns in a new process."""
    environment = {key: value for key, value in os.environ.items() if key not in portable.VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1"} | (portable.VARIABLES if is_portable else {})
    command = [sys.executable, __file__, "--turn", name, "--seconds", str(seconds), *["--portable"] * is_portable]
    return float(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--turn", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--portable", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        print(measure(options.turn, options.seconds, is_portable=options.portable))
        return
    rows = []
    for name, (size, images) in ROWS.items():
        pairs = [
            [turn(name, options.seconds, is_portable=is_portable) for is_portable in (True, False)]
            for _ in range(options.rounds)
        ]
        ratios = [mine / other for mine, other in pairs]
        speeds = " | ".join(f"{median(column):.1f}" for column in zip(*pairs, strict=True))
        spread = f"{min(ratios):.2f}, {max(ratios):.2f}"
        rows.append(f"| {name.strip()} | {images} of {size} px | {speeds} | {median(ratios):.2f} | {spread} |")
        print(rows[-1], flush=True)
    if options.page:
        from kinds_page import Page

        Page(options.page).replace(HEAD, rows)


if __name__ == "__main__":
    main()
