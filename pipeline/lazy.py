"""The add-ons: a request names one of them, and it is imported then.

The core imports none of them, so nobody has to read them in order to read the core.
"""

import importlib
from typing import Any

COMMANDS = (
    "pipeline.cli.run",
    "pipeline.addons.ops.plan",
    "pipeline.addons.models.commands",
    "pipeline.addons.report.commands",
    "pipeline.addons.mlflow.commands",
    "pipeline.addons.datasets.commands",
    "pipeline.addons.ops.commands",
    "pipeline.addons.deploy.commands",
)
"""The modules that add commands, in the order of the help."""

PARTS = {
    # strategies, by `parallel`; exact.py is of the core
    "dataparallel": "pipeline.addons.shard.dataparallel:DataParallelStrategy",
    "exact": "pipeline.parallel.exact:ExactStrategy",
    "fsdp": "pipeline.addons.shard.fsdp:FSDPStrategy",
    "divide into stages": "pipeline.addons.shard.plan:divide_into_stages",
    "stages": "pipeline.addons.shard.stages:StagesStrategy",
    # data, by `data.source`
    "digits": "pipeline.addons.datasets.synthetic:make_digits",
    "synthetic": "pipeline.addons.datasets.synthetic:synthetic_source",
    "pack": "pipeline.addons.datasets.pack:open_index",
    "images of a pack": "pipeline.addons.datasets.pack:open_images",
    "pack in a bucket": "pipeline.addons.store.remote:open_index",
    "images in a bucket": "pipeline.addons.store.remote:open_images",
    "folder": "pipeline.addons.datasets.manifest:open_index",
    "check validation": "pipeline.addons.datasets.manifest:check_has_validation",
    "check data is there": "pipeline.addons.datasets.place:check_is_there",
    "check place of data": "pipeline.addons.datasets.place:check_run_is_outside",
    "why not resident": "pipeline.addons.datasets.residence:why_not",
    "validation bytes": "pipeline.addons.datasets.residence:validation_bytes",
    "resident images": "pipeline.addons.datasets.resident:load_images",
    "part of a JPEG": "pipeline.addons.datasets.jpeg_restarts:part",
    "deep pixels": "pipeline.addons.datasets.depth:grey",
    "check deep colours": "pipeline.addons.datasets.depth:check_colour",
    "failed reads": "pipeline.addons.store.ranges:pop_failures",
    "mirror": "pipeline.addons.store.mirror:open_mirror",
    # models
    "function": "pipeline.addons.models.functions:own_builder",
    "no such model": "pipeline.addons.models.functions:no_such_model",
    "timm": "pipeline.addons.models.functions:timm_builder",
    "zoo": "pipeline.addons.models.zoo:MODELS",
    "best checkpoint": "pipeline.addons.models.best:best_checkpoint",
    "compile": "pipeline.addons.models.compilation:compile_model",
    "compile if it repays": "pipeline.addons.models.compilation:compile_if_it_repays",
    "check target": "pipeline.addons.models.inputs:check_target",
    "evaluation images": "pipeline.addons.models.validation:open_validation",
    "explain shortage": "pipeline.addons.models.memory:explain_shortage",
    "fit passes": "pipeline.addons.models.memory:fit_passes",
    "freeze": "pipeline.addons.models.pretrained:freeze",
    "load first weights": "pipeline.addons.models.pretrained:load_pretrained",
    # operation
    "advice": "pipeline.addons.ops.timing:ToAdvice",
    "data change": "pipeline.addons.ops.changes:describe_data_change",
    "gpu timer": "pipeline.addons.ops.timing:CudaStepTimer",
    "check tracking URI": "pipeline.addons.mlflow.uri:check_tracking_uri",
    "describe keys": "pipeline.addons.ops.keys:describe_keys",
    "explain key": "pipeline.addons.ops.keys:explain",
    "check model": "pipeline.addons.ops.model:check_model_builds",
    "check tracker's database": "pipeline.addons.mlflow.tracker:check_database_is_writable",
    "lock": "pipeline.addons.deploy.takeover:RefreshedLock",
    "part from former holder": "pipeline.addons.deploy.takeover:part_from_former_holder",
    "local rendezvous": "pipeline.addons.deploy.local_rendezvous:LocalRendezvous",
    "mfu meter": "pipeline.addons.ops.mfu:MfuMeter",
    "provenance": "pipeline.addons.ops.provenance:provenance",
    "plan table": "pipeline.addons.ops.plan_table:table",
    "profiler": "pipeline.addons.ops.profiler:ToProfile",
    "receipt": "pipeline.addons.ops.receipt:ToReceipt",
    "refuse another model": "pipeline.addons.ops.changes:refuse_another_model",
    "report": "pipeline.addons.report.samples:ToReport",
    "tracker": "pipeline.addons.mlflow.sender:ToMLflow",
    "tracking uri": "pipeline.addons.mlflow.uri:tracking_uri",
    "straggler watch": "pipeline.addons.ops.stragglers:StragglerWatch",
}
"""By the name with which the core asks for it, each part as module:attribute."""


def part(name: str) -> Any:
    """Import the part of that name, and return it."""
    module, _, attribute = PARTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
