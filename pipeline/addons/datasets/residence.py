"""The rule by which training images live on the device, see `data.resident`. No torch here."""

from pipeline.config.schema import Config
from pipeline.errors import RequestError, mib
from pipeline.plan import Plan
from pipeline.planning import RESIDENT_BYTES
from pipeline.world import World


def why_not(config: Config, plan: Plan, world: World) -> str:
    """Return why the training images do not live on the device, or "" if they do.

    Raises RequestError if data.resident=on asks for what cannot be.
    """
    mode, options = config.data.resident, config.augment
    if mode == "off":
        return "data.resident=off"
    impossible = {
        "augment.pad=0 crops and resizes each image anew": not options.pad,
        f"augment.policy={options.policy} changes colours and shapes": options.policy != "none",
        "augment.first_size changes their size": plan.first_size < plan.image_size,
    }
    num_bytes = plan.train_images * 3 * plan.image_size**2
    limit = RESIDENT_BYTES["cuda" if world.uses_gpu(config.run.device) else "cpu"]
    too_dear = {
        f"{mib(num_bytes)} of pixels exceed {mib(limit)}": num_bytes > limit,
        "the run is shorter than an epoch": plan.last_step < plan.steps_per_epoch,
    }
    if mode == "on":
        for reason in (reason for reason, holds in impossible.items() if holds):
            raise RequestError(
                f"data.resident=on: images cannot stay on the device: {reason}", "set it to auto"
            )
        return ""
    return next((reason for reason, holds in (impossible | too_dear).items() if holds), "")
