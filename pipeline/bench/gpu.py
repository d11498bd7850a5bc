"""`pipeline bench gpu`: all that wants a GPU to be shown, on one GPU, in minutes, with a short table last.

Each part is a command of ours in a process of its own, so that no part keeps memory from the next and none that fails takes
another with it; what is late is left out, and said. It needs no network, no MLflow and no data: where no images are named,
JPEGs of patterns are made.

Parts: our step against the barest one, eager and compiled, ResNet-50 at 224 px in bf16; whole trainings; the same bits
twice in deterministic and in exact mode, and what they cost; fp16, which skips what overflows; and the loader, fed from
JPEG files.
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
from pipeline.telemetry.mfu import NullEfficiency, measure_efficiency

_SECONDS = 460
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


class _Parts:
    """Runs commands as long as there is time, and keeps what they showed."""

    def __init__(self, folder: Path, words: list[str], batch: int, size: int, efficiency: NullEfficiency) -> None:
        self.rows: list[_Row] = []
        self._efficiency, self._size = efficiency, size
        self._folder, self._words, self._batch = folder, words, batch
        self._end = time.monotonic() + _SECONDS

    def step(self, title: str, *words: str, rounds: int = 3) -> None:
        """`bench train`: a row for each of its own."""
        out = self._run(
            title, "bench", "train", "--json", "--rounds", str(rounds), "--steps", "20", *_MODEL, *self._words, *words
        )
        if out is not None:
            for row in json.loads(out.splitlines()[-1])["rows"]:
                speed = row["images_per_s"]
                mfu = self._efficiency.figures(speed, self._size).get("time/mfu")
                self.rows.append(_Row(f"{title}: {row['name']}", speed, row["ratio"], mfu))
            lack = machine.missing_to_compile()
            if lack and "train.compile=off" not in (*self._words, *words):
                self.rows.append(_Row(f"{title}: compiled", remark=f"torch.compile wants {lack}, which is not here"))

    def train(self, title: str, *words: str, times: int = 1) -> None:
        """`train`, as often: one row, with whether the weights were the same bits each time."""
        digests: list[str] = []
        metrics: dict[str, float] = {}
        for number in range(times):
            run = self._folder / f"{title}-{number}".replace(" ", "-")
            out = self._run(title, "train", "digits", f"run.dir={run}", *_RUN, *_MODEL, *self._words, *words)
            if out is None:
                return
            digests.append(out.splitlines()[-1].rpartition("sha256:")[2])
            for row, _ in journal.read(run / "journal.jsonl"):
                metrics |= row.get("metrics", {})
        remarks = []
        if times > 1:
            is_same = len(set(digests)) == 1
            shown = digests[:1] if is_same else digests
            remarks = [f"{'same bits twice' if is_same else 'other bits'}: {' '.join(one[:8] for one in shown)}"]
        peak = max((value for name, value in metrics.items() if name.endswith("/gpu_peak_mib")), default=None)
        remarks += [f"{peak / 1024:.1f} GiB"] if peak is not None else []
        self.rows.append(
            _Row(title, metrics.get("time/images_per_s"), mfu=metrics.get("time/mfu"), remark="  ".join(remarks))
        )

    def table(self) -> str:
        lines = [f"{'part':<38} {'images/s':>10} {'ms a step':>10} {'ratio':>7} {'MFU':>7}"]
        for row in self.rows:
            speed = f"{row.images_per_s:,.0f}" if row.images_per_s else "–"
            step = f"{1000 * self._batch / row.images_per_s:,.1f}" if row.images_per_s else "–"
            ratio = f"{row.ratio:.3f}" if row.ratio is not None else "–"
            mfu = f"{row.mfu:.1%}" if row.mfu is not None else "–"
            lines.append(f"{row.name:<38} {speed:>10} {step:>10} {ratio:>7} {mfu:>7}  {row.remark}".rstrip())
        return "\n".join(lines)

    def _run(self, title: str, *arguments: str) -> str | None:
        """Standard output; None, with a row that says so, if it failed or came too late."""
        left = self._end - time.monotonic()
        print(f"{title} ... ({left:.0f} s left)", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "pipeline", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(1, left), check=False)
        except subprocess.TimeoutExpired:
            self.rows.append(_Row(title, remark="no time was left"))
            return None
        if done.returncode:
            why = done.stderr.strip().splitlines()[-1:] or ["no word"]
            self.rows.append(_Row(title, remark=f"exit {done.returncode}: {why[0][:120]}"))
            return None
        return done.stdout


def gpu(images: Path | None, overrides: list[str], batch: int) -> str:
    """The table. RequestError where there is no GPU; images: a folder of photos for the loader."""
    if images is not None:
        check_folder(images, f"--images {images}", "name an image folder, of photos best")
    config = load("digits", [*_MODEL, *overrides])
    if config.run.device != "cpu" and not machine.has_gpu():
        raise machine.no_gpu_error()
    device = torch.device("cpu" if config.run.device == "cpu" else "cuda")
    efficiency = measure_efficiency(config, config.data.num_classes, 1, device)
    with tempfile.TemporaryDirectory(prefix="pipeline-gpu-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        parts = _Parts(folder, [f"batch.global={batch}", *overrides], batch, config.augment.size, efficiency)
        parts.step("bf16")
        parts.train("train, bf16")
        parts.train("deterministic", "run.deterministic=true", times=2)
        parts.train("exact", "run.exact=true", times=2)
        parts.train("fp16", "train.precision=fp16")
        if images is None:
            images = folder / "images"
            make_synthetic(images, 1024, 10, 400)
        parts.step("from JPEGs", "data.source=folder", f"data.root={images}", "train.compile=off", rounds=2)
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        title = f"{name}, torch {torch.__version__}, {config.model.arch}, {config.augment.size} px, batch {batch}"
        return f"{title}\n{parts.table()}"
