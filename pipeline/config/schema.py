"""The configuration of a run: its sections, what goes together, and what may change on resume."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import PrivateAttr, model_validator

from pipeline.config.credentials import without_password
from pipeline.config.sections import (
    FSDP,
    Augment,
    Batch,
    Checkpoint,
    Data,
    Evaluate,
    Exact,
    Model,
    Optimizer,
    Profile,
    Run,
    Schedule,
    Section,
    Stages,
    Track,
    Train,
)
from pipeline.config.values import Text

MODEL_URI_PREFIX = "models:/"
"""Prefix of a model's URI in MLflow's registry."""


class Config(Section):
    """The whole configuration of a run."""

    recipe: Text
    """Name of the recipe. Default: the name of its file."""
    parallel: Literal["ddp", "dataparallel", "fsdp", "stages"] = "ddp"
    """Strategy by which GPUs or processes share the training. ddp: each process has the whole model
    (DistributedDataParallel; not used for one process); dataparallel: one process uses all GPUs of
    the machine; fsdp: each process has a slice of every weight; stages: each process has some of
    the layers."""
    run: Run = Run()
    data: Data = Data()
    augment: Augment = Augment()
    model: Model = Model()
    batch: Batch = Batch()
    exact: Exact = Exact()
    fsdp: FSDP = FSDP()
    stages: Stages = Stages()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    profile: Profile = Profile()
    track: Track = Track()

    _changes: str = PrivateAttr("")

    @property
    def changes(self) -> str:
        """The changes of the command line to the recipe's training, as "key=value key=value"."""
        return self._changes

    def with_changes(self, changes: str) -> Self:
        """Return this configuration with its `changes`, which no file keeps."""
        self._changes = changes
        return self

    def replacing(self, section: str, **values: object) -> Self:
        """Return this configuration with other values in one of its sections, not validated."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        for is_given, problem, remedy in _CONFLICTS:
            if is_given(self):
                raise ValueError(
                    without_password(problem.format(c=self)), without_password(remedy.format(c=self))
                )
        return self

    @property
    def is_in_store(self) -> bool:
        """Return True if the data is in a bucket."""
        return str(self.data.root).startswith("s3://")

    @property
    def not_plain_ddp(self) -> str:
        """The setting by which this is not plain DDP, or ""."""
        if self.run.exact:
            return "run.exact=true"
        return "" if self.parallel == "ddp" else f"parallel={self.parallel}"

    @property
    def is_deterministic(self) -> bool:
        """Return True if the same request gives bit-identical weights."""
        is_portable = self.run.portable is True and self.model.batchnorm != "average"
        return self.is_deterministic_on_gpus or is_portable

    @property
    def is_deterministic_on_gpus(self) -> bool:
        """Return True if that holds for a GPU's arithmetic, which run.portable leaves alone."""
        return self.run.deterministic or self.run.exact

    @property
    def is_portable(self) -> bool:
        """Return True if a run is asked to be portable, see `pipeline.portable`."""
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

        run.resume=never or a path would apply again, and discard what the run has saved since. The
        run's folder in place of a path is refused if nothing is saved there.
        """
        words = {"auto": "", "never": " with run.resume=auto"}
        return "the same command" + words.get(
            self.run.resume, f" with run.resume={shlex.quote(self.run.dir)}"
        )

    def to_yaml(self) -> str:
        """Return the YAML of all keys; `from_yaml` reads it back to an equal configuration."""
        return yaml.safe_dump(
            self.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True
        )


_NOT_PLAIN = "needs plain DDP and does not support {c.not_plain_ddp}"
_NO_GRAPH = "train.compile=reduce-overhead records CUDA graphs and does not support"
_ONE_OF_THEM, _ASCENDING = "leave one of them out", "give the smaller number first"
_CONFLICTS: tuple[tuple[Callable[[Config], object], str, str], ...] = (
    (lambda c: "://" in c.run.dir, "run.dir={c.run.dir} is not a folder",
     "give one on this machine, and keep a copy of the run in a bucket with checkpoint.mirror=s3://bucket/prefix"),
    (lambda c: "://" in (c.data.cache or ""), "data.cache={c.data.cache} is not a folder", "give one on a local disk"),
    (lambda c: c.is_in_store and c.data.source != "pack", "data.root={c.data.root} needs data.source=pack",
     "pack a folder into the bucket with 'pipeline data pack FOLDER {c.data.root}'"),
    (lambda c: c.data.cache and not c.is_in_store, "data.cache={c.data.cache} keeps what is read from a bucket",
     "leave it out, or give data.root=s3://bucket/prefix"),
    (lambda c: c.data.source == "folder" and c.data.root is None, "data.root is missing",
     "data.source=folder needs data.root=FOLDER, a folder with train/ and val/"),
    (lambda c: c.data.source == "pack" and c.data.root is None, "data.root is missing",
     "data.source=pack needs data.root=FOLDER, a folder with a pack"),
    (lambda c: c.augment.scale[0] > c.augment.scale[1],
     "augment.scale=[{c.augment.scale[0]:g}, {c.augment.scale[1]:g}]", _ASCENDING),
    (lambda c: c.augment.ratio[0] > c.augment.ratio[1],
     "augment.ratio=[{c.augment.ratio[0]:g}, {c.augment.ratio[1]:g}]", _ASCENDING),
    (lambda c: c.profile.steps and c.profile.steps[0] > c.profile.steps[1],
     "profile.steps=[{c.profile.steps[0]}, {c.profile.steps[1]}]", _ASCENDING),
    (lambda c: c.augment.pad >= (c.augment.first_size or c.augment.size),
     "augment.pad={c.augment.pad} reflects more than the image", "give a smaller number"),
    (lambda c: (c.augment.first_size or 0) > c.augment.size,
     "augment.first_size={c.augment.first_size} is greater than augment.size={c.augment.size}",
     "the side can only grow"),
    (lambda c: c.optimizer.nesterov and c.optimizer.momentum == 0,
     "optimizer.nesterov=true needs optimizer.momentum > 0", "set it, or set nesterov=false"),
    (lambda c: not (c.checkpoint.mirror or "s3://").startswith("s3://"), "checkpoint.mirror is not in a bucket",
     "give none | s3://bucket/prefix"),
    (lambda c: c.run.exact and c.train.precision == "fp16",
     "run.exact=true does not support train.precision=fp16, because the range of a scaled loss is not fixed",
     "use bf16 or fp32"),
    (lambda c: c.run.deterministic and c.model.batchnorm == "average",
     "run.deterministic=true does not support model.batchnorm=average, because a resumed run would round differently",
     "use local"),
    (lambda c: c.run.exact and c.parallel != "ddp", f"parallel={{c.parallel}} {_NOT_PLAIN}", _ONE_OF_THEM),
    (lambda c: c.not_plain_ddp and c.model.batchnorm != "local",
     f"model.batchnorm={{c.model.batchnorm}} {_NOT_PLAIN}", _ONE_OF_THEM),
    (lambda c: c.not_plain_ddp and c.train.compile in ("on", "reduce-overhead"),
     f"train.compile={{c.train.compile}} {_NOT_PLAIN}", _ONE_OF_THEM),
    (lambda c: c.not_plain_ddp and c.train.gradient_dtype != "fp32",
     f"train.exchange={{c.train.gradient_dtype}} {_NOT_PLAIN}", _ONE_OF_THEM),
    (lambda c: c.train.compile == "reduce-overhead" and c.augment.first_size not in (None, c.augment.size),
     f"{_NO_GRAPH} augment.first_size={{c.augment.first_size}}, because a graph has one image size", _ONE_OF_THEM),
    (lambda c: c.train.compile == "reduce-overhead" and c.batch.accumulate > 1,
     f"{_NO_GRAPH} batch.accumulate={{c.batch.accumulate}}, because a pass overwrites gradients", _ONE_OF_THEM),
    (lambda c: c.parallel == "stages" and (c.model.freeze or c.augment.first_size),
     "parallel=stages does not support model.freeze or augment.first_size, because stages exchange tensors of one"
     " shape and all of them are trained", "leave the option out"),
    (lambda c: c.parallel in ("fsdp", "stages") and c.optimizer.name in ("lamb", "muon"),
     "optimizer.name={c.optimizer.name} needs whole weights and does not support parallel={c.parallel}",
     "use adamw, or parallel=ddp"),
    (lambda c: c.parallel in ("fsdp", "stages") and c.train.precision == "fp16",
     "parallel={c.parallel} does not support train.precision=fp16, because not every process sees a gradient that"
     " overflows", "use bf16 or fp32"),
    (lambda c: c.model.freeze and not c.model.init, "model.freeze={c.model.freeze} would keep random weights",
     "set model.init to pretrained weights"),
    (lambda c: c.track.required and c.track.uri == "none", "track.required=true needs a tracking server",
     "set track.uri, or leave track.required out"),
)  # fmt: skip
"""Settings that do not go together: when, what is wrong, and what to do. c: the configuration."""

MAY_CHANGE_ON_RESUME = (
    "recipe", "run.dir", "run.resume", "run.trace", "run.watch", "run.timeout", "data.root", "data.cache",
    "data.cache_gib", "data.workers", "data.prefetch", "data.max_bad", "train.max_steps", "train.epochs", "checkpoint",
    "profile", "track",
)  # fmt: skip
"""Keys, and sections with all their keys, that may differ between a run and its resumption.

`data.root` may change because a digest of the data shows if it is the same data. `train.epochs` may
only grow, see `refuse_changes`.
"""
