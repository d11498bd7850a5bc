"""The arithmetic of stages and of FSDP's slices, without torch."""

from pipeline.config.schema import Config
from pipeline.errors import RequestError
from pipeline.plan import Resources
from pipeline.planning import near_divisors


def fsdp_slices(config: Config, plan: Resources) -> int:
    """Return the number of slices that FSDP cuts a copy of the weights into."""
    return plan.world if config.fsdp.shard == "all" else plan.local_world


def divide_into_stages(config: Config, world: int, micro_batch: int) -> tuple[int, int]:
    """Return the number of stages and of micro-batches."""
    count, parts = config.stages.count, config.stages.micro_batches
    if world % count:
        fewer = world // count * count
        remedy = f"worlds that work are {', '.join(str(near) for near in (fewer, fewer + count) if near)}"
        raise RequestError(f"stages.count={count} does not divide {world} processes", remedy)
    images = count * micro_batch
    if parts is None:
        return count, max(parts for parts in range(1, 2 * count + 1) if images % parts == 0)
    if images % parts or (config.stages.schedule == "1f1b" and parts < count):
        problem = f"stages.micro_batches={parts} does not divide the {images} images of a copy's pass, or is"
        problem += f" less than stages.count={count}, and 1f1b needs one per stage"
        remedy = f"the nearest that work are {near_divisors(images, parts)}; or use stages.schedule=gpipe"
        raise RequestError(problem, remedy)
    return count, parts
