"""The add-ons: `part("name")` imports one from `pipeline.addons` when the core asks for it.

The core imports none of them: what trains can be read without them. Some are parts of every run
(its metrics, its terminal), the others are named by a request.
"""

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PARTS = {
    # strategies, by `parallel`; exact.py is of the core
    "dataparallel": "pipeline.addons.shard.dataparallel:DataParallelStrategy",
    "exact": "pipeline.parallel.exact:ExactStrategy",
    "fsdp": "pipeline.addons.shard.fsdp:FSDPStrategy",
    "divide into stages": "pipeline.addons.shard.plan:divide_into_stages",
    "stages": "pipeline.addons.shard.stages:StagesStrategy",
    # data
    "data root": "pipeline.addons.datasets.sources:data_root",
    "open source": "pipeline.addons.datasets.sources:open_source",
    "received source": "pipeline.addons.datasets.sources:received_source",
    "picture": "pipeline.addons.datasets.images:Picture",
    "classes to draw from": "pipeline.addons.datasets.balance:Classes",
    "augmentation policy": "pipeline.addons.datasets.policies:transforms_of",
    "open data": "pipeline.addons.datasets.place:open_data",
    "why not resident": "pipeline.addons.datasets.resident_limits:why_not",
    "resident images": "pipeline.addons.datasets.resident_images:load_images",
    "failed reads": "pipeline.addons.store.ranges:pop_failures",
    "mirror": "pipeline.addons.store.mirror:open_mirror",
    # models
    "function": "pipeline.addons.models.functions:own_builder",
    "no such model": "pipeline.addons.models.functions:no_such_model",
    "trust": "pipeline.addons.models.trust:trust",
    "timm": "pipeline.addons.models.functions:timm_builder",
    "zoo": "pipeline.addons.models.zoo:MODELS",
    "compilation": "pipeline.addons.models.compilation:compilation",
    "missing to compile": "pipeline.addons.models.compilation:missing_to_compile",
    "compiled model": "pipeline.addons.models.compilation:compiled_model",
    "compile": "pipeline.addons.models.compilation:compile_model",
    "compile if it repays": "pipeline.addons.models.compilation:compile_if_it_repays",
    "parse arguments": "pipeline.addons.models.arguments:parse_arguments",
    "check archive": "pipeline.addons.models.archive:check_archive",
    "evaluator": "pipeline.addons.models.evaluator:Evaluator",
    "explain shortage": "pipeline.addons.models.memory:explain_shortage",
    "fit passes": "pipeline.addons.models.memory:fit_passes",
    "freeze": "pipeline.addons.models.pretrained:freeze",
    "lamb optimizer": "pipeline.addons.models.timm_optimizers:make_lamb",
    "muon optimizer": "pipeline.addons.models.timm_optimizers:make_muon",
    "load first weights": "pipeline.addons.models.pretrained:load_pretrained",
    # operation
    "advice": "pipeline.addons.run.timing:ToAdvice",
    "data change": "pipeline.addons.ops.changes:describe_data_change",
    "error of standard output": "pipeline.addons.run.streams:output_error",
    "journal": "pipeline.addons.run.journal:ToJournal",
    "lose unread log": "pipeline.addons.run.streams:lose_unread_log",
    "tolerate failures of streams": "pipeline.addons.run.streams:tolerate_failures",
    "divergence watch": "pipeline.addons.run.divergence:DivergenceWatch",
    "facts": "pipeline.addons.run.provenance:facts",
    "exact roots": "pipeline.addons.run.portable:use_exact_roots",
    "gpu timer": "pipeline.addons.run.timing:CudaStepTimer",
    "check model name": "pipeline.addons.mlflow.uri:check_model_name",
    "check tracking URI": "pipeline.addons.mlflow.uri:check_tracking_uri",
    "describe keys": "pipeline.addons.ops.keys:describe_keys",
    "explain key": "pipeline.addons.ops.keys:explain",
    "check model": "pipeline.addons.ops.model:check_model_builds",
    "check tracker's database": "pipeline.addons.mlflow.tracker:check_database_is_writable",
    "changes to recipe": "pipeline.addons.ops.fixed_keys:changes_to_recipe",
    "refuse changes": "pipeline.addons.ops.fixed_keys:refuse_changes",
    "show": "pipeline.addons.ops.credentials:show",
    "without password": "pipeline.addons.ops.credentials:without_password",
    "training keys": "pipeline.addons.ops.fixed_keys:training_keys",
    "check combinations": "pipeline.addons.ops.conflicts:check_combinations",
    "start processes": "pipeline.addons.deploy.processes:start_processes",
    "refuse what 0.2 had": "pipeline.addons.ops.replaced:refuse_replaced",
    "die with agent": "pipeline.addons.deploy.processes:die_with_agent",
    "config after restart": "pipeline.addons.deploy.restart:config_after_restart",
    "lock": "pipeline.addons.deploy.takeover:Lock",
    "part from former holder": "pipeline.addons.deploy.takeover:part_from_former_holder",
    "metrics": "pipeline.addons.run.metrics:Metrics",
    "portability": "pipeline.addons.run.portable:portability",
    "plan table": "pipeline.addons.ops.plan_table:table",
    "progress": "pipeline.addons.run.progress:ToTerminal",
    "trace": "pipeline.addons.run.trace:ToTrace",
    "profiler": "pipeline.addons.run.profiler:ToProfile",
    "receipt row": "pipeline.addons.run.receipt:receipt_row",
    "receipt": "pipeline.addons.run.receipt:ToReceipt",
    "refuse another model": "pipeline.addons.ops.changes:refuse_another_model",
    "set what portable runs need": "pipeline.addons.run.portable:prepare",
    "report": "pipeline.addons.report.samples:ToReport",
    "tracker": "pipeline.addons.mlflow.sender:ToMLflow",
    "tracking uri": "pipeline.addons.mlflow.uri:tracking_uri",
}
"""By the name with which the core asks for it, each part as module:attribute."""


def part(name: str) -> Any:
    """Import the part of that name, and return it."""
    module, _, attribute = PARTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


@contextmanager
def freeze_imports() -> Iterator[None]:
    """Freeze the objects that the block imports, so that the garbage collector never scans them.

    Scanning takes a tenth of a start's time. During training a collection on one rank delays all
    ranks, and in a forked worker it copies every page that it touches.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
