"""Data that rank 0 keeps for the report: predictions, and images as the model saw them.

Another process draws it. A failure to keep something, such as a full disk, is logged and does not
stop training.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.addons.report import evaluations
from pipeline.addons.report.commands import STARTED_BY_RUN
from pipeline.addons.report.evaluations import SavedEvaluation
from pipeline.addons.report.page import write_page
from pipeline.data.augment import center_crop, evaluation_geometry, resize_image
from pipeline.data.images import BadImageError, decode
from pipeline.data.interface import OutageError, UnreadableError
from pipeline.data.loader import TrainBatches
from pipeline.data.mix import mix_images
from pipeline.train.job import Job
from pipeline.train.listener import End, Evaluated, Listener, Start

_COUNT = 16
_MAX_SIDE = 112
_DRAWING_TIMEOUT_S = 120


class ToReport(Listener):
    def __init__(self, job: Job, step: int, log: Callable[[str], None]) -> None:
        """Continue after `step`: remove files of later steps, which the resumed run repeats."""
        self._folder, self._report = job.folder, job.folder.report
        for kept in (self._report / "data").glob("step-*.npz"):
            if kept > evaluations.evaluation_file(self._report, step):
                self._folder.check_ours()
                kept.unlink()
        self._config, self._plan, self._source = job.config, job.plan, job.source
        self._log = log

    def started(self, start: Start) -> None:
        """Keep the first training images as the model sees them, once a run."""
        if (self._report / "data" / evaluations.AUGMENTED_FILE).exists():
            return
        few = replace(self._plan, micro_batch=min(_COUNT, self._plan.micro_batch), accumulate=1)
        batch = TrainBatches(self._source.train, self._config, few, 0)[0]
        if batch.outage:
            return self._log(f"no picture of the augmentation: {batch.outage}")
        images = batch.images
        if len(batch.mix):
            images = mix_images(images.float(), batch.mix).round().to(torch.uint8)
        captions = [self._source.classes[label] for label in batch.labels.tolist()]
        pixels = _small(images).numpy()
        self._keep(lambda: evaluations.save_augmented(self._folder, pixels, captions))

    def evaluated(self, result: Evaluated) -> None:
        """Keep the predictions of an evaluation, and the images of its most confident mistakes."""
        size, resize = evaluation_geometry(self._config.evaluate, self._config.augment)
        val = self._source.val
        mistakes = evaluations.most_confident_mistakes(result.predictions, _COUNT)
        images = torch.zeros((len(mistakes), 3, size, size), dtype=torch.uint8)
        for row, image in enumerate(mistakes.tolist()):
            try:
                images[row] = center_crop(decode(val.read(image), upright=val.upright), size, resize)
            except (BadImageError, UnreadableError) as error:  # changed since the evaluation
                self._log(f"{val.name(image)} cannot be shown: {error}")
            except OutageError as outage:  # training notices by itself, and waits
                self._log(f"the most confident mistakes cannot be shown: {outage}")
                break
        kept = SavedEvaluation(
            result.predictions, list(self._source.classes), mistakes, _small(images).numpy()
        )
        self._keep(lambda: evaluations.save_evaluation(self._folder, result.evaluation.step, kept))

    def closed(self, end: End) -> None:
        """Write the web page of the run, with the pictures if it is finished."""
        if end.is_finished:
            self._draw()
        self._keep(lambda: write_page(self._folder))

    def _draw(self) -> None:
        """Draw the pictures of the report, in another process."""
        self._folder.check_ours()
        environment = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
        }
        environment[STARTED_BY_RUN] = "1"
        command = [sys.executable, "-m", "pipeline", "report", str(self._folder.path)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, timeout=_DRAWING_TIMEOUT_S, check=False
            )
            reason = done.stderr.decode(errors="replace").strip()[-200:] if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
        if reason:
            self._log(f"{self._report} was not drawn: {reason}")

    def _keep(self, save: Callable[[], object]) -> None:
        self._folder.check_ours()
        try:
            save()
        except OSError as error:
            self._log(
                f"the data of {self._report} could not be written: {error.strerror}; training continues"
            )


def _small(images: Tensor) -> Tensor:
    """Return the images, [K, 3, S, S] uint8, with at most _MAX_SIDE pixels a side."""
    side = min(images.shape[2], _MAX_SIDE)
    return torch.stack([resize_image(image, side, side) for image in images]) if len(images) else images
