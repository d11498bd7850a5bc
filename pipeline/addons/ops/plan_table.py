"""The plan as people read it: one row per quantity, with the arithmetic behind it."""

import math

from pipeline.addons.datasets.resident_limits import mib
from pipeline.addons.shard.plan import fsdp_slices
from pipeline.config.schema import Config
from pipeline.errors import count_of
from pipeline.plan import Plan, Resources


def table(plan: Plan, memory: str = "") -> str:
    """Return the plan as text, one line per quantity."""
    nodes = plan.world // plan.local_world
    epochs = plan.last_step / plan.steps_per_epoch
    total = f" of {plan.total_steps:,}" if plan.last_step < plan.total_steps else ""
    growth = ""
    if plan.first_size < plan.image_size:
        growth = f", {plan.first_size} px up to epoch {plan.grows_from:g}, growing until {plan.grows_until:g}"
    rest = f"{plan.train_images % plan.global_batch:,} images left out, different ones each epoch"
    if plan.balance != "none":
        rest = f"images drawn with replacement, data.balance={plan.balance}"
    repeats = f", {plan.repeats} views of each in a batch" if plan.repeats > 1 else ""
    warmup = f", {plan.warmup_steps:,} steps of warm-up" if plan.warmup_steps else ""
    passes = f"{plan.micro_batch * plan.stages} images = {plan.micro_batches} × {plan.bn_batch}"
    stages = f"{plan.world} = {plan.world // plan.stages} × {plan.stages} (copies × stages); a copy's pass of"
    stages += f" {passes} (micro-batches × images)"
    rows = {
        "data": plan.describe(),
        "world": f"{count_of(plan.world, 'process', 'es')} on {count_of(nodes, 'node')},"
        f" {count_of(plan.threads, 'thread')} each",
        "batch": f"{plan.global_batch} = {plan.world} × {plan.accumulate} × {plan.micro_batch}"
        " (processes × accumulation × images a pass)",
        "stages": stages if plan.stages > 1 else "",
        "workers": f"{plan.workers} a process = ⌈{plan.workers_per_node} a node / {plan.local_world}⌉,"
        f" {mib(plan.prefetch_bytes)} of batches ready on a node",
        "epoch": f"{plan.steps_per_epoch:,} steps = ⌊{plan.train_images:,} / {plan.global_batch}⌋ ({rest})",
        "steps": f"{plan.last_step:,}{total} ({epochs:.4g} epochs)",
        "images": f"{plan.image_size} px{growth}{repeats}; {plan.eval_size} px in validation",
        "resident": f"no: {plan.not_resident}" if plan.not_resident else "yes, on the training device",
        "compiled": ("yes: " if plan.compiles else "no: ") + plan.compile_reason,
        "portable": ("yes: " if plan.is_portable else "no: ") + plan.portable_reason
        if plan.portable_reason
        else "",
        "normalised": f"mean and deviation {plan.normalised}" if plan.normalised else "",
        "frozen": f"parts of the model, for {plan.unfreeze_step:,} steps" if plan.unfreeze_step else "",
        "loss": "binary cross-entropy of each class: pictures have several labels" if plan.label_sets else "",
        "learning rate": f"{plan.peak_lr:.6g} = {plan.peak_lr * 256 / plan.global_batch:.6g} ×"
        f" {plan.global_batch} / 256 (optimizer.lr is for 256 images), {plan.schedule}{warmup}",
        "validation": f"every {plan.evaluate_every:,} steps, {math.ceil(plan.val_images / plan.eval_batch):,}"
        f" batches of {plan.eval_batch}, each image once",
        "patience": f"ends after {plan.patience} evaluations without a better one" if plan.patience else "",
        "checkpoint": f"every {plan.checkpoint_every:,} steps",
        "memory": memory,
    }
    named = {name: text for name, text in rows.items() if text}
    width = max(map(len, named))
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in named.items())


def describe_memory(config: Config, parameters: int, plan: Resources) -> str:
    """Return the memory of weights, gradients and optimizer per process, for the table."""
    moments = config.optimizer.moments
    copies = 2 + moments
    total = 4 * parameters * copies
    held = f"weights, gradients, {moments} of the optimizer"
    row = f"{parameters:,} parameters × 4 bytes × {copies} ({held}) = {mib(total)}"
    parts = {"fsdp": fsdp_slices(config, plan), "stages": config.stages.count}.get(config.parallel, 1)
    if parts == 1:
        return f"{row} a process, plus activations"
    share = f"of which a process has about 1/{parts} = {mib(total // parts)}, plus activations"
    more = f"rank 0 has {mib(4 * parameters * (1 + moments))} more in host memory while it saves"
    return f"{row}, {share}; {more}, twice if on a CPU"
