"""The command plan."""

import argparse
import json

from pipeline import machine, world
from pipeline.cli.arguments import Commands, Parser, add_command, add_recipe, count_or_range, positive_int
from pipeline.errors import RequestError


def add_commands(commands: Commands) -> None:
    parser = add_command(
        commands, "plan", _plan, "show batch sizes, steps, learning rate and memory of a run, without running it",
        "Print what RECIPE comes to with N processes on M machines: data, batch sizes, steps, learning rate,"
        " validation, checkpoints and memory. Nothing is trained.",
        "pipeline plan resnet50-90 data.root=/data --world 8",
    )  # fmt: skip
    add_recipe(parser)
    add = parser.add_argument
    help = "processes in the whole job (default 1); MIN:MAX: say which numbers divide the batch, and plan the largest"
    add("--world", type=count_or_range, default="1", metavar="N", help=help)
    add("--nodes", type=positive_int, default=1, metavar="M", help="machines in the whole job (default 1)")
    add_gpu_speed(parser)
    add(
        "--json",
        action="store_true",
        help="print JSON: the contents of a run's plan.json, and the rows below them",
    )


def add_gpu_speed(parser: Parser) -> None:
    help = "images/s that one GPU trains (a run's time/images_per_s by its GPUs): also say how many cores feed the GPUs"
    parser.add_argument("--gpu-images-per-s", type=positive_int, metavar="N", help=help)


def _plan(options: argparse.Namespace) -> str:
    from pipeline.addons.ops.plan_table import balance_rows, effective_counts, memory_row, table
    from pipeline.config.load import load
    from pipeline.data.sources import class_counts, data_size
    from pipeline.planning import divisors, make_plan

    config = load(options.recipe, options.overrides)
    this_machine = world.World(cpus=machine.available_cpus(), has_gpu=machine.has_gpu())
    low, size = options.world
    title = config.recipe
    if low:
        if low % options.nodes or size % options.nodes:
            raise RequestError(f"--world {low}:{size} does not divide by --nodes {options.nodes}")
        allowed = divisors(config, range(low, size + 1, options.nodes))
        title += f"\n  divides among   {', '.join(map(str, allowed))} processes, of {low} to {size}"
        size = allowed[-1]
    here = this_machine.resized(size, options.nodes)
    plan = make_plan(config, here, data_size(config))
    counts = class_counts(config) if plan.balance != "none" else {}

    from pipeline.model.architectures import meta_model  # imports torch: last, so that errors come at once

    model = meta_model(config.model, plan.num_classes)
    parameters = sum(param.numel() for param in model.parameters())
    rows = [memory_row(config, parameters, plan)]
    if options.gpu_images_per_s:
        from pipeline.addons.ops.machine import loader_row

        rows.append(loader_row(config, plan, here, options.gpu_images_per_s))
    if options.json:
        texts = dict(row.split(maxsplit=1) for row in rows)
        effective = dict(zip(counts, effective_counts(plan, [*counts.values()]), strict=True))
        return json.dumps(
            {**plan.to_dict(), "parameters": parameters, **texts, "effective_counts": effective}
        )
    if plan.balance != "none" and not counts:
        rows.append("  classes        not counted before the digits are made")
    elif counts:
        rows += ["  classes        by their number of images", *balance_rows(plan, counts)]
    return "\n".join([title, table(plan), *rows])
