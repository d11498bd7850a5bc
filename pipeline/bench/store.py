"""`pipeline bench store`: images/s of our data loader from a bucket, against other loaders.

All read the same pictures from the same store, with the same number of workers and the same batch.
The ratios refer to our loader on a local pack. Epoch 1 begins with an empty cache, in epoch 2
everything is in it; ours is also measured without a cache. The CPU time is stated by itself: a
store on the same machine takes the loaders' cores, and slows down those most that read the fastest.
"""

import json
import secrets
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from pipeline.bench.data import SIZE, WORKERS, link_images, open_loader, per_image, start_peer, time_loader
from pipeline.bench.rounds import Row, TurnError, figures, interleave, table
from pipeline.data.access import check_folder
from pipeline.data.loader import TrainBatches
from pipeline.data.store import Store
from pipeline.operate import pack

_BATCH = 64
_PREFETCH = 2  # batches a worker, the default of data.prefetch
_WARM_UP = 12  # batches: more than all workers read ahead, so that connections are open
_PEERS = {"streaming": "mosaicml-streaming", "webdataset": "webdataset"}
"""Loader in peers.py -> its package."""


def bench_store(images: Path, place: str, rounds: int, steps: int, *, peers: Path | None, as_json: bool) -> str:
    """Return images/s and CPU time of each loader, as a table or as JSON.

    place: s3://bucket/prefix, below which objects are written and removed again.
    peers: virtual environment of the other loaders, which is made if needed; None: without them.
    """
    check_folder(images, f"--images {images}", "name an image folder, preferably of photos")
    store = Store(f"{Store(place)}/bench-{secrets.token_hex(4)}")
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        stack.callback(_empty, store)
        _empty(store)  # a wrong request ends here, before anything is packed
        in_one_epoch = _BATCH * (_WARM_UP + steps + WORKERS * _PREFETCH)
        num_images = link_images(images, folder / "images", at_least=-(-in_one_epoch * 10 // 9))
        pack.pack(folder / "images", folder / "pack", "lossless", 0.1)
        for file in sorted((folder / "pack").iterdir()):
            store.upload(file, f"pack/{file.name}")
        local = Row("local pack", partial(_turn, folder / "pack", None, "", steps))
        rows = [local, Row("bucket, no cache", partial(_turn, f"{store}/pack", None, "", steps), local)]
        for name in ("bucket", *(_PEERS if peers else ())):
            for epoch in ("1", "2"):
                row = Row(f"{name}, epoch {epoch}", None, local)
                rows.append(row)
                cache = folder / f"{name}-{epoch}"
                if not peers or name == "bucket":
                    row.turn = partial(_turn, f"{store}/pack", cache, epoch, steps)
                    continue
                words = (name, folder / "images/train", cache, _BATCH, SIZE, WORKERS, f"{store}/{cache.name}", epoch)
                try:
                    turn, _ = start_peer(peers, _PEERS[name], words, steps, stack, _WARM_UP)
                    row.turn = partial(per_image, turn, _BATCH * steps)
                except TurnError as error:
                    row.failure = str(error)
        interleave(rows, rounds, show_progress=True)
    title = f"{num_images:,} images, {WORKERS} workers, batch {_BATCH}, {SIZE} px"
    if as_json:
        return json.dumps({"rows": [figures(row) | {"remark": row.cost} for row in rows]})
    return table(f"{title}; {rounds} interleaved rounds of {steps} batches", rows)


def _turn(root: Path | str, cache: Path | None, epoch: str, steps: int) -> tuple[float, float]:
    """Run a turn of our loader; return its images/s, and the CPU seconds of an image."""
    if cache and epoch == "1":
        shutil.rmtree(cache, ignore_errors=True)
    is_filled = cache is None or epoch == "1" or cache.exists()
    config, plan, source = open_loader("pack", root, _BATCH, *([f"data.cache={cache}"] if cache else []))
    if not is_filled:
        everything = range(len(source.train))
        source.train.expect(everything)
        for i in everything:
            source.train.read(i)
    return time_loader(TrainBatches(source.train, config, plan, 0), plan, steps, _WARM_UP)


def _empty(store: Store) -> None:
    for entry in list(store.list()):
        store.delete(entry.name)
