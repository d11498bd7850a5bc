"""Compare our training loop with and without tracking, on one batch in memory.

  python benchmarks/track.py --rounds 60 --steps 10

`reference` reports no metrics. `tracked` writes a row of the journal each `track.every`, which the
sender process sends to MLflow: to a temporary database, or where `track.uri` says.
"""

import json
from argparse import Namespace
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory

from loop import DEFAULTS, make_update, prepare, timed
from rounds import Row, add_size, interleave, run_script, show

from pipeline.addons.mlflow.sender import start_sender
from pipeline.cli.arguments import Parser, add_overrides
from pipeline.config.load import load
from pipeline.device import make_timer
from pipeline.errors import RequestError, TemporaryError
from pipeline.files import atomic_write
from pipeline.record.folder import RunFolder
from pipeline.record.journal import Journal
from pipeline.train.listener import Listener, Update


class ToJournal(Listener):
    def __init__(self, path: Path) -> None:
        self._journal = Journal(path, lambda _: None)

    def stepped(self, update: Update) -> None:
        if update.metrics:
            self._journal.log_metrics(update.step, update.metrics)


def compare(options: Namespace) -> str:
    words = [*DEFAULTS, "track.uri=auto", "track.required=true", "track.experiment=bench", *options.overrides]
    config = load("digits", words)
    setup = prepare(config, deterministic=config.is_deterministic_on_gpus)
    plan, batch = setup.plan, setup.first_batch()
    with TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch) / "bench")
        folder.path.mkdir()
        atomic_write(folder.config, config.to_yaml().encode())
        atomic_write(folder.plan, json.dumps(plan.to_dict()).encode())
        silent = replace(setup, plan=replace(plan, log_every=plan.last_step))
        update = partial(make_update(silent), repeat(batch))
        reference = Row("reference", timed(silent, options.steps, update))
        timer = make_timer(setup.group.device)
        step = partial(make_update(setup, ToJournal(folder.journal), timer=timer), repeat(batch))
        tracked = Row("tracked", timed(setup, options.steps, step), reference)
        tracker = start_sender(config, folder)  # after the loop has made the journal
        if tracker is None:
            raise RequestError("there is nothing to measure with track.uri=none: leave it out")
        tracker.wait_until_ready()
        before = tracker.cpu_seconds()
        interleave([reference, tracked], options.rounds)
        sender_seconds = tracker.cpu_seconds() - before
        if not tracker.close(lambda _: None):
            raise TemporaryError("MLflow did not receive every row, so the result would be wrong: try again")
    ms_per_step = 1000 * timer.seconds["tracking"] / (options.rounds + 1) / options.steps
    sender_share = sender_seconds / sum(plan.global_batch * options.steps / speed for speed in tracked.speeds)
    tracked.remark = f"{ms_per_step:.2f} ms per step in the loop, {sender_share:.1%} of a CPU in the sender"
    return show(setup.title(f", metrics every {plan.log_every} steps"), [reference, tracked], options)


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    add_overrides(parser)
    add_size(parser, steps=20)
    run_script(parser, compare)
