"""Draw docs/images/resume.png: a run that was killed and resumed, and an undisturbed one.

Both runs train the digits recipe on two processes. The killed run gets SIGKILL, all its processes
at once, and is started again with the same command. The script fails unless both have the same
metrics at every step and the same weights.
"""

import sys
import tempfile
from pathlib import Path

from harness import Job
from matplotlib.figure import Figure
from PIL import Image

KILL_FROM = 38
"""Step from which the run is killed, in the middle of an epoch, while the loss falls fast."""
PLOTS = (("training loss", "train/loss"), ("validation top-1 accuracy", "val/top1"))


def draw(path: Path, undisturbed: Job, killed: Job, killed_at: int, weights: str) -> None:
    resumed_at = killed.starts()[-1]["step"]
    figure = Figure((9, 3.9), layout="constrained")
    title = f"Killed at step {killed_at}, resumed from the checkpoint of step {resumed_at}"
    figure.suptitle(f"{title}: the same curve and weights", fontsize=11, fontweight="bold")
    for axes, (title, key) in zip(figure.subplots(1, 2), PLOTS, strict=True):
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.plot(*curve(undisturbed, key), label="undisturbed run", color="#9ecae1", linewidth=6)
        axes.plot(*curve(killed, key), label="killed and resumed run", color="#08519c", linewidth=1.4)
        axes.axvspan(resumed_at, killed_at, color="gray", alpha=0.15, label="steps trained twice")
        axes.axvline(killed_at, color="#c0392b", label=f"SIGKILL to all processes at step {killed_at}")
        axes.axvline(resumed_at, color="#1a7f4b", linestyle="--", label=f"resumed from step {resumed_at}")
    figure.axes[0].legend(fontsize=9, frameon=False)
    for name, axes in zip(("undisturbed", "killed and resumed"), figure.axes, strict=True):
        axes.set_xlabel(f"step\n\nweights, {name}:\nsha256:{weights[:32]}\n{weights[32:]}", fontsize=8)
    figure.savefig(path, dpi=200, facecolor="white")
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def curve(job: Job, key: str) -> tuple[list[int], list[float]]:
    points = sorted((step, value) for step, _, value in job.journal(key))
    return [step for step, _ in points], [value for _, value in points]


def main() -> int:
    out = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="resume-") as folder:
        scratch = Path(folder)
        words = ["digits", f"data.root={scratch / 'data'}", "run.deterministic=true", "run.trace=true",
                 "track.uri=none", "track.report=false", "track.every=2 steps"]  # fmt: skip
        undisturbed = Job(scratch / "undisturbed", words, nproc=2)
        expected = undisturbed.run().done["weights"]
        killed = Job(scratch / "killed", words, nproc=2).start().wait_for_step(KILL_FROM)
        killed.clean()
        killed.wait_gone(5)
        killed_at = killed.step()
        weights = killed.run().done["weights"]
        metrics = [sorted(job.journal("train/loss", "train/top1", "val/")) for job in (undisturbed, killed)]
        if weights != expected or metrics[0] != metrics[1]:
            print(f"the runs differ: see {expected} and {weights}", file=sys.stderr)
            return 1
        draw(out, undisturbed, killed, killed_at, weights)
    return 0


if __name__ == "__main__":
    sys.exit(main())
