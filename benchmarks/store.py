"""Compare our data loader from a bucket with the local pack.

  python benchmarks/store.py s3://my-data/scratch --images data/imagenette/train

All read the same pictures from the same store, with the same number of workers and the same batch.
The ratios refer to our loader on a local pack. It is also measured without a cache, and in epoch 1,
whose cache is empty at the start.
"""

import secrets
import shutil
from argparse import Namespace
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from data import SIZE, WORKERS, add_flags, link_images, open_loader, time_loader
from rounds import Row, interleave, run_script, show

from pipeline.addons.datasets import write_pack as pack
from pipeline.addons.store.bucket import Store
from pipeline.cli.arguments import Parser
from pipeline.data.loader import TrainBatches

_BATCH = 64
_WARM_UP = 12  # batches: more than all workers read ahead, so that connections are open


def compare(options: Namespace) -> str:
    store = Store(f"{Store(options.place)}/bench-{secrets.token_hex(4)}")
    steps = options.steps
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        # so many that a turn stays within an epoch
        num_images = link_images(options.images, folder / "images", at_least=2000)
        stack.callback(_empty, store)
        _empty(store)  # a wrong request ends here, before anything is packed
        pack.pack(folder / "images", folder / "pack", "lossless", 0.1)
        for file in sorted((folder / "pack").iterdir()):
            store.upload(file, f"pack/{file.name}")
        local = Row("local pack", partial(_turn, folder / "pack", None, steps))
        bucket = partial(_turn, f"{store}/pack")
        rows = [local, Row("bucket, no cache", partial(bucket, None, steps), local)]
        rows.append(Row("bucket, epoch 1", partial(bucket, folder / "cache", steps), local))
        interleave(rows, options.rounds)
    return show(f"{num_images:,} images, {WORKERS} workers, batch {_BATCH}, {SIZE} px", rows, options)


def _turn(root: Path | str, cache: Path | None, steps: int) -> tuple[float, float]:
    """Run a turn of our loader; return its images/s, and the CPU seconds of an image."""
    if cache:
        shutil.rmtree(cache, ignore_errors=True)
    config, plan, source = open_loader("pack", root, _BATCH, *([f"data.cache={cache}"] if cache else []))
    return time_loader(TrainBatches(source.train, config, plan, 0), plan, steps, _WARM_UP)


def _empty(store: Store) -> None:
    for entry in list(store.list()):
        store.delete(entry.name)


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    parser.add_argument("place", metavar="s3://BUCKET/PREFIX", help="where to write; it is removed again")
    add_flags(parser)
    run_script(parser, compare)
