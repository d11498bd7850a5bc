"""Compare exact mode with DistributedDataParallel, in the same group of processes.

torchrun --nproc-per-node 2 benchmarks/comm.py
"""

from argparse import Namespace
from functools import partial
from itertools import repeat

from loop import DEFAULTS, Setup, make_update, prepare, timed
from rounds import Row, add_size, interleave, run_script, show

from pipeline import supervision
from pipeline.cli.arguments import Parser, add_overrides
from pipeline.config.load import load
from pipeline.planning import make_plan


def compare(options: Namespace) -> str:
    words = [*DEFAULTS, "exact.shards=16", *options.overrides]
    config, exact = load("digits", [*words, "run.exact=false"]), load("digits", [*words, "run.exact=true"])
    setup = prepare(config, deterministic=False)
    here = supervision.this_world()
    rows: list[Row] = []
    for name, variant in (("reference", config), ("exact", exact)):
        own = Setup(variant, make_plan(variant, here, setup.source.size), setup.group, setup.source)
        step = partial(make_update(own), repeat(own.first_batch()))
        rows.append(Row(name, timed(own, options.steps, step), rows[0] if rows else None))
    interleave(rows, options.rounds)
    setup.group.shutdown()
    return show(setup.title(f", {here.size} processes, {exact.exact.shards} shards"), rows, options)


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    add_overrides(parser)
    add_size(parser)
    run_script(parser, compare, has_ranks=True)
