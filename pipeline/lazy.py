"""Parts that few runs need: a request names one of them, and it is imported then.

The core imports none of them, so nobody has to read them in order to read the core.
"""

import importlib
from typing import Any

PARTS = {
    "dataparallel": "pipeline.parallel.dataparallel:DataParallelStrategy",
    "exact": "pipeline.parallel.exact:ExactStrategy",
    "fsdp": "pipeline.parallel.fsdp:FSDPStrategy",
    "stages": "pipeline.parallel.stages:StagesStrategy",
    "digits": "pipeline.data.synthetic:make_digits",
    "synthetic": "pipeline.data.synthetic:synthetic_source",
    "pack": "pipeline.data.pack:open_index",
    "images of a pack": "pipeline.data.pack:open_images",
    "pack in a bucket": "pipeline.data.remote:open_index",
    "images in a bucket": "pipeline.data.remote:open_images",
    "function": "pipeline.model.functions:own_builder",
    "timm": "pipeline.model.functions:timm_builder",
    "zoo": "pipeline.model.zoo:MODELS",
}
"""By the name with which the core asks for it, each part as module:attribute."""


def part(name: str) -> Any:
    """Import the part of that name, and return it."""
    module, _, attribute = PARTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
