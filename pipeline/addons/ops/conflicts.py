"""Settings that do not go together."""

from collections.abc import Callable

from pipeline.addons.ops.credentials import without_password
from pipeline.config.schema import Config
from pipeline.errors import RequestError


def _not_plain_ddp(config: Config) -> str:
    if config.run.exact:
        return "run.exact=true"
    return "" if config.parallel == "ddp" else f"parallel={config.parallel}"


def _plain_ddp_only(config: Config) -> str:
    """Return a setting that only plain DDP supports, or ""."""
    if config.model.batchnorm != "local":
        return f"model.batchnorm={config.model.batchnorm}"
    if config.train.compile in ("on", "reduce-overhead"):
        return f"train.compile={config.train.compile}"
    return "" if config.train.gradient_dtype == "fp32" else f"train.exchange={config.train.gradient_dtype}"


_ONE_OF_THEM = "leave one of them out"
_ASCENDING = "give the smaller number first"
_CONFLICTS: tuple[tuple[Callable[[Config], object], str, str], ...] = (
    # folders and buckets
    (lambda c: "://" in c.run.dir, "run.dir={c.run.dir} is not a folder",
     "give one on this machine, and keep a copy in a bucket with checkpoint.mirror=s3://bucket/prefix"),
    (lambda c: c.data.source == "folder" and c.data.table,
     "data.table={c.data.table} is for data.source=table", "add it, or leave data.table out"),
    (lambda c: "://" in (c.data.table or ""), "data.table={c.data.table} is not a file on this machine",
     "copy it, and pack the images into the bucket with 'pipeline data pack TABLE s3://bucket/prefix'"),
    (lambda c: c.data.source == "table" and not c.data.table, "data.table is missing",
     "data.source=table needs data.table=FILE.csv; 'pipeline data make table FOLDER' writes one"),
    (lambda c: c.data.source in ("folder", "digits") and c.data.split_by == "group",
     "data.split_by=group needs a table with a column group, and class folders have none",
     "write one with 'pipeline data make table FOLDER', add the column, and give"
     " data.source=table data.table=FOLDER/labels.csv"),
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
    (lambda c: c.model.freeze_until and not c.model.freeze, "model.freeze_until needs model.freeze",
     "name the parts of the model that it freezes"),
    (lambda c: c.model.init == "timm" and not c.model.arch.startswith("timm/"),
     "model.init=timm does not fit model.arch={c.model.arch}", "give model.arch=timm/NAME"),
    (lambda c: c.model.teacher and c.train.loss != "ce", "model.teacher needs train.loss=ce", _ONE_OF_THEM),
    (lambda c: c.track.required and c.track.uri == "none", "track.required=true needs a tracking server",
     "set track.uri, or leave track.required out"),
    (lambda c: c.train.compile == "reduce-overhead"
     and (c.augment.first_size not in (None, c.augment.size) or c.batch.accumulate > 1),
     "train.compile=reduce-overhead records a CUDA graph, which has one image size and one pass per update",
     "leave it, or augment.first_size and batch.accumulate, out"),
    (lambda c: c.train.compile == "reduce-overhead"
     and (c.model.freeze_until or c.optimizer.name not in ("sgd", "adamw")),
     "train.compile=reduce-overhead needs optimizer.name=sgd or adamw, and no model.freeze_until",
     "set train.compile=on"),
    # strategies
    (lambda c: c.run.exact and c.parallel != "ddp",
     "run.exact=true needs plain DDP, not parallel={c.parallel}", _ONE_OF_THEM),
    (lambda c: _not_plain_ddp(c) and _plain_ddp_only(c),
     "{option} needs plain DDP, not {mode}", _ONE_OF_THEM),
    (lambda c: c.train.precision == "fp16" and (c.run.exact or c.parallel in ("fsdp", "stages")),
     "{mode} does not support train.precision=fp16, whose scaled gradients have no fixed range",
     "use bf16 or fp32"),
    (lambda c: c.parallel == "stages" and (c.model.freeze or c.augment.first_size),
     "parallel=stages does not support model.freeze or augment.first_size", "leave the option out"),
    (lambda c: c.parallel == "stages" and (c.optimizer.layer_decay or c.optimizer.head_lr),
     "parallel=stages does not support optimizer.layer_decay or head_lr", "leave the option out"),
    (lambda c: c.parallel in ("fsdp", "stages") and c.optimizer.name in ("lamb", "muon"),
     "optimizer.name={c.optimizer.name} needs whole weights and does not support parallel={c.parallel}",
     "use adamw, or parallel=ddp"),
)  # fmt: skip
"""Settings that do not go together: when, what is wrong, and what to do. c: the configuration."""


def check_combinations(config: Config) -> None:
    """Raise RequestError if two settings do not go together."""
    words = {"c": config, "mode": _not_plain_ddp(config), "option": _plain_ddp_only(config)}
    for is_given, problem, remedy in _CONFLICTS:
        if is_given(config):
            raise RequestError(*(without_password(text.format(**words)) for text in (problem, remedy)))
