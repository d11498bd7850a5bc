"""The configuration of a run: its sections together, and what follows from them."""

import shlex
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import PrivateAttr

from pipeline.config import sections
from pipeline.config.values import Text


class Config(sections.Section):
    """The whole configuration of a run."""

    recipe: Text
    """Name of the recipe. Default: the name of its file."""
    parallel: Literal["ddp", "dataparallel", "fsdp", "stages"] = "ddp"
    """Strategy by which GPUs or processes share the training. ddp: each process has the whole model
    (DistributedDataParallel; not used for one process); dataparallel: one process uses all GPUs of
    the machine; fsdp: each process has a slice of every weight; stages: each process has some of
    the layers."""
    run: sections.Run = sections.Run()
    data: sections.Data = sections.Data()
    augment: sections.Augment = sections.Augment()
    model: sections.Model = sections.Model()
    batch: sections.Batch = sections.Batch()
    exact: sections.Exact = sections.Exact()
    fsdp: sections.FSDP = sections.FSDP()
    stages: sections.Stages = sections.Stages()
    optimizer: sections.Optimizer = sections.Optimizer()
    schedule: sections.Schedule = sections.Schedule()
    train: sections.Train = sections.Train()
    evaluate: sections.Evaluate = sections.Evaluate()
    checkpoint: sections.Checkpoint = sections.Checkpoint()
    profile: sections.Profile = sections.Profile()
    track: sections.Track = sections.Track()

    _changes: str = PrivateAttr("")

    @property
    def changes(self) -> str:
        """The training's keys that the command line states, as "key=value key=value"."""
        return self._changes

    def replacing(self, section: str, **values: object) -> Self:
        """Return this configuration with other values in one of its sections, not validated."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    @property
    def is_in_store(self) -> bool:
        """Return True if the data is in a bucket."""
        return str(self.data.root).startswith("s3://")

    @property
    def is_deterministic(self) -> bool:
        """Return True if the same request gives bit-identical weights."""
        is_portable = self.run.portable is True and self.model.batchnorm != "average"
        return self.is_deterministic_on_gpus or is_portable

    @property
    def is_deterministic_on_gpus(self) -> bool:
        """Return True if that holds for a GPU's arithmetic, which run.portable leaves alone."""
        return self.run.deterministic or self.run.exact

    def is_deterministic_on(self, device: str) -> bool:
        """Return True if that holds on a device: cpu or cuda."""
        return self.is_deterministic if device == "cpu" else self.is_deterministic_on_gpus

    @property
    def is_portable(self) -> bool:
        """Return True if a run is asked to be portable, see `addons.run.portable`."""
        return self.is_deterministic if self.run.portable is None else self.run.portable

    @property
    def mixes(self) -> bool:
        """Return True if pairs of images are mixed; each pass then has an even number of images."""
        return self.augment.mixup > 0 or self.augment.cutmix > 0

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir)

    @property
    def start_again(self) -> str:
        """Return how to start this run again from step 0, as the end of an error message."""
        mirror = " and another checkpoint.mirror" if self.checkpoint.mirror else ""
        return f"start again with run.resume=never{mirror}"

    @property
    def same_command(self) -> str:
        """Return the command that resumes this run, as part of a message.

        run.resume=never or a path would apply again, and discard what the run has saved since.
        """
        words = {"auto": "", "never": " with run.resume=auto"}
        folder = f" with run.resume={shlex.quote(self.run.dir)}"  # refused if nothing is saved there
        return "the same command" + words.get(self.run.resume, folder)

    def to_yaml(self) -> str:
        """Return the YAML of all keys; `from_yaml` reads it back to an equal configuration."""
        return yaml.safe_dump(
            self.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True
        )
