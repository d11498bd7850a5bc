"""`pipeline bench gpu`: everything that needs a GPU, on one GPU, in minutes, with a final table.

Each part runs a `pipeline` command in its own process, so that it frees its memory and, if it
fails, the next part still runs. A part that does not finish in time is reported as such. No
network, MLflow or data is needed: without a folder of images, JPEGs are generated.

The parts: our training loop against the minimal loop, eager and compiled, with ResNet-50 at 224 px
in bf16; whole trainings; bit-identical repetition in deterministic and exact mode, and its cost;
fp16, which skips steps that overflow; and training from JPEG files.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline import machine
from pipeline.config.load import load
from pipeline.data.access import check_folder
from pipeline.data.sources import make_synthetic
from pipeline.record import journal
from pipeline.telemetry.mfu import MfuMeter, make_mfu_meter

_TIME_LIMIT_S = 460
_MODEL = ["model.arch=resnet50", "model.channels_last=true", "augment.size=224", "train.precision=bf16"]
_RUN = [
    "data.source=synthetic", "data.num_images=4096", "train.max_steps=16", "track.every=4 steps", "track.uri=none",
    "train.epochs=90", "evaluate.batch=256", "exact.shards=8",
]  # fmt: skip


@dataclass
class _Row:
    name: str
    images_per_s: float | None = None
    ratio: float | None = None
    mfu: float | None = None
    remark: str = ""


class _Suite:
    """Runs `pipeline` commands until the time limit and collects rows of the table."""

    def __init__(self, folder: Path, overrides: list[str], batch: int, image_size: int, efficiency: MfuMeter) -> None:
        self.rows: list[_Row] = []
        self._folder, self._overrides, self._batch = folder, overrides, batch
        self._efficiency, self._image_size = efficiency, image_size
        self._deadline = time.monotonic() + _TIME_LIMIT_S

    def compare_loops(self, title: str, *overrides: str, rounds: int = 3) -> None:
        """Run `bench train` and add its rows."""
        words = [*_MODEL, *self._overrides, *overrides]
        output = self._run(title, "bench", "train", "--json", "--rounds", str(rounds), "--steps", "20", *words)
        if output is None:
            return
        for row in json.loads(output.splitlines()[-1])["rows"]:
            speed = row["images_per_s"]
            mfu = self._efficiency.metrics(speed, self._image_size).get("time/mfu")
            self.rows.append(_Row(f"{title}: {row['name']}", speed, row["ratio"], mfu))
        missing = machine.missing_to_compile()
        if missing and "train.compile=off" not in words:
            self.rows.append(_Row(f"{title}: compiled", remark=f"torch.compile needs {missing}, which is missing here"))

    def train(self, title: str, *overrides: str, times: int = 1) -> None:
        """Run `train` that many times and add one row, which compares the final weights."""
        digests: list[str] = []
        metrics: dict[str, float] = {}
        for number in range(times):
            run = self._folder / f"{title}-{number}".replace(" ", "-")
            output = self._run(title, "train", "digits", f"run.dir={run}", *_RUN, *_MODEL, *self._overrides, *overrides)
            if output is None:
                return
            digests.append(output.splitlines()[-1].rpartition("sha256:")[2])
            for event, _ in journal.read(run / "journal.jsonl"):
                metrics |= event.get("metrics", {})
        remarks = [f"identical weights: {digests[0][:8]}"] if times > 1 else []
        if len(set(digests)) > 1:
            remarks = [f"weights differ: {' '.join(digest[:8] for digest in digests)}"]
        peaks = [value for name, value in metrics.items() if name.endswith("/gpu_peak_mib")]
        if peaks:
            remarks.append(f"{max(peaks) / 1024:.1f} GiB")
        speed, mfu = metrics.get("time/images_per_s"), metrics.get("time/mfu")
        self.rows.append(_Row(title, speed, mfu=mfu, remark="  ".join(remarks)))

    def table(self) -> str:
        lines = [f"{'part':<38} {'images/s':>10} {'ms/step':>10} {'ratio':>7} {'MFU':>7}"]
        for row in self.rows:
            speed = step = "–"
            if row.images_per_s:
                speed, step = f"{row.images_per_s:,.0f}", f"{1000 * self._batch / row.images_per_s:,.1f}"
            ratio = f"{row.ratio:.3f}" if row.ratio is not None else "–"
            mfu = f"{row.mfu:.1%}" if row.mfu is not None else "–"
            lines.append(f"{row.name:<38} {speed:>10} {step:>10} {ratio:>7} {mfu:>7}  {row.remark}".rstrip())
        return "\n".join(lines)

    def _run(self, title: str, *arguments: str) -> str | None:
        """Run a command; return its standard output, or None after adding a row that says why."""
        seconds_left = self._deadline - time.monotonic()
        print(f"{title} ... ({seconds_left:.0f} s left)", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "pipeline", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(1, seconds_left), check=False)
        except subprocess.TimeoutExpired:
            self.rows.append(_Row(title, remark="not finished: no time left"))
            return None
        if not done.returncode:
            return done.stdout
        last_line = (done.stderr.strip().splitlines() or ["no error message"])[-1]
        self.rows.append(_Row(title, remark=f"exit {done.returncode}: {last_line[:120]}"))
        return None


def bench_gpu(images: Path | None, overrides: list[str], batch: int) -> str:
    """Return the table. Raises RequestError if there is no GPU or `images` is no folder."""
    if images is not None:
        check_folder(images, f"--images {images}", "name an image folder, preferably of photos")
    config = load("digits", [*_MODEL, *overrides])
    if config.run.device != "cpu" and not machine.has_gpu():
        raise machine.no_gpu_error()
    device = torch.device("cpu" if config.run.device == "cpu" else "cuda")
    efficiency = make_mfu_meter(config, config.data.num_classes, 1, device)
    with tempfile.TemporaryDirectory(prefix="pipeline-gpu-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        suite = _Suite(folder, [f"batch.global={batch}", *overrides], batch, config.augment.size, efficiency)
        suite.compare_loops("bf16")
        suite.train("train, bf16")
        suite.train("deterministic", "run.deterministic=true", times=2)
        suite.train("exact", "run.exact=true", times=2)
        suite.train("fp16", "train.precision=fp16")
        if images is None:
            images = folder / "images"
            make_synthetic(images, 1024, 10, 400)
        suite.compare_loops("from JPEGs", "data.source=folder", f"data.root={images}", "train.compile=off", rounds=2)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    title = f"{name}, torch {torch.__version__}, {config.model.arch}, {config.augment.size} px, batch {batch}"
    return f"{title}\n{suite.table()}"
