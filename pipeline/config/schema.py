"""The keys of a run's configuration: types, bounds, defaults and what each key means.

Every field has bounds, and unknown keys are refused. The string below a field is its help text in
`pipeline train --help`. `pipeline.plan` checks what depends on the machine or on the data.
"""

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    WithJsonSchema,
)

from pipeline.config.credentials import without_password
from pipeline.config.duration import Duration

MODEL_URI_PREFIX = "models:/"
"""Prefix of a model's URI in MLflow's registry."""
_MAX_ARGUMENT = 1 << 20


def _positive(duration: Duration) -> Duration:
    if duration.amount == 0:
        raise ValueError("zero")
    return duration


def _normalise_path(text: str) -> str:
    """Expand `~` and remove redundant slashes; leave a URI (s3://, models:/) as it is.

    Raises UnicodeEncodeError, a ValueError, if no file can have this name in this locale.
    """
    os.fsencode(text)
    return text if ":/" in text else str(Path(os.path.expanduser(text)))


def expand_home(uri: str) -> str:
    """Expand `~` in sqlite:///~/FILE; return any other URI as it is."""
    match = re.fullmatch(r"(sqlite(?:\+\w+)?:///)(~.*)", uri, re.DOTALL)
    return match[1] + os.path.expanduser(match[2]) if match else uri


def _read_as(value: object, *words: str) -> BeforeValidator:
    """Return a validator that replaces `words`, in any case, by `value`."""
    return BeforeValidator(lambda given: value if isinstance(given, str) and given.lower() in words else given)


def _split_range(value: object) -> object:
    """Split `20-24` into two numbers; return any other value as it is."""
    match = re.fullmatch(r"(\d{1,12})-(\d{1,12})", value, re.ASCII) if isinstance(value, str) else None
    return match.groups() if match else value


_UNSET = ("auto", "null", "~", "")
"""Words that mean the default, together with YAML's words for a missing value."""
Absent = _read_as(None, "none", *_UNSET)
"""Reads `auto` and `none` as None: the plan then chooses a value, or the feature is off."""

Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Pixels = Annotated[int, Field(ge=8, le=2048)]

DurationField = Annotated[
    Duration, BeforeValidator(Duration.parse), PlainSerializer(str),
    WithJsonSchema({"type": "string", "format": "duration"}),
]  # fmt: skip
Interval = Annotated[DurationField, AfterValidator(_positive), WithJsonSchema({"type": "string", "format": "interval"})]
"""A duration after which something is repeated. Must be greater than 0: 0 is ambiguous."""

Argument = bool | int | float | str | None
"""An argument of a function that makes a model."""
_ARGUMENTS = "'NAME: VALUE' pairs: numbers, true | false | none, words, and lists of them"


def _parse_arguments(value: object) -> dict[str, Any]:
    """Return keyword arguments with typed values; raise ValueError for anything else."""
    if not isinstance(value, dict) or not all(str(name).isidentifier() for name in value):
        raise ValueError("not keyword arguments")
    return {
        name: [_parse_argument(item) for item in given] if isinstance(given, list) else _parse_argument(given)
        for name, given in value.items()
    }


def _parse_argument(value: object) -> Argument:
    """Return the value that a word means: a number, true, false, none, or itself."""
    words = {"true": True, "false": False, "none": None, "null": None, "~": None}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value, re.ASCII):
        value = int(value)
    elif isinstance(value, str) and re.fullmatch(
        r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", value, re.ASCII | re.IGNORECASE
    ):
        value = float(value)
    if isinstance(value, str):
        is_allowed = 0 < len(value) <= 200 and value.isprintable()
    else:
        is_allowed = value is None or (isinstance(value, (bool, int, float)) and abs(value) < _MAX_ARGUMENT)
    if not is_allowed:
        raise ValueError("not a number or a word")
    return value  # type: ignore[return-value]


def _check_model_name(name: str) -> str:
    """Return NAME or NAME@ALIAS; raise ValueError if MLflow does not take it."""
    if len(name) > 250 or re.search(r"@(latest|v\d+)$", name, re.IGNORECASE):
        raise ValueError("not a name for MLflow")
    return name


Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""A string without control characters: a NUL in a path raises ValueError in any function that uses
the path, and a line break would split an error message."""

Place = Annotated[Text, AfterValidator(_normalise_path)]
"""A path, or a keyword or URI in its place. The shell does not expand `~` after `=`."""

_MODEL_NAME = (
    "NAME or NAME@ALIAS (up to 250 letters, digits, _ . -; MLflow keeps the aliases latest and v1, v2, … for itself)"
)
ModelName = Annotated[
    str,
    Field(pattern=r"^[\w.-]+(@[\w.-]+)?$", json_schema_extra={"allowed": _MODEL_NAME}),
    AfterValidator(_check_model_name),
]

_EXPERIMENT_NAME = "up to 500 characters"
ExperimentName = Annotated[Text, Field(max_length=500, json_schema_extra={"allowed": _EXPERIMENT_NAME})]

_RUN_NAME = "a name of letters, digits, blanks and _ . -"
RunName = Annotated[str, Field(pattern=r"^[\w. -]+$", json_schema_extra={"allowed": _RUN_NAME})]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Run(Section):
    dir: Place = ""
    """Folder of this run: configuration, journal, checkpoints. Default: runs/<recipe>."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed of the initial weights, the sample order, the augmentation and dropout."""
    deterministic: bool = False
    """Give bit-identical weights from run to run and across a resume. Uses slower kernels on a GPU,
    and one thread per process unless run.threads is set."""
    exact: bool = False
    """Give bit-identical weights at any number of processes. Implies run.deterministic; slower than
    plain DDP."""
    portable: Annotated[bool | None, Absent] = None
    """true: give bit-identical weights on every model of x86-64 CPU with AVX2, each time and across
    a resume. On a GPU, this holds for the initial weights and the pixels only. auto: true with
    run.deterministic or run.exact."""
    resume: Annotated[Place, _read_as("auto", *_UNSET)] = "auto"
    """auto: resume from the newest checkpoint in run.dir that verifies; never: start from step 0
    and set aside what is in run.dir; a path: resume from that checkpoint."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: use the GPUs if the machine has any, and fail if they cannot be used; otherwise the
    CPU."""
    trace: bool = False
    """Write trace.jsonl: for each step the sample ids and a SHA-256 of the pixels of the global
    batch."""
    threads: Annotated[Annotated[int, Field(ge=1, le=1024)] | None, Absent] = None
    """Intra-op threads per process. auto: the available CPUs divided by the processes on the
    machine; 1 in deterministic mode."""
    watch: Annotated[
        Interval | None, PlainSerializer(lambda interval: str(interval or "none")),
        Absent, _read_as(Duration(100, "steps"), *_UNSET),
    ] = Duration(100, "steps")  # fmt: skip
    """Interval at which the processes compare their weights, in addition to before each evaluation
    and save. If they differ, the run ends and names the rank. none: never compare."""
    timeout: Annotated[float, Field(ge=1, le=86400)] = 300
    """Seconds that a process waits for the others in a collective before it fails. If the data is
    out of reach, the run waits half as long for it."""


class Data(Section):
    source: Literal["folder", "pack", "digits", "synthetic"] = "folder"
    """folder: images in class folders; pack: a pack that 'pipeline data pack' made from such a
    folder; digits: 1,797 real handwritten digits, created on first use; synthetic: generated
    patterns."""
    root: Annotated[Place | None, Absent] = None
    """Folder with train/ and val/, or with class folders, which data.val_split then splits; for
    data.source=pack, the folder of the pack, or s3://bucket/prefix. auto: data/digits for the
    digits."""
    cache: Annotated[Place | None, Absent] = None
    """With data.root=s3://bucket/prefix: folder on a local disk that keeps what was read, so that
    later epochs read from there. none: every epoch reads from the bucket."""
    cache_gib: Annotated[float, Field(gt=0, le=1 << 20)] = 100
    """With data.cache: GiB that it may fill. A larger pack is kept in part."""
    workers: Annotated[Annotated[int, Field(ge=0, le=1024)] | None, Absent] = None
    """Loader processes per node, divided among its training processes and rounded up. auto: one per
    available CPU."""
    prefetch: Annotated[int, Field(ge=1, le=64)] = 2
    """Batches that each loader process prepares ahead."""
    val_split: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """If data.root has no val/: share of the images for validation, chosen by a hash of each file's
    name."""
    split_by: Literal["class", "file"] = "class"
    """If data.root has no val/: class: data.val_split is the share of each class; one image of it
    stays in training, and from three images on one goes to validation. file: the share of all
    files, as version 0.2 chose them."""
    orientation: Literal["apply", "ignore"] = "apply"
    """apply: turn images upright as their EXIF orientation says. ignore: read images as version 0.2
    did. A pack keeps the choice that it was made with."""
    balance: Literal["none", "uniform", "sqrt"] = "none"
    """none: each image once an epoch. The others draw with replacement, for classes of unequal
    size. uniform: each class equally often; sqrt: by the square root of its number of images."""
    max_bad: Fraction = 0.001
    """Share of the training images that may fail to decode. Each one is named in the log and
    replaced by another image; above this share the run ends with exit code 4."""
    num_images: Annotated[int, Field(ge=1, le=1 << 40)] = 1024
    """With data.source=synthetic: number of training images. There are a quarter as many validation
    images, rounded up."""
    num_classes: Annotated[int, Field(ge=2, le=1 << 20)] = 10
    """With data.source=synthetic: number of classes. Other sources define their own."""


class Augment(Section):
    size: Pixels = 224
    """Side of the square training image, in pixels; with augment.first_size, in the last epochs."""
    first_size: Annotated[Pixels | None, Absent] = None
    """Progressive resolution: the side in the first epochs. auto: augment.size in all epochs."""
    growth: Annotated[tuple[DurationField, DurationField], Field(examples=[["5 epochs", "10 epochs"]])] = (
        Duration(0, "steps"),
        Duration(0, "steps"),
    )
    """Progressive resolution: when the side starts to grow, and when it reaches augment.size.
    Between them it is rounded to a multiple of 32 and changes only between epochs."""
    repeats: Annotated[int, Field(ge=1, le=16)] = 1
    """Repeated augmentation: number of differently augmented copies of an image in a batch. An
    epoch keeps its number of steps and uses 1/repeats of the images."""
    scale: tuple[PositiveFraction, PositiveFraction] = (0.08, 1.0)
    """Random resized crop: smallest and largest share of the image's area."""
    ratio: Annotated[
        tuple[Annotated[float, Field(gt=0, le=100)], Annotated[float, Field(gt=0, le=100)]],
        Field(examples=[[0.75, 1.33]]),
    ] = (3 / 4, 4 / 3)
    """Random resized crop: smallest and largest aspect ratio (width / height)."""
    pad: Annotated[int, Field(ge=0, le=256)] = 0
    """Random shift in place of the random resized crop: the image is scaled to augment.size, padded
    by this many reflected pixels on each side, and cropped. augment.scale and augment.ratio then
    have no effect. 0: random resized crop."""
    flip: Fraction = 0.5
    """Probability of a horizontal flip."""
    alternate_flips: bool = False
    """Flip each image in every second epoch, beginning with the first or the second (drawn for each
    image). Replaces augment.flip."""
    policy: Literal["none", "randaugment", "autoaugment", "trivialaugment", "augmix"] = "none"
    """torchvision's augmentation policy, applied after crop and flip. autoaugment is the policy for
    ImageNet."""
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """With augment.policy=randaugment: strength of its two operations, on torchvision's scale of
    31."""
    erase: Fraction = 0.0
    """Probability of random erasing: a rectangle is filled with the mean colour."""
    mixup: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Mixup of pairs of images: alpha of the Beta(alpha, alpha) that the mixing weight is drawn
    from. 0: off."""
    cutmix: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Cutmix of pairs of images: alpha of the Beta(alpha, alpha) that the share of the pasted
    rectangle is drawn from. 0: off. If mixup is on, too, one of the two is drawn for each pair."""


class Model(Section):
    arch: Text = "resnet50"
    """Name of a torchvision classification model; timm/NAME, a model of timm; or
    package.module:function, a function of your own that returns the model. It is called with
    num_classes."""
    args: Annotated[
        dict[str, Argument | list[Argument]], BeforeValidator(_parse_arguments),
        WithJsonSchema({"type": "object", "allowed": _ARGUMENTS}),
    ] = Field(default={})  # fmt: skip
    """More keyword arguments of the model, each as model.args.NAME=VALUE, such as
    model.args.drop_path_rate=0.1."""
    init: Annotated[Place | None, Absent] = None
    """Initial weights: torchvision's pretrained weights by name (DEFAULT, IMAGENET1K_V2), a run's
    folder or checkpoint, a state dict (.safetensors, .pt, .pth), or a model in MLflow
    (models:/NAME@ALIAS, at MLFLOW_TRACKING_URI or else in runs/mlflow.db). A head for another
    number of classes is initialised randomly. none: random weights, from run.seed."""
    freeze: Annotated[Text | None, Absent] = None
    """Parts of the model that are not trained: backbone (all but the head), or module names
    separated by commas, such as conv1,bn1,layer1. Their batch-norm statistics do not change,
    either. none: train everything."""
    batchnorm: Literal["local", "average", "sync"] = "local"
    """Batch norm with several processes. local: each process has its own running statistics; those
    of rank 0 are evaluated and saved; average: the mean of all processes' statistics is evaluated
    and saved; sync: batches are normalised over all processes (GPUs only)."""
    channels_last: bool = False
    """Keep images and weights in NHWC order: faster convolutions on GPUs with tensor cores."""


class Batch(Section):
    global_: Annotated[int, Field(alias="global", ge=1, le=1 << 24)] = 256
    """Images per update, over all processes and accumulation steps."""
    accumulate: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    """Gradient accumulation: forward and backward passes per update. Gradients are exchanged once,
    in the last pass."""


class Exact(Section):
    shards: Annotated[int, Field(ge=1, le=1 << 16)] = 16
    """With run.exact: number of equal parts of each global batch. The number of processes must
    divide it."""
    fraction_bits: Annotated[int, Field(ge=24, le=52)] = 44
    """With run.exact: gradients are summed in units of 2^-fraction_bits. The largest gradient
    allowed in a shard is 2^(62 - fraction_bits) / shards."""


class FSDP(Section):
    shard: Literal["all", "node"] = "all"
    """With parallel=fsdp: the processes among which a copy of the weights is divided. all: all of
    them; node: those of one machine, so that each machine has a copy and gathers no weights over
    the network (HSDP)."""


class Stages(Section):
    count: Annotated[int, Field(ge=2, le=64)] = 2
    """With parallel=stages: number of stages of the model, one per process. Twice as many processes
    train two copies."""
    micro_batches: Annotated[Annotated[int, Field(ge=1, le=1 << 12)] | None, Absent] = None
    """With parallel=stages: number of micro-batches in a pass of a copy. Batch norm sees one
    micro-batch at a time. auto: at most two per stage."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """With parallel=stages: pipeline schedule. 1f1b starts the backward pass of a micro-batch as
    early as possible and needs less memory; gpipe runs all forward passes first."""


class Optimizer(Section):
    name: Literal["sgd", "adamw", "lamb", "muon"] = "sgd"
    """sgd (with momentum), adamw, lamb, or muon for matrices and convolutions with adamw for the
    rest. lamb and muon need timm and whole weights: parallel=ddp or dataparallel."""
    lr: Annotated[float, Field(gt=0, le=1e6)] = 0.1
    """Learning rate for a global batch of 256. The plan scales it by batch.global / 256."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """With optimizer.name=sgd or muon: momentum."""
    nesterov: bool = False
    """With optimizer.name=sgd or muon: Nesterov momentum. Needs momentum > 0."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """With optimizer.name=adamw, lamb or muon: decay rates of the two moment estimates."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 1e-4
    """Weight decay. Norm parameters and biases have none."""

    @property
    def moments(self) -> int:
        """Return how many values the optimizer keeps for each weight, at most."""
        if self.name == "sgd":
            return 1 if self.momentum > 0 else 0
        return 2


class Schedule(Section):
    name: Literal["cosine", "step", "linear", "constant"] = "cosine"
    """Shape of the learning-rate schedule after the warm-up."""
    warmup: DurationField = Duration(0, "steps")
    """Length of the linear warm-up to the peak learning rate."""
    every: Interval = Duration(30, "epochs")
    """With schedule.name=step: interval between drops."""
    gamma: PositiveFraction = 0.1
    """With schedule.name=step: factor of each drop."""
    final_lr_fraction: Annotated[Fraction, Field(alias="final")] = 0.0
    """With cosine and linear: final learning rate, as a share of the peak learning rate."""
    cooldown: DurationField = Duration(0, "steps")
    """With cosine and linear: length of the last part of training, at the final learning rate."""


class Train(Section):
    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 90
    """Number of epochs; also the length of the learning-rate schedule."""
    max_steps: Annotated[Annotated[int, Field(ge=1, le=1 << 50)] | None, Absent] = None
    """Stop after this number of updates. Does not change the LR schedule. none: train all
    epochs."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Precision of the arithmetic. tf32: for Ampere GPUs and later; bf16 and fp16: autocast with
    fp32 weights; fp16 scales the loss, and all processes skip a step whose gradient overflows."""
    compile: Literal["auto", "on", "off", "reduce-overhead"] = "auto"
    """Compile the model with torch.compile. auto: on a GPU, unless the run is deterministic or
    short; the plan gives the decision and the reason. reduce-overhead: record CUDA graphs, too, for
    small models that keep a GPU waiting for Python; for one process with a GPU, one image size and
    one pass per update."""
    gradient_dtype: Annotated[Literal["fp32", "bf16"], Field(alias="exchange")] = "fp32"
    """Precision in which DDP exchanges gradients. bf16 halves the traffic and rounds each
    gradient."""
    loss: Literal["ce", "bce"] = "ce"
    """ce: cross-entropy; bce: one binary cross-entropy per class, as in "ResNet strikes back"."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target that is spread over all classes."""
    clip: Annotated[Annotated[float, Field(gt=0, le=1e9)] | None, Absent] = None
    """Largest norm of the gradient over all weights; a larger gradient is scaled down to it. none:
    do not clip."""
    ema: Annotated[Annotated[float, Field(gt=0, lt=1)] | None, Absent] = None
    """Decay per step of an exponential moving average of the weights, such as 0.9999. The average
    is then what is evaluated and exported. none: no EMA."""


class Evaluate(Section):
    every: Interval = Duration(1, "epochs")
    """Interval between evaluations on all validation images. The run always ends with one."""
    batch: Annotated[int, Field(ge=1, le=1 << 20)] = 64
    """Images per forward pass. The batches are the same at any world size."""
    resize: Annotated[Annotated[int, Field(ge=8, le=4096)] | None, Absent] = None
    """Length of the shorter side before the centre crop, in pixels. auto: 8/7 of evaluate.size (256
    for 224)."""
    size: Annotated[Pixels | None, Absent] = None
    """Side of the centre crop, in pixels. auto: augment.size."""
    flip: bool = False
    """Average the logits of each image and of its mirror image. val/top1_plain is the top-1 without
    mirror images. Only validation does this, not predict and export."""


class Checkpoint(Section):
    every: Interval = Duration(1, "epochs")
    """Interval between checkpoints. The run also saves at its end and at a signal to stop."""
    keep: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Number of newest checkpoints to keep, in addition to the best one."""
    mirror: Annotated[Place | None, Absent] = None
    """s3://bucket/prefix that gets a copy of each checkpoint, with the journal, configuration and
    receipt. A start on an empty disk resumes from there. It holds one run. none: no copy."""


class Profile(Section):
    steps: Annotated[
        tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None, BeforeValidator(_split_range), Absent,
        Field(examples=[[20, 24]]),
    ] = None  # fmt: skip
    """First and last step that torch.profiler records on rank 0: [20, 24] or 20-24. The trace is
    written to report/ in the run's folder. none: do not profile."""


class Track(Section):
    uri: Annotated[
        Text, AfterValidator(expand_home), PlainSerializer(without_password),
        _read_as("none", "none"), _read_as("auto", *_UNSET),
    ] = "auto"  # fmt: skip
    """MLflow tracking URI. auto: MLFLOW_TRACKING_URI, or else the SQLite file mlflow.db in the
    parent of run.dir; none: write the journal only. Give the user and the password in
    MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, because other users of the machine can
    see a command line. A user and a password in the URI are used, too, but never written down."""
    experiment: Annotated[ExperimentName | None, Absent] = None
    """MLflow experiment of a new run. auto: MLFLOW_EXPERIMENT_NAME, or else the recipe's name."""
    parent: Annotated[RunName | None, Absent] = None
    """Name of an MLflow run that groups runs, such as the seeds or the values of a search: MLflow
    shows this run below it. It is created if the experiment has none of that name."""
    required: bool = False
    """Refuse to start (exit code 2) if MLflow cannot be reached."""
    every: Interval = Duration(20, "steps")
    """Interval between logs of training metrics, which are summed over the processes."""
    report: bool = True
    """Keep the predictions of each evaluation in report/data, and draw report/ when the run is
    done."""
    register_: Annotated[ModelName | None, Absent, Field(alias="register")] = None
    """NAME or NAME@ALIAS under which the best model is registered in MLflow when the run is done.
    none: do not register it."""


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

    @pydantic.model_validator(mode="after")
    def _check_combinations(self) -> Self:
        for is_given, problem, remedy in _CONFLICTS:
            if is_given(self):
                raise ValueError(without_password(problem.format(c=self)), without_password(remedy.format(c=self)))
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
        resume = {"auto": "", "never": " with run.resume=auto"}.get(
            self.run.resume, f" with run.resume={shlex.quote(self.run.dir)}"
        )
        return f"the same command{resume}"

    def to_yaml(self) -> str:
        """Return the YAML of all keys; `from_yaml` reads it back to an equal configuration."""
        return yaml.safe_dump(self.model_dump(mode="json", by_alias=True), sort_keys=False, allow_unicode=True)


_NEEDS_DDP = "needs plain DDP and does not support {c.not_plain_ddp}"
_NEEDS_ONE_GRAPH = "train.compile=reduce-overhead records CUDA graphs and does not support"
_CONFLICTS: tuple[tuple[Callable[[Config], object], str, str], ...] = (
    (lambda c: "://" in c.run.dir, "run.dir={c.run.dir} is not a folder",
     "give one on this machine, and keep a copy of the run in a bucket with checkpoint.mirror=s3://bucket/prefix"),
    (lambda c: "://" in (c.data.cache or ""), "data.cache={c.data.cache} is not a folder",
     "give one on a disk of this machine"),
    (lambda c: c.is_in_store and c.data.source != "pack", "data.root={c.data.root} needs data.source=pack",
     "pack a folder into the bucket with 'pipeline data pack FOLDER {c.data.root}'"),
    (lambda c: c.data.cache and not c.is_in_store, "data.cache={c.data.cache} keeps what is read from a bucket",
     "leave it out, or give data.root=s3://bucket/prefix"),
    (lambda c: c.data.source == "folder" and c.data.root is None, "data.root is missing",
     "data.source=folder needs data.root=FOLDER, a folder with train/ and val/"),
    (lambda c: c.data.source == "pack" and c.data.root is None, "data.root is missing",
     "data.source=pack needs data.root=FOLDER, a folder with a pack"),
    (lambda c: c.augment.scale[0] > c.augment.scale[1],
     "augment.scale=[{c.augment.scale[0]:g}, {c.augment.scale[1]:g}]", "give the smaller number first"),
    (lambda c: c.augment.ratio[0] > c.augment.ratio[1],
     "augment.ratio=[{c.augment.ratio[0]:g}, {c.augment.ratio[1]:g}]", "give the smaller number first"),
    (lambda c: c.profile.steps and c.profile.steps[0] > c.profile.steps[1],
     "profile.steps=[{c.profile.steps[0]}, {c.profile.steps[1]}]", "give the smaller number first"),
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
    (lambda c: c.run.exact and c.parallel != "ddp", f"parallel={{c.parallel}} {_NEEDS_DDP}", "leave one of them out"),
    (lambda c: c.not_plain_ddp and c.model.batchnorm != "local", f"model.batchnorm={{c.model.batchnorm}} {_NEEDS_DDP}",
     "leave one of them out"),
    (lambda c: c.not_plain_ddp and c.train.compile in ("on", "reduce-overhead"),
     f"train.compile={{c.train.compile}} {_NEEDS_DDP}", "leave one of them out"),
    (lambda c: c.not_plain_ddp and c.train.gradient_dtype != "fp32",
     f"train.exchange={{c.train.gradient_dtype}} {_NEEDS_DDP}", "leave one of them out"),
    (lambda c: c.train.compile == "reduce-overhead" and c.augment.first_size not in (None, c.augment.size),
     f"{_NEEDS_ONE_GRAPH} augment.first_size={{c.augment.first_size}}, because a graph has one image size",
     "leave it out, or use train.compile=on"),
    (lambda c: c.train.compile == "reduce-overhead" and c.batch.accumulate > 1,
     f"{_NEEDS_ONE_GRAPH} batch.accumulate={{c.batch.accumulate}}, because a pass overwrites gradients",
     "leave it out, or use train.compile=on"),
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
