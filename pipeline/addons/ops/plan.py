"""The command plan."""

import argparse
import json

from pipeline import machine, world
from pipeline.cli.arguments import Commands, add_command, add_recipe, positive_int


def add_commands(commands: Commands) -> None:
    parser = add_command(
        commands, "plan", _plan,
        "show batch sizes, steps, learning rate and memory of a run, without running it",
        "Print what RECIPE comes to with N processes on M machines: data, batch sizes, steps, learning rate,"
        " validation, checkpoints and memory. Nothing is trained.",
        "pipeline plan resnet50-90 data.root=/data --world 8",
    )  # fmt: skip
    add_recipe(parser)
    add = parser.add_argument
    add("--world", type=positive_int, default=1, metavar="N", help="processes in the whole job (default 1)")
    add("--nodes", type=positive_int, default=1, metavar="M", help="machines in the whole job (default 1)")
    add("--json", action="store_true", help="print JSON: the contents of a run's plan.json, and the memory")


def _plan(options: argparse.Namespace) -> str:
    from pipeline.addons.datasets.sources import data_size
    from pipeline.addons.ops.plan_table import describe_memory, table
    from pipeline.config.load import load
    from pipeline.planning import make_plan

    config = load(options.recipe, options.overrides)
    this_machine = world.World(cpus=machine.available_cpus(), has_gpu=machine.has_gpu())
    plan = make_plan(config, this_machine.resized(options.world, options.nodes), data_size(config))

    # imports torch: last, so that errors come at once
    from pipeline.addons.models.functions import meta_model

    parameters = sum(param.numel() for param in meta_model(config.model, plan.num_classes).parameters())
    memory = describe_memory(config, parameters, plan)
    if options.json:
        return json.dumps({**plan.to_dict(), "parameters": parameters, "memory": memory})
    return f"{config.recipe}\n{table(plan, memory)}"
