"""The sections of a configuration: the type, bounds and default of each key, and what it means.

Every field has bounds, and unknown keys are refused. The string below a field is its help text in
`pipeline train --help`. `pipeline.config.schema` puts the sections together.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from pipeline.config.values import (
    UNSET,
    Absent,
    Arguments,
    BelowOne,
    ClassWeights,
    Columns,
    Count,
    Duration,
    DurationField,
    ExperimentName,
    Fraction,
    Interval,
    ModelName,
    OrNone,
    Pixels,
    Place,
    PositiveFraction,
    Ratio,
    RunName,
    Text,
    expand_home,
    read_as,
    split_range,
)
from pipeline.lazy import addon


class Section(BaseModel):
    """A part of the configuration; unknown keys in it are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Run(Section):
    dir: Place = ""
    """Folder of this run: configuration, journal, checkpoints. Default: runs/<recipe>."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed of the initial weights, the sample order, the augmentation and dropout."""
    deterministic: bool = False
    """Give bit-identical weights from run to run and across a resume. Slower on a GPU; one thread
    per process unless run.threads is set."""
    exact: bool = False
    """Give bit-identical weights at any number of processes. Implies run.deterministic; slower."""
    portable: OrNone[bool] = None
    """true: give bit-identical weights on every x86-64 CPU with AVX2 (on a GPU: initial weights and
    pixels only). auto: true with run.deterministic or run.exact."""
    resume: Annotated[Place, read_as("auto", *UNSET)] = "auto"
    """auto: resume from the newest checkpoint in run.dir that verifies; never: start from step 0
    and set aside what is in run.dir; a path: resume from that checkpoint."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPUs if the machine has any, and fail if they cannot be used; otherwise the CPU."""
    trace: bool = False
    """Write trace.jsonl: for each step the sample ids and a SHA-256 of the batch's pixels."""
    threads: OrNone[Annotated[int, Field(ge=1, le=1024)]] = None
    """Intra-op threads per process. auto: 1 in deterministic mode, else the CPUs are divided."""
    watch: Annotated[
        OrNone[Interval],
        PlainSerializer(lambda interval: str(interval or "none")),
        read_as(Duration(100, "steps"), *UNSET),
    ] = Duration(100, "steps")
    """Interval at which the processes compare their weights, also before each evaluation and save.
    If they differ, the run ends and names the rank. none: never compare."""
    timeout: Annotated[float, Field(ge=1, le=86400)] = 300
    """Seconds that a process waits for the others in a collective before it fails. If the data is
    out of reach, the run waits half as long for it."""


class Data(Section):
    source: Literal["folder", "table", "pack", "digits", "synthetic"] = "folder"
    """folder: images in class folders; table: images that data.table lists; pack: what 'pipeline
    data pack' made from one of them; digits: 1,797 real handwritten digits, created on first use;
    synthetic: generated patterns."""
    root: OrNone[Place] = None
    """Folder with train/ and val/, or with class folders, which data.val_split then splits; for
    data.source=pack, its folder or s3://bucket/prefix. auto: data/digits, or the table's folder."""
    table: OrNone[Place] = None
    """CSV, TSV or Parquet file with a row for each image: its path below data.root, its label (or
    several, as cat;dog), and, if there are such columns, split (train, val or test) and group."""
    columns: Columns = {}
    """Names of the table's columns if they are others, such as data.columns.path=file_name. A list
    for label names columns of 0 and 1: an image then has several labels, or none."""
    cache: OrNone[Place] = None
    """With data.root=s3://bucket/prefix: folder on a local disk that keeps what was read, so that
    later epochs read from there. none: every epoch reads from the bucket."""
    cache_gib: Annotated[float, Field(gt=0, le=1 << 20)] = 100
    """With data.cache: GiB that it may fill. A larger pack is kept in part."""
    workers: OrNone[Annotated[int, Field(ge=0, le=1024)]] = None
    """Loader processes per node, divided among its processes and rounded up. auto: one per CPU."""
    prefetch: Annotated[int, Field(ge=1, le=64)] = 2
    """Batches that each loader process prepares ahead."""
    resident: Literal["auto", "on", "off"] = "auto"
    """Decode images once, and keep them on the training device: validation images, and training
    images with augment.pad and without augment.policy. The batches are the same. auto: if they take
    little memory; on: if they take much, too, and fail where that is impossible; off: never."""
    val_split: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """If the data has no split: share of the images for validation, by a hash of their names."""
    split_by: Literal["class", "file", "group"] = "class"
    """If the data has no split: class: data.val_split is the share of each class; one image of it
    stays in training, and from three images on one goes to validation. file: the share of all
    files, as version 0.2 chose them. group: as class, and no group of a table is divided."""
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
    """With data.source=synthetic: training images. A quarter as many, rounded up, validate."""
    num_classes: Annotated[int, Field(ge=2, le=1 << 20)] = 10
    """With data.source=synthetic: number of classes. Other sources define their own."""


class Augment(Section):
    size: Pixels = 224
    """Side of the square training image, in pixels; with augment.first_size, in the last epochs."""
    first_size: OrNone[Pixels] = None
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
    ratio: Annotated[tuple[Ratio, Ratio], Field(examples=[[0.75, 1.33]])] = (3 / 4, 4 / 3)
    """Random resized crop: smallest and largest aspect ratio (width / height)."""
    pad: Annotated[int, Field(ge=0, le=256)] = 0
    """Random shift in place of the random resized crop, as for CIFAR: the image is scaled to
    augment.size, padded by this many reflected pixels on each side, and cropped. 0: off."""
    flip: Fraction = 0.5
    """Probability of a horizontal flip."""
    alternate_flips: bool = False
    """Flip each image in every second epoch, beginning with the first or the second (drawn for each
    image). Replaces augment.flip."""
    policy: Literal["none", "randaugment", "autoaugment", "trivialaugment", "augmix"] = "none"
    """torchvision's augmentation policy, applied after crop and flip (autoaugment: ImageNet's)."""
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """With augment.policy=randaugment: strength of its operations, on torchvision's scale of 31."""
    erase: Fraction = 0.0
    """Probability of random erasing: a rectangle is filled with the mean colour."""
    mixup: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Mixup: alpha of the Beta(alpha, alpha) that the weight of a pair is drawn from. 0: off."""
    cutmix: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Cutmix: alpha of the Beta(alpha, alpha) that the share of the pasted rectangle is drawn from.
    0: off. If mixup is on, too, one of the two is drawn for each pair."""


class Model(Section):
    arch: Text = "resnet50"
    """Name of a torchvision classification model; timm/NAME, a model of timm; or
    package.module:function, a function of your own that returns the model for num_classes."""
    args: Arguments = {}
    """More keyword arguments of the model, such as model.args.drop_path_rate=0.1."""
    init: OrNone[Place] = None
    """Initial weights: timm or torchvision, the published ones of model.arch; torchvision's by name
    (IMAGENET1K_V2), a run's folder or checkpoint, a state dict (.safetensors, .pt, .pth), or a
    model in MLflow (models:/NAME@ALIAS, at MLFLOW_TRACKING_URI or else in runs/mlflow.db). A head
    for another number of classes is initialised randomly. none: random weights, from run.seed."""
    mean: OrNone[tuple[Fraction, Fraction, Fraction]] = None
    """Mean of each colour, from 0 to 1. auto: that of the published weights, or ImageNet's."""
    std: OrNone[tuple[PositiveFraction, PositiveFraction, PositiveFraction]] = None
    """Standard deviation of each colour, as model.mean."""
    freeze: OrNone[Text] = None
    """Parts of the model that are not trained: backbone (all but the head), or module names
    separated by commas, such as conv1,bn1,layer1. Their batch-norm statistics do not change,
    either. none: train everything."""
    freeze_until: OrNone[Interval] = None
    """When the parts of model.freeze start to be trained, such as 2 epochs. none: never."""
    teacher: OrNone[Place] = None
    """Model whose logits the training imitates, too: a run's folder or checkpoint, models:/…, or
    timm/NAME with its published weights. Its classes are those of the data, in the same order."""
    batchnorm: Literal["local", "average", "sync"] = "local"
    """Batch norm with several processes. local: each has its own running statistics, and those of
    rank 0 are evaluated and saved; average: the mean of all processes' statistics is evaluated and
    saved; sync: batches are normalised over all processes (GPUs only)."""
    channels_last: bool = False
    """Keep images and weights in NHWC order: faster convolutions on GPUs with tensor cores."""

    @property
    def is_function(self) -> bool:
        """Return True if a function of the user's own makes the model."""
        return ":" in self.arch


class Batch(Section):
    global_: Annotated[int, Field(alias="global", ge=1, le=1 << 24)] = 256
    """Images per update, over all processes and accumulation steps."""
    accumulate: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    """Gradient accumulation: passes per update. Gradients are exchanged once, in the last pass."""


class Exact(Section):
    shards: Annotated[int, Field(ge=1, le=1 << 16)] = 16
    """With run.exact: equal parts of each global batch, which the processes share evenly."""
    fraction_bits: Annotated[int, Field(ge=24, le=52)] = 44
    """With run.exact: gradients are summed in units of 2^-fraction_bits. The largest gradient
    allowed in a shard is 2^(62 - fraction_bits) / shards."""


class FSDP(Section):
    shard: Literal["all", "node"] = "all"
    """With parallel=fsdp: a copy of the weights is divided among all processes, or among those of
    one machine (node), so that none is gathered over the network (HSDP)."""


class Stages(Section):
    count: Annotated[int, Field(ge=2, le=64)] = 2
    """With parallel=stages: number of stages of the model, one per process. Twice as many processes
    train two copies."""
    micro_batches: OrNone[Annotated[int, Field(ge=1, le=1 << 12)]] = None
    """With parallel=stages: number of micro-batches in a pass of a copy. Batch norm sees one
    micro-batch at a time. auto: at most two per stage."""
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """With parallel=stages: 1f1b starts the backward pass of a micro-batch as early as possible and
    needs less memory; gpipe runs all forward passes first."""


class Optimizer(Section):
    name: Literal["sgd", "adamw", "lamb", "muon"] = "sgd"
    """sgd (with momentum), adamw, lamb, or muon for matrices and convolutions with adamw for the
    rest. lamb and muon need timm and whole weights: parallel=ddp or dataparallel."""
    lr: Annotated[float, Field(gt=0, le=1e6)] = 0.1
    """Learning rate for a global batch of 256. The plan scales it by batch.global / 256."""
    head_lr: OrNone[Annotated[float, Field(gt=0, le=1e6)]] = None
    """Peak learning rate of the classifier for a global batch of 256. none: optimizer.lr."""
    layer_decay: OrNone[PositiveFraction] = None
    """Factor of the learning rate from each layer to the one before it, such as 0.75. Layers are
    timm's groups, or else the members of a model's nn.Sequential. none: one learning rate."""
    momentum: BelowOne = 0.9
    """With optimizer.name=sgd or muon: momentum."""
    nesterov: bool = False
    """With optimizer.name=sgd or muon: Nesterov momentum. Needs momentum > 0."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
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
    max_steps: OrNone[Annotated[int, Field(ge=1, le=1 << 50)]] = None
    """Stop after this number of updates. Does not change the LR schedule. none: all epochs."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Precision of the arithmetic. tf32: for Ampere GPUs and later; bf16 and fp16: autocast with
    fp32 weights; fp16 scales the loss, and all processes skip a step whose gradient overflows."""
    compile: Literal["auto", "on", "off", "reduce-overhead"] = "auto"
    """Compile the model with torch.compile. auto: on a GPU, unless the run is deterministic or
    timed passes say that it does not repay. reduce-overhead: also record each update as one CUDA
    graph, for small models that wait for Python; one process, one size, one pass per update."""
    gradient_dtype: Annotated[Literal["fp32", "bf16"], Field(alias="exchange")] = "fp32"
    """Precision in which DDP exchanges gradients. bf16 halves the traffic and rounds each one."""
    loss: Literal["ce", "bce"] = "ce"
    """ce: cross-entropy; bce: one binary cross-entropy per class, summed, as in "ResNet strikes
    back". With several labels a picture it is always bce."""
    label_smoothing: BelowOne = 0.0
    """Share of the target that is spread over all classes."""
    class_weights: ClassWeights = "none"
    """Weight of each class in the loss, which stays a mean over images. balanced: images / (classes
    × images of the class); sqrt: its square root; FILE: JSON, YAML or CSV with class and weight."""
    distill: Annotated[
        tuple[Fraction, Annotated[float, Field(ge=0.1, le=100)]], Field(examples=[[0.5, 2]])
    ] = (0.5, 2.0)
    """With model.teacher: ALPHA, the share of the teacher's loss, and the TEMPERATURE of both."""
    patience: OrNone[Annotated[int, Field(ge=1, le=1_000_000)]] = None
    """End after this number of evaluations without a better one, counted from the end of the
    warm-up or of model.freeze_until. Does not change the LR schedule. none: all epochs."""
    watch: Literal["val/top1", "val/loss", "val/map"] = "val/top1"
    """The figure by which the best evaluation is chosen; val/map with several labels a picture."""
    clip: OrNone[Annotated[float, Field(gt=0, le=1e9)]] = None
    """Largest norm of the whole gradient; a larger one is scaled down. none: do not clip."""
    ema: OrNone[Annotated[float, Field(gt=0, lt=1)]] = None
    """Decay per step of an exponential moving average of the weights, such as 0.9999. The average
    is then what is evaluated and exported. none: no EMA."""


class Evaluate(Section):
    every: Interval = Duration(1, "epochs")
    """Interval between evaluations on all validation images. The run always ends with one."""
    batch: Annotated[int, Field(ge=1, le=1 << 20)] = 64
    """Images per forward pass. The batches are the same at any world size."""
    resize: OrNone[Annotated[int, Field(ge=8, le=4096)]] = None
    """Shorter side before the centre crop, in pixels. auto: 8/7 of evaluate.size (256 for 224)."""
    size: OrNone[Pixels] = None
    """Side of the centre crop, in pixels. auto: augment.size."""
    flip: bool = False
    """In validation, average the logits of each image and of its mirror image (val/top1_plain: the
    top-1 without mirror images)."""


class Checkpoint(Section):
    every: Interval = Duration(1, "epochs")
    """Interval between checkpoints. The run also saves at its end and at a signal to stop."""
    keep: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Number of newest checkpoints to keep, in addition to the best one."""
    mirror: OrNone[Place] = None
    """s3://bucket/prefix that gets a copy of each checkpoint, with the journal, configuration and
    receipt. A start on an empty disk resumes from there. It holds one run. none: no copy."""


class Profile(Section):
    steps: Annotated[
        tuple[Count, Count] | None, BeforeValidator(split_range), Absent, Field(examples=[[20, 24]])
    ] = None
    """First and last step that torch.profiler records on rank 0 in report/: [20, 24] or 20-24.
    none: do not profile."""


class Track(Section):
    uri: Annotated[
        Text,
        AfterValidator(expand_home),
        PlainSerializer(lambda uri: addon("ops.credentials").without_password(uri)),
        read_as("none", "none"),
        read_as("auto", *UNSET),
    ] = "auto"
    """MLflow tracking URI. auto: MLFLOW_TRACKING_URI, or else the SQLite file mlflow.db in the
    parent of run.dir; none: write the journal only. Other users of the machine can see a command
    line: give the user and the password in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
    Those in the URI are used, too, but never written down."""
    experiment: OrNone[ExperimentName] = None
    """MLflow experiment of a new run. auto: MLFLOW_EXPERIMENT_NAME, or else the recipe's name."""
    parent: OrNone[RunName] = None
    """Name of an MLflow run that groups runs, such as the seeds or the values of a search: MLflow
    shows this run below it. It is created if the experiment has none of that name."""
    required: bool = False
    """Refuse to start (exit code 2) if MLflow cannot be reached."""
    every: Interval = Duration(20, "steps")
    """Interval between logs of training metrics, which are summed over the processes."""
    report: bool = True
    """Keep the predictions of each evaluation in report/data, and draw report/ at the end."""
    register_: Annotated[OrNone[ModelName], Field(alias="register")] = None
    """NAME or NAME@ALIAS under which MLflow registers a finished run's best model. none: off."""
