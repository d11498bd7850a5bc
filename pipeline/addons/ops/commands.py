"""The commands recipes, doctor and verify."""

import argparse
import itertools
import signal
from typing import Any

from pipeline.cli import arguments
from pipeline.cli.arguments import Commands, add_command, add_recipe, add_trust, positive_int
from pipeline.errors import RequestError
from pipeline.guards.signals import handle
from pipeline.lazy import addon


def add_commands(commands: Commands) -> None:
    help = "list the recipes: what each trains, its target, time, processes, data, source"
    add_command(commands, "recipes", _recipes, help)

    doctor = add_command(
        commands, "doctor",
        lambda given: addon("ops.doctor").examine(
            given.recipe, given.overrides, given.world, given.nodes, as_json=given.json
        ),
        "check whether RECIPE can run on this machine, before it starts",
        "Check whether RECIPE can run on this machine: data, model, GPUs, memory, tracking and more. Prints"
        " one line per check as soon as it is done, with a remedy if it fails. Exit 0 if the recipe can run.",
        "pipeline doctor my.yaml data.root=/data --world 8 --nodes 2",
    )  # fmt: skip
    add_recipe(doctor, "name or path (default digits)", nargs="?", default="digits")
    help = "processes in the whole job (default: PET_NNODES × PET_NPROC_PER_NODE from the environment, or 1)"
    doctor.add_argument("--world", type=positive_int, metavar="N", help=help)
    help = "machines in the whole job (default: PET_NNODES, or 1)"
    doctor.add_argument("--nodes", type=positive_int, metavar="M", help=help)
    doctor.add_argument("--json", action="store_true", help="print JSON")

    verify = add_command(
        commands, "verify", _verify, "repeat a run from its receipt and compare the weights",
        "Train the run in RUN_DIR again from its receipt, in a temporary folder, and compare weights and"
        " checkpoints. Prints 'identical: …' (exit 0), or 'differs: …' (exit 1) with the first step and"
        " tensor that differ. With --against it trains nothing and compares two receipts: exit 1 if nothing"
        " explains a difference.",
        "pipeline verify runs/digits --steps 50", "pipeline verify runs/digits --steps 84-112",
        "pipeline verify runs/digits --against docs/receipts",
    )  # fmt: skip
    verify.add_argument("run_dir", type=arguments.path, metavar="RUN_DIR", help="the run's folder")
    kind = verify.add_mutually_exclusive_group()
    help = "repeat the first N steps (default: all), or B from the checkpoint of step A, which is trusted"
    kind.add_argument("--steps", type=_step_range, metavar="N|A-B", default=(0, None), help=help)
    help = "compare with the receipt of the same configuration in FOLDER, a run's folder or a folder of them"
    kind.add_argument("--against", type=arguments.path, metavar="FOLDER", help=help)
    help = "with --against: a text, which the result names if it has the digest of the weights"
    verify.add_argument("--page", type=arguments.path, metavar="FILE", help=help)
    add_trust(verify)


def _recipes(_: argparse.Namespace) -> str:
    from pipeline.config.load import RECIPES, recipe_names

    blocks = []
    for name in recipe_names():
        lines = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
        comment = itertools.takewhile(lambda line: line.startswith("# "), lines)
        blocks.append("\n  ".join([name, *(line.removeprefix("# ") for line in comment)]))
    return "\n\n".join(blocks)


def _step_range(text: str) -> tuple[int, int]:
    """Return (A, B) of A-B, or (0, N) of N."""
    low, dash, high = text.partition("-")
    if not dash:
        return 0, positive_int(text)
    if not (low.isdecimal() and high.isdecimal() and int(low) < int(high)):
        raise argparse.ArgumentTypeError(f"{text!r} is not A-B with A less than B, such as 84-112")
    return int(low), int(high)


def _verify(options: argparse.Namespace) -> Any:
    if options.against:
        return addon("ops.against").against(options.run_dir, options.against, options.page)
    if options.page:
        raise RequestError("--page needs --against", "give both, or leave --page out")
    handle(signal.default_int_handler)  # SIGTERM ends the repetition and removes its folder, as Ctrl-C does
    start, steps = options.steps
    return addon("ops.verify").verify(options.run_dir, steps, start)
