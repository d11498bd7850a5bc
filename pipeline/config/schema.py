"""SCHEMA"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from pipeline.config.credentials import without_password

REGISTRY = "models:/"
"""What the address of a model in MLflow begins with."""

Unit = Literal["epochs", "steps", "%"]


@dataclass(frozen=True)
class Duration:
    """A length of training in the unit its author thinks in; the plan turns it into steps."""

    amount: float
    unit: Unit

    @classmethod
    def parse(cls, text: object) -> "Duration":
        """Reads `10 epochs`, `500 steps`, `5 %` (of all steps) or `0`; ValueError otherwise."""
        if isinstance(text, Duration):
            return text
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)\s*(epochs?|steps?|%)", str(text).strip(), re.ASCII)
        if match:
            amount, word = float(match[1]), match[2]
            unit: Unit = "%" if word == "%" else "epochs" if word.startswith("epoch") else "steps"
            if unit != "steps" or amount.is_integer():
                return cls(amount, unit)
        elif str(text).strip() == "0":
            return cls(0, "steps")
        raise ValueError("not a duration")

    def __str__(self) -> str:
        return f"{f'{self.amount:.6f}'.rstrip('0').rstrip('.')} {self.unit}"  # never 1e-06, which parse does not read


DurationField = Annotated[
    Duration,
    BeforeValidator(Duration.parse),
    PlainSerializer(str),
    WithJsonSchema({"type": "string", "format": "duration"}),
]


def _positive(duration: Duration) -> Duration:
    if duration.amount == 0:
        raise ValueError("never")
    return duration


Interval = Annotated[DurationField, AfterValidator(_positive), WithJsonSchema({"type": "string", "format": "interval"})]
"""A duration after which something is done again: 0 would mean never to one reader and always to another."""

Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""A path with a NUL in it raises ValueError wherever it is used, and a line break makes two lines of an error."""


def _expand(text: str) -> str:
    """`text` without what leaves a path the same (`~`, a trailing slash); an address (s3://, models:/) as it is."""
    return text if ":/" in text else str(Path(os.path.expanduser(text)))


Place = Annotated[Text, AfterValidator(_expand)]
"""A path, or a word that stands for one. No shell expands `~` after `=`."""

ModelName = Annotated[
    str,
    Field(
        pattern=r"^[\w.-]+(@[\w.-]+)?$",
        json_schema_extra={"allowed": "NAME or NAME@ALIAS (letters, digits, _ . -)"},
    ),
]


def _absent(value: object) -> object:
    return None if isinstance(value, str) and value.lower() in ("auto", "none", "null", "~", "") else value


def _lower_none(value: object) -> object:
    return "none" if isinstance(value, str) and value.lower() == "none" else value


def _unset(default: object) -> BeforeValidator:
    """Read what YAML means by nothing as `default`, of a key whose `none` says something else."""
    return BeforeValidator(
        lambda value: default if isinstance(value, str) and value.lower() in ("auto", "null", "~", "") else value
    )


Absent = BeforeValidator(_absent)
"""Reads `auto` and `none` as None: `auto` where the plan fills it in, `none` where the thing is then off."""


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


class Run(Section):
    dir: Place = ""
    """Folder of this run: configuration, journal, checkpoints. Default: runs/<recipe>."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of everything: first weights, order of samples, augmentation, dropout."""
    deterministic: bool = False
    """Same bits from run to run and across a resume; slower kernels on a GPU, one thread a process unless told."""
    exact: bool = False
    """Weights that do not depend on the number of processes, bit for bit; deterministic besides, and slower than DDP."""
    resume: Annotated[Place, _unset("auto")] = "auto"
    """auto: go on from the newest good checkpoint in run.dir; never: start anew, what is there is set aside; a path: go
    on from that checkpoint."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs where there are any, and refuses, rather than falls back, where they cannot be used."""
    trace: bool = False
    """Write trace.jsonl: after each update the sample ids and a digest of the global batch, pixel for pixel."""
    threads: Annotated[Annotated[int, Field(ge=1, le=1024)] | None, Absent] = None
    """Intra-op threads a process. auto: the CPUs allowed divided by the processes on the machine; deterministic: 1."""
    watch: Annotated[
        Interval | None, PlainSerializer(lambda found: str(found or "none")), Absent, _unset(Duration(100, "steps"))
    ] = Duration(100, "steps")
    """How often the processes compare their weights, as they do before each evaluation and save; one that differs is
    named, and the run ends. none: never, not before a save either."""
    timeout: Annotated[float, Field(ge=1, le=86400)] = 300
    """Seconds that a process waits for the others in one exchange before it gives up; half as long, for data that is out
    of reach."""


class Data(Section):
    source: Literal["folder", "pack", "digits", "synthetic"] = "folder"
    """folder: images in class folders; pack: what 'pipeline data pack' made of such a folder; digits: 1,797 real
    handwritten digits, made on first use; synthetic: patterns."""
    root: Annotated[Place | None, Absent] = None
    """Folder that holds train/ and val/, or class folders that are then split by data.val_split; of a pack, its folder.
    digits: data/digits."""
    workers: Annotated[Annotated[int, Field(ge=0, le=1024)] | None, Absent] = None
    """Loader processes a node, shared out to its processes, rounded up. auto: one for each CPU allowed."""
    prefetch: Annotated[int, Field(ge=1, le=64)] = 2
    """Batches that each worker prepares ahead."""
    val_split: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Where there is one folder only: the share held out, chosen by a digest of each file's name."""
    max_bad: Annotated[float, Field(ge=0, le=1)] = 0.001
    """Share of the training images that may fail to decode; each is named and replaced. Above it: exit 4."""
    num_images: Annotated[int, Field(ge=1, le=1 << 40)] = 1024
    """Images for training in the synthetic source; a quarter as many, rounded up, for validation."""
    num_classes: Annotated[int, Field(ge=2, le=1 << 20)] = 10
    """Classes of the synthetic source. Any other source tells its own."""


class Augment(Section):
    size: Annotated[int, Field(ge=8, le=2048)] = 224
    """Side of the square that the model sees in training, in pixels; with augment.first_size, in the last epochs."""
    first_size: Annotated[Annotated[int, Field(ge=8, le=2048)] | None, Absent] = None
    """Of progressive resolution: the side in the first epochs. auto: augment.size, the same in all."""
    growth: tuple[DurationField, DurationField] = (Duration(0, "steps"), Duration(0, "steps"))
    """Of progressive resolution: when the side begins to grow, and when it is augment.size; between them it is the nearest
    multiple of 32, and it changes between epochs only."""
    repeats: Annotated[int, Field(ge=1, le=16)] = 1
    """Repeated augmentation: how often an image is in an epoch, each time another view of it in the same batch; an epoch
    then has so many fewer images in it."""
    scale: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (0.08, 1.0)
    """Random resized crop: least and largest share of the picture's area."""
    ratio: tuple[Annotated[float, Field(gt=0, le=100)], Annotated[float, Field(gt=0, le=100)]] = (3 / 4, 4 / 3)
    """Random resized crop: least and largest width over height."""
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of a horizontal flip."""
    policy: Literal["none", "randaugment", "autoaugment", "trivialaugment", "augmix"] = "none"
    """torchvision's policies of colour and shape, after crop and flip; autoaugment is the one found on ImageNet."""
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """Of randaugment, whose two operations a picture are as strong as this out of 31."""
    erase: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability of random erasing: a rectangle of mean colour."""
    mixup: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Mix pairs of images, their share drawn from Beta(a, a) with this a; 0: do not."""
    cutmix: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Put a rectangle of an image's neighbour into it, likewise. With mixup as well, each pair has one of both."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"augment.{name}=[{low:g}, {high:g}]: the least comes first")
        if self.first_size is not None and self.first_size > self.size:
            raise ValueError(
                f"augment.first_size={self.first_size} is above augment.size={self.size}: the side only grows"
            )
        return self


class Model(Section):
    arch: Text = "resnet50"
    """A classification model of torchvision by its name; its head is sized by the data's classes."""
    init: Annotated[Place | None, Absent] = None
    """Where first weights come from: one of torchvision's weights by its name (DEFAULT, IMAGENET1K_V2), a run's folder or
    checkpoint, or a model in MLflow (models:/NAME@ALIAS, at MLFLOW_TRACKING_URI, else in runs/mlflow.db). A head of
    another number of classes starts anew. none: random, from the seed."""
    freeze: Annotated[Text | None, Absent] = None
    """What of model.init stays as it is: backbone (all but the head), or names of modules with commas, as conv1,bn1,layer1.
    Their running statistics stay, too. none: everything is trained."""
    batchnorm: Literal["local", "average", "sync"] = "local"
    """Of several processes: each has its own running statistics, and what is judged and saved are those of the first
    (local) or the mean of all (average); or batches are normalised together (sync, on GPUs)."""
    channels_last: bool = False
    """Keep images and weights in NHWC order: faster convolutions on GPUs with tensor cores."""


class Batch(Section):
    global_: Annotated[int, Field(alias="global", ge=1, le=1 << 24)] = 256
    """Images an update, over all processes and accumulation steps."""
    accumulate: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    """Passes that a process's share is cut into; gradients are exchanged once, in the last."""


class Exact(Section):
    shards: Annotated[int, Field(ge=1, le=1 << 16)] = 16
    """Of run.exact: parts of equal size that each global batch is cut into; processes must divide it."""
    fraction_bits: Annotated[int, Field(ge=24, le=52)] = 44
    """Of run.exact: gradients are summed in units of 2^-this; a shard's largest is then 2^(62 - this) / shards."""


class Stages(Section):
    count: Annotated[int, Field(ge=2, le=64)] = 2
    """Of parallel=stages: parts that the model is cut into, one a process; twice as many processes train two copies."""
    micro_batches: Annotated[Annotated[int, Field(ge=1, le=1 << 12)] | None, Absent] = None
    """Of parallel=stages: parts that a copy's pass is cut into, which follow each other through the stages; batch norm sees
    one at a time. auto: two for each stage."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Of parallel=stages: 1f1b goes backward with a micro-batch as soon as it can, and so holds fewer of them; gpipe sends
    all of them forward first."""


class Optimizer(Section):
    name: Literal["sgd", "adamw"] = "sgd"
    """sgd with momentum, or AdamW."""
    lr: Annotated[float, Field(gt=0, le=1e6)] = 0.1
    """Learning rate for a global batch of 256; the plan scales it by batch.global / 256."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of sgd."""
    nesterov: bool = False
    """Of sgd; wants momentum > 0."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Of adamw."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 1e-4
    """Decay of weights; norms and biases have none."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("optimizer.nesterov=true: wants optimizer.momentum above 0; set it, or nesterov=false")
        return self

    @property
    def moments(self) -> int:
        """Numbers that it keeps for each weight."""
        return 2 if self.name == "adamw" else int(self.momentum > 0)


class Schedule(Section):
    name: Literal["cosine", "step", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup: DurationField = Duration(0, "steps")
    """Linear rise to the full learning rate."""
    every: Interval = Duration(30, "epochs")
    """Of step: how long until the next drop."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Of step: factor of each drop."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the full learning rate that cosine and linear end at."""
    cooldown: DurationField = Duration(0, "steps")
    """Of cosine and linear: how long, at the end of training, the rate stays at that."""


class Train(Section):
    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 90
    """Passes over the training images; the schedule's length."""
    max_steps: Annotated[Annotated[int, Field(ge=1, le=1 << 50)] | None, Absent] = None
    """Stop after so many updates; moves no schedule."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Of the arithmetic: tf32 is for GPUs of Ampere and later; bf16 and fp16 are autocast, weights stay fp32; with fp16
    the loss is scaled, and a step whose gradient overflows is skipped by all processes."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Have torch compile the model. auto: on GPUs, unless the run promises its bits; the plan says which, and why."""
    exchange: Literal["fp32", "bf16"] = "fp32"
    """Precision in which processes exchange their gradients (DDP): bf16 is half of the bytes, and rounds each gradient."""
    loss: Literal["ce", "bce"] = "ce"
    """ce: cross-entropy; bce: a binary one for each class, as in "ResNet strikes back"."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target spread over all classes."""
    clip: Annotated[Annotated[float, Field(gt=0, le=1e9)] | None, Absent] = None
    """Largest norm of the whole gradient; larger ones are scaled down to it."""
    ema: Annotated[Annotated[float, Field(gt=0, lt=1)] | None, Absent] = None
    """Decay a step of a moving average of the weights, 0.9999 say, which is then what is judged and served. none: none."""


class Evaluate(Section):
    every: Interval = Duration(1, "epochs")
    """How often the validation images are all judged; always once more at the end."""
    batch: Annotated[int, Field(ge=1, le=1 << 20)] = 64
    """Images a forward pass. Batches are cut from the whole set, so any world size sees the same ones."""
    resize: Annotated[Annotated[int, Field(ge=8, le=4096)] | None, Absent] = None
    """Shorter side before the centre crop. auto: 8/7 of evaluate.size, as 256 is to 224."""
    size: Annotated[Annotated[int, Field(ge=8, le=2048)] | None, Absent] = None
    """Side of the centre crop. auto: augment.size."""


class Checkpoint(Section):
    every: Interval = Duration(1, "epochs")
    """How often the state is saved; always at the end and at a signal."""
    keep: Annotated[int, Field(ge=1, le=10_000)] = 2
    """How many of the newest to keep; the best stays besides."""


def _window(value: object) -> object:
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,12})-(\d{1,12})", value, re.ASCII)):
        return match.groups()
    return value


class Profile(Section):
    steps: Annotated[
        tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None, BeforeValidator(_window), Absent
    ] = None
    """First and last step that torch.profiler records, on rank 0: [20, 24], or 20-24; the trace is put into the run's
    folder report. none: none."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.steps and self.steps[0] > self.steps[1]:
            raise ValueError(f"profile.steps=[{self.steps[0]}, {self.steps[1]}]: the first comes first")
        return self


class Track(Section):
    uri: Annotated[Text, PlainSerializer(without_password), BeforeValidator(_lower_none), _unset("auto")] = "auto"
    """MLflow's address. auto: MLFLOW_TRACKING_URI, else a SQLite file mlflow.db beside the run's folder; none: the
    journal alone. User and password: MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, since others see a command
    line. What stands before the last @ here is a user and password, too: used and never written down."""
    experiment: Annotated[Text | None, Absent] = None
    """MLflow experiment. auto: the recipe's name."""
    required: bool = False
    """Refuse to start (exit 2) while MLflow cannot be reached."""
    every: Interval = Duration(20, "steps")
    """How often training metrics are summed over the processes and reported."""
    report: bool = True
    """Keep what each evaluation answered in report/data, and draw report/ when the run is done."""
    register_: Annotated[ModelName | None, Absent, Field(alias="register")] = None
    """NAME or NAME@ALIAS: register the best model in MLflow under that name, when the run is done. none: do not."""


class Config(Section):
    """The whole request."""

    recipe: Text
    """Name of the recipe, from the file's name."""
    parallel: Literal["ddp", "dataparallel", "fsdp", "stages"] = "ddp"
    """How gradients meet. ddp: each process has the whole model (DistributedDataParallel; alone: not at all);
    dataparallel: one process, all its GPUs; fsdp: each process has a slice of every weight; stages: each process has
    some of the layers."""
    run: Run = Run()
    data: Data = Data()
    augment: Augment = Augment()
    model: Model = Model()
    batch: Batch = Batch()
    exact: Exact = Exact()
    stages: Stages = Stages()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    profile: Profile = Profile()
    track: Track = Track()

    @model_validator(mode="after")
    def _folder_has_root(self) -> Self:
        if self.data.source in ("folder", "pack") and self.data.root is None:
            inside = "train/ and val/ in it" if self.data.source == "folder" else "a pack in it"
            raise ValueError(
                f"data.root is missing: data.source={self.data.source} wants data.root=FOLDER, with {inside}"
            )
        return self

    @model_validator(mode="after")
    def _exact_can_be_kept(self) -> Self:
        if self.run.exact and self.train.precision == "fp16":
            raise ValueError(
                "run.exact=true with train.precision=fp16: a scaled loss has no fixed range; take bf16 or fp32"
            )
        if self.run.deterministic and self.model.batchnorm == "average":
            raise ValueError(
                "run.deterministic=true with model.batchnorm=average: a resumption would round otherwise; take local"
            )
        return self

    @model_validator(mode="after")
    def _plain_ddp_has_what_is_its_own(self) -> Self:
        if self.parallel == "ddp" and not self.run.exact:
            return self
        mode = "run.exact=true" if self.run.exact else f"parallel={self.parallel}"
        for word, clashes in (
            (f"parallel={self.parallel}", self.run.exact and self.parallel != "ddp"),
            (f"model.batchnorm={self.model.batchnorm}", self.model.batchnorm != "local"),
            (f"train.compile={self.train.compile}", self.train.compile == "on"),
            (f"train.exchange={self.train.exchange}", self.train.exchange != "fp32"),
        ):
            if clashes:
                raise ValueError(f"{mode} with {word}: each goes with plain DDP alone; leave one out")
        return self

    @model_validator(mode="after")
    def _parallel_can_be_kept(self) -> Self:
        if self.parallel == "stages" and (self.model.freeze or self.augment.first_size):
            raise ValueError(
                "parallel=stages with model.freeze or augment.first_size: stages send each other tensors of one shape, and"
                " all are trained; leave it out"
            )
        if self.parallel in ("fsdp", "stages") and self.train.precision == "fp16":
            raise ValueError(
                f"train.precision=fp16 with parallel={self.parallel}: not all processes see a gradient that overflows; take"
                " bf16 or fp32"
            )
        return self

    @model_validator(mode="after")
    def _frozen_weights_are_somebodys(self) -> Self:
        if self.model.freeze and not self.model.init:
            raise ValueError(
                f"model.freeze={self.model.freeze} without model.init would keep random weights: say whose to keep"
            )
        return self

    @model_validator(mode="after")
    def _required_tracker_is_named(self) -> Self:
        if self.track.required and self.track.uri == "none":
            raise ValueError("track.required=true with track.uri=none asks for nothing: name a server, or leave it out")
        return self

    @property
    def is_deterministic(self) -> bool:
        """Whether the same request gives the same bits."""
        return self.run.deterministic or self.run.exact

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with their neighbours, so that a pass has whole pairs."""
        return self.augment.mixup > 0 or self.augment.cutmix > 0

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir)

    def to_yaml(self) -> str:
        """The configuration as resolved; `from_yaml` reads it back to an equal one."""
        return yaml.safe_dump(self.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)


# What may differ between a run and its resumption: a key, or a section with all its keys. `run.dir` is where we are and
# `run.resume` the decision itself. `data.root` is where the data is now; its digest says whether it is the same data.
# Epochs may only be added: `refuse_changes` checks that.
FREE_ON_RESUME = (
    "run.dir", "run.resume", "run.trace", "run.watch", "run.timeout", "data.root", "data.workers", "data.prefetch",
    "data.max_bad", "train.max_steps", "train.epochs", "checkpoint", "profile", "track",
)  # fmt: skip
