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

from pipeline.addons.models.eval_batches import evaluation_geometry
from pipeline.addons.report import evaluations
from pipeline.addons.report.commands import STARTED_BY_RUN
from pipeline.addons.report.evaluations import SavedEvaluation
from pipeline.addons.report.page import write_page
from pipeline.data.augment import center_crop, resize_image
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
        self._job, self._folder, self._log = job, job.folder, log
        for kept in evaluations.saved_evaluations(job.folder.report):
            if evaluations.step_of_evaluation(kept) > step:
                self._folder.check_ours()
                kept.unlink()

    def started(self, start: Start) -> None:
        """Keep the first training images as the model sees them, once a run."""
        if (self._folder.report / "data" / evaluations.AUGMENTED_FILE).exists():
            return
        source, plan = self._job.source, self._job.plan
        few = replace(plan, micro_batch=min(_COUNT, plan.micro_batch), accumulate=1)
        batch = TrainBatches(source.train, self._job.config, few, 0)[0]
        if batch.outage:
            return self._log(f"no picture of the augmentation: {batch.outage}")
        images = batch.images
        if len(batch.mix):
            images = mix_images(images.float(), batch.mix).round().to(torch.uint8)
        name_of = source.index.label_name if source.label_sets else source.classes.__getitem__
        captions = [name_of(label) for label in batch.labels.tolist()]
        pixels = _small(images).numpy()
        self._keep(lambda: evaluations.save_augmented(self._folder, pixels, captions))

    def evaluated(self, result: Evaluated) -> None:
        """Keep the predictions of an evaluation, and the images of its most confident mistakes."""
        size, resize = evaluation_geometry(self._job.config.evaluate, self._job.config.augment)
        val, classes = self._job.source.val, list(self._job.source.classes)
        mistakes = evaluations.most_confident_mistakes(result.predictions, _COUNT)
        images = torch.zeros((len(mistakes), 3, size, size), dtype=torch.uint8)
        for row, image in enumerate(mistakes.tolist()):
            try:
                picture = val.open(image)
                images[row] = center_crop(picture.region(0, 0, picture.height, picture.width), size, resize)
            except UnreadableError as error:  # changed since the evaluation
                self._log(f"{val.name(image)} cannot be shown: {error}")
            except OutageError as outage:  # training notices that by itself, and waits
                self._log(f"not all of the most confident mistakes can be shown: {outage}")
                break
        kept = SavedEvaluation(result.predictions, classes, mistakes, _small(images).numpy())
        self._keep(lambda: evaluations.save_evaluation(self._folder, result.evaluation.step, kept))

    def closed(self, end: End) -> None:
        """Write the web page of the run, with the pictures if it is finished."""
        if end.is_finished:
            self._keep(self._draw)
        self._keep(lambda: write_page(self._folder))

    def _draw(self) -> None:
        env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        env[STARTED_BY_RUN] = "1"
        command = [sys.executable, "-m", "pipeline", "report", str(self._folder.path)]
        subprocess.run(command, env=env, capture_output=True, timeout=_DRAWING_TIMEOUT_S, check=True)

    def _keep(self, save: Callable[[], object]) -> None:
        self._folder.check_ours()
        try:
            save()
        except subprocess.CalledProcessError as error:
            self._log(f"the report was not drawn: {error.stderr.decode(errors='replace').strip()[-200:]}")
        except (OSError, subprocess.TimeoutExpired) as error:
            self._log(f"the report could not be written: {error}; training continues")


def _small(images: Tensor) -> Tensor:
    side = min(images.shape[2], _MAX_SIDE)
    return torch.stack([resize_image(image, side, side) for image in images]) if len(images) else images
