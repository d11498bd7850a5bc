"""The configuration of a run: its sections, what goes together, and what may change on resume."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import PrivateAttr, model_validator

from pipeline.config import sections
from pipeline.config.credentials import without_password
from pipeline.config.values import Text

MODEL_URI_PREFIX = "models:/"
"""Prefix of a model's URI in MLflow's registry."""


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
                raise ValueError(*(without_password(text.format(c=self)) for text in (problem, remedy)))
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
    def plain_ddp_only(self) -> str:
        """A setting that only plain DDP supports, or ""."""
        if self.model.batchnorm != "local":
            return f"model.batchnorm={self.model.batchnorm}"
        if self.train.compile in ("on", "reduce-overhead"):
            return f"train.compile={self.train.compile}"
        return "" if self.train.gradient_dtype == "fp32" else f"train.exchange={self.train.gradient_dtype}"

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
        """Return True if a run is asked to be portable, see `addons.ops.portable`."""
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


_ONE_OF_THEM = "leave one of them out"
_ASCENDING = "give the smaller number first"
_CONFLICTS: tuple[tuple[Callable[[Config], object], str, str], ...] = (
    # folders and buckets
    (lambda c: "://" in c.run.dir, "run.dir={c.run.dir} is not a folder",
     "give one on this machine, and keep a copy in a bucket with checkpoint.mirror=s3://bucket/prefix"),
    (lambda c: c.data.source in ("folder", "pack") and c.data.root is None, "data.root is missing",
     "data.source={c.data.source} needs data.root=FOLDER"),
    (lambda c: c.is_in_store and c.data.source != "pack", "data.root={c.data.root} needs data.source=pack",
     "pack a folder into the bucket with 'pipeline data pack FOLDER {c.data.root}'"),
    (lambda c: c.data.cache and ("://" in c.data.cache or not c.is_in_store),
     "data.cache={c.data.cache} is a local folder that keeps what is read from data.root=s3://bucket/prefix",
     "leave it out, or give both"),
    (lambda c: not (c.checkpoint.mirror or "s3://").startswith("s3://"),
     "checkpoint.mirror is not in a bucket", "give none | s3://bucket/prefix"),
    # values
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
    # training
    (lambda c: c.optimizer.nesterov and c.optimizer.momentum == 0,
     "optimizer.nesterov=true needs optimizer.momentum > 0", "set it, or set nesterov=false"),
    (lambda c: c.run.deterministic and c.model.batchnorm == "average",
     "run.deterministic=true does not support model.batchnorm=average, which a resume rounds differently",
     "use local"),
    (lambda c: c.model.freeze and not c.model.init, "model.freeze={c.model.freeze} would keep random weights",
     "set model.init to pretrained weights"),
    (lambda c: c.track.required and c.track.uri == "none", "track.required=true needs a tracking server",
     "set track.uri, or leave track.required out"),
    (lambda c: c.train.compile == "reduce-overhead"
     and (c.augment.first_size not in (None, c.augment.size) or c.batch.accumulate > 1),
     "train.compile=reduce-overhead records CUDA graphs, which have one image size and one pass per update",
     "leave it, or augment.first_size and batch.accumulate, out"),
    # strategies
    (lambda c: c.run.exact and c.parallel != "ddp",
     "run.exact=true needs plain DDP, not parallel={c.parallel}", _ONE_OF_THEM),
    (lambda c: c.not_plain_ddp and c.plain_ddp_only,
     "{c.plain_ddp_only} needs plain DDP, not {c.not_plain_ddp}", _ONE_OF_THEM),
    (lambda c: c.train.precision == "fp16" and (c.run.exact or c.parallel in ("fsdp", "stages")),
     "{c.not_plain_ddp} does not support train.precision=fp16, whose scaled gradients have no fixed range",
     "use bf16 or fp32"),
    (lambda c: c.parallel == "stages" and (c.model.freeze or c.augment.first_size),
     "parallel=stages does not support model.freeze or augment.first_size", "leave the option out"),
    (lambda c: c.parallel in ("fsdp", "stages") and c.optimizer.name in ("lamb", "muon"),
     "optimizer.name={c.optimizer.name} needs whole weights and does not support parallel={c.parallel}",
     "use adamw, or parallel=ddp"),
)  # fmt: skip
"""Settings that do not go together: when, what is wrong, and what to do. c: the configuration."""

MAY_CHANGE_ON_RESUME = (
    "recipe", "run.dir", "run.resume", "run.trace", "run.watch", "run.timeout", "data.root", "data.cache",
    "data.cache_gib", "data.workers", "data.prefetch", "data.resident", "data.max_bad", "train.max_steps",
    "train.epochs", "checkpoint", "profile", "track",
)  # fmt: skip
"""Keys, and sections with all their keys, that may differ between a run and its resumption.

`data.root` may change because a digest of the data shows if it is the same data. `train.epochs` may
only grow, see `refuse_changes`.
"""
