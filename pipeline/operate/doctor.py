"""What would go wrong here, before it does: the checks that a start makes, made without starting."""

from pipeline import world
from pipeline.config import load
from pipeline.operate import launch
from pipeline.verdict import RequestError


def check(recipe: str, overrides: list[str], num_processes: int, num_nodes: int) -> str:
    """That the recipe can run on this machine as one of `num_nodes`; raises the Verdict that a start would end with.

    Changes nothing, takes no lock, and needs no torch, so it may run beside the training itself: an init container does.
    """
    if num_processes % num_nodes:
        raise RequestError(
            f"--world {num_processes} does not divide by --nodes {num_nodes}: give the same number to each"
        )
    config = load(recipe, overrides)
    cleared = launch.preflight(config, world.here().resized(num_processes, num_processes // num_nodes))
    return f"{config.recipe} can run here, in {config.run_dir}\n{cleared.plan.table()}"
