"""The data stream is the same, pixel for pixel, on any machine and any number of processes."""

import hashlib
import os
import re
import signal
import time
from collections.abc import Generator, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_cuda import FakeStream
from harness import children, kill, plan_of
from streams import GlobalBatch, joined, stream, train_batches
from torch.nn import functional
from torchvision.transforms import v2

from pipeline.addons.datasets import policies
from pipeline.addons.datasets.images import Picture
from pipeline.config.sections import Augment
from pipeline.data import loader, workers
from pipeline.data.augment import SampleKey, augment
from pipeline.data.batch import Batch
from pipeline.data.loader import batches
from pipeline.data.order import Order
from pipeline.data.transfer import _to_gpu, to_device
from pipeline.data.workers import Allocate
from pipeline.errors import StorageError
from pipeline.plan import DataSize
from pipeline.randomness import derive

STEPS = range(26, 32)  # an epoch of the digits in batches of 48 is 29 steps; sizes grow at its end
ALL_WAYS = list(product((1, 2, 4), (0, 2, 4), (1, 2, 4)))
WAYS = ((1, 0, 4), (1, 2, 1), (2, 0, 2), (4, 2, 1))
FEATURES = {
    "none": "",
    "policy": "augment.policy=randaugment augment.erase=0.5 augment.mixup=0.2 augment.cutmix=1",
    "views and sizes": "augment.repeats=3 augment.size=96 augment.first_size=32"
    " augment.growth=[0.5epoch,1epoch] augment.mixup=0.2",
    "shifts and flips": "augment.size=32 augment.pad=4 augment.flip=0.5",
    "shifted views": "augment.size=32 augment.pad=4 augment.alternate_flips=true augment.repeats=2"
    " augment.mixup=0.2 augment.cutmix=1",
    "shifts and erasing": "augment.size=32 augment.pad=4 augment.erase=0.5 data.balance=uniform",
    "uniform draws": "data.balance=uniform augment.repeats=2 augment.mixup=0.2",
    "draws by square roots": "data.balance=sqrt augment.repeats=2 augment.mixup=0.2",
}
OTHERS = [f"augment.policy={name} augment.mixup=0.2" for name in ("autoaugment", "trivialaugment", "augmix")]


@pytest.fixture(scope="module")
def reference(digits: Path) -> list[GlobalBatch]:
    """Return the stream of one process without workers."""
    return stream(digits, STEPS, "data.workers=0")[0]


@pytest.mark.fault("F3")
@pytest.mark.parametrize(
    "words",
    [*(pytest.param(words, id=name) for name, words in FEATURES.items()),
     *(pytest.param(words, marks=pytest.mark.full) for words in OTHERS)],
)  # fmt: skip
def test_every_global_batch_is_the_same_however_it_is_made(
    digits: Path, reference: list[GlobalBatch], words: str, full: bool
) -> None:
    options = words.split()
    expected, _ = stream(digits, STEPS, *options, "data.workers=0")
    common = {batch.pixels for batch in expected} & {batch.pixels for batch in reference}
    assert len(common) == (0 if words else len(STEPS))
    ways = ALL_WAYS if full and not words else WAYS
    # images that are only shifted can live on the training device
    residents = ("off", "on") if "augment.pad" in words else ("off",)
    for resident, (world, num_workers, accumulate) in product(residents, ways):
        more = (f"data.resident={resident}", f"data.workers={num_workers}", f"data.prefetch={world}",
                f"batch.accumulate={accumulate}")  # fmt: skip
        assert stream(digits, STEPS, *options, *more, world=world)[0] == expected
    last = (f"data.resident={residents[-1]}", "data.workers=1")
    assert stream(digits, STEPS[1:], *options, *last)[0] == expected[1:]


def test_a_policy_gives_what_torchvision_gives() -> None:
    crop = torch.randint(256, (33, 47, 3), dtype=torch.uint8).permute(2, 0, 1)
    for kind in (v2.TrivialAugmentWide, v2.RandAugment, v2.AutoAugment, v2.AugMix):
        for seed in range(30):
            torch.manual_seed(seed)
            expected = kind()(crop)
            torch.manual_seed(seed)
            name = kind.__name__.lower().removesuffix("wide")
            assert torch.equal(policies.transform(crop, name, 9, 0), expected)
    both = crop, crop.as_subclass(policies._Crop)
    for change in range(-50, 51):
        assert torch.equal(*(v2.functional.adjust_sharpness(image, 1 + change / 50) for image in both))
        for shift in ([change, 0], [0, change]):
            moved = (v2.functional.affine(image, 0.0, shift, 1.0, [0.0, 0.0]) for image in both)
            assert torch.equal(*moved)


def test_a_shift_fills_by_reflection_and_a_flip_alternates() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 16), np.uint8)
    padded = functional.pad(torch.from_numpy(pixels).float(), (3, 3, 3, 3), mode="reflect").to(torch.uint8)
    shifted = {
        padded[:, top : top + 16, left : left + 16].numpy().tobytes(): (top, left)
        for top, left in product(range(7), range(7))
    }
    options = Augment(pad=3, alternate_flips=True, size=16)
    images = [augment(Picture.open(pixels), options, 16, 7, SampleKey(epoch, 5, 0)) for epoch in range(40)]
    first = images[0].numpy().tobytes() in shifted
    for epoch, image in enumerate(images):
        flipped = image.flip(-1).contiguous()
        found = [made.numpy().tobytes() in shifted for made in (image, flipped)]
        assert found == [first == (epoch % 2 == 0), first == (epoch % 2 == 1)], "in every other epoch"
    assert len({image.numpy().tobytes() for image in images}) > 20, "of 98"
    assert 400 < sum(derive(7, "flip", sample) % 2 for sample in range(1000)) < 600, "half are flipped first"


@pytest.mark.parametrize(("balance", "weights"), [("uniform", (1, 1, 0, 1)), ("sqrt", (3, 1, 0, 10))])
def test_classes_are_drawn_by_their_shares(balance: str, weights: tuple[int, ...]) -> None:
    counts = (900, 100, 0, 10_000)
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(4, dtype=np.int32), counts))
    _, plan = plan_of(f"data.balance={balance}", "batch.global=100", data=DataSize(11_000, 10, 4))
    order = Order(plan, 0, labels)
    firsts = []
    for epoch in range(2):
        draws = [order.draws(step) for step in range(epoch * 110, (epoch + 1) * 110)]
        ids, views = (np.concatenate(parts) for parts in zip(*draws, strict=True))
        drawn = np.bincount(labels[ids], minlength=4)
        assert drawn == pytest.approx(np.array(weights) * 11_000 / sum(weights), rel=0.06)
        pairs = set(zip(ids.tolist(), views.tolist(), strict=True))
        assert len(pairs) == 11_000, "what is drawn again is another view"
        assert max(views) > 5
        assert len({sample for sample in ids.tolist() if labels[sample] == 1}) == 100
        firsts.append(ids[:100].tolist())
    assert firsts[0] != firsts[1]
    rare = int(np.flatnonzero(labels == 1)[0])
    replacements = [order.replacement(3, rare, attempt) for attempt in range(40)]
    assert len(set(replacements)) > 5
    assert {int(labels[sample]) for sample in replacements} == {1}, "as the bad image's"


def test_repeated_views_of_an_image_differ_and_are_in_the_same_batch(digits: Path) -> None:
    data = train_batches(digits, "augment.repeats=3")
    batch, plan = data[0], data.plan
    first, second, third = batch.ids.view(3, 16).tolist()
    assert first == second == third
    assert len(set(first)) == 16
    assert len({image.numpy().tobytes() for image in batch.images}) > 40, "some crops of 8 × 8 are equal"
    assert torch.equal(train_batches(digits)[0].images[:16], batch.images[:16])
    draws = [Order(plan, 0).draws(step) for step in range(plan.steps_per_epoch)]
    pairs = [pair for ids, views in draws for pair in zip(ids.tolist(), views.tolist(), strict=True)]
    assert len(pairs) == len(set(pairs)) == 48 * plan.steps_per_epoch, "an epoch has every view once"
    assert len({sample for sample, _ in pairs}) == len(pairs) // 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_arrive_unchanged_on_a_gpu(digits: Path) -> None:
    data = train_batches(digits, "data.workers=2")
    arrived = list(to_device(batches(data, STEPS, data.plan, pin=True), torch.device("cuda")))
    for step, batch in zip(STEPS, arrived, strict=True):
        assert batch.images.device.type == "cuda"
        assert torch.equal(batch.images.cpu(), data[step].images)
        assert torch.equal(batch.labels.cpu(), data[step].labels)


def test_a_gpu_gets_a_batch_before_the_loader_is_asked_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fake in (("Stream", FakeStream), ("current_stream", FakeStream), ("stream", nullcontext)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    asked: list[int] = []
    made = (asked.append(position) or Batch(*torch.zeros(5, 1), []) for position in range(3))
    for position, batch in enumerate(_to_gpu(made, torch.device("meta"))):
        assert (batch.images.is_meta, asked[-1]) == (True, position)


def test_the_trace_is_the_digest_over_pixels_and_label(digits: Path) -> None:
    batch = train_batches(digits)[0]
    rows = [
        hashlib.sha256(image.contiguous().numpy().tobytes() + label.to_bytes(8, "little")).digest()
        for image, label in zip(batch.images, batch.labels.tolist(), strict=True)
    ]
    assert joined([batch]).trace == hashlib.sha256(b"".join(rows)).hexdigest()


@pytest.mark.parametrize("images", [48, 97, 1000])
def test_an_epoch_uses_each_image_at_most_once_and_as_many_as_fit(images: int) -> None:
    _, plan = plan_of("batch.global=48", "train.epochs=3", data=DataSize(images, 10, 10))
    order, steps = Order(plan, 0), plan.steps_per_epoch
    epochs = []
    for epoch in range(3):
        ids = np.concatenate([order.ids(step) for step in range(epoch * steps, (epoch + 1) * steps)]).tolist()
        assert len(ids) == len(set(ids)) == images // 48 * 48
        assert set(ids) <= set(range(images))
        epochs.append(ids)
    assert epochs[0] != epochs[1] != epochs[2]
    assert Order(plan, 1).ids(0).tolist() != epochs[0][:48], "another seed, another order"


@pytest.mark.fault("A5")
def test_a_killed_loader_worker_costs_no_batch(digits: Path, reference: list[GlobalBatch]) -> None:
    # with more batches ahead, one may have made its last
    data = train_batches(digits, "data.workers=2", "data.prefetch=1")
    before = set(children(os.getpid()))
    made = []
    for batch in batches(data, STEPS, data.plan, pin=False):
        made.append(joined([batch]))
        if len(made) == 2:
            first, _ = sorted(set(children(os.getpid())) - before)
            kill(first, signal.SIGKILL)
    assert made == reference
    assert set(children(os.getpid())) <= before


def memory_of_batches() -> set[str]:
    """Return the inodes of the batches that this process maps."""
    return set(re.findall(r"(\d+) +/memfd:batch", Path("/proc/self/maps").read_text()))


def test_a_batch_keeps_its_memory_as_long_as_something_refers_to_it(digits: Path) -> None:
    data, held, seen = train_batches(digits, "data.workers=2"), [], set[str]()
    descriptors = len(os.listdir("/proc/self/fd"))
    for step, batch in enumerate(batches(data, range(40), data.plan, pin=False)):
        seen |= memory_of_batches()
        if step % 5 == 0:
            held.append((step, batch.images[7:9]))
            assert len(os.listdir("/proc/self/fd")) <= descriptors + 2 * 3, "a pipe and what ends a worker"
    for step, images in held:
        assert torch.equal(images, data[step].images[7:9]), "it was not overwritten"
    assert len(seen) <= len(held) + 2 * (data.plan.prefetch + 2), "the memory of the others was used again"
    del batch
    assert len(memory_of_batches()) == len(held), "and then given back"


class FailingMaker:
    """Kills its process at position 1, sleeps at 2, raises at 3. Labels are numbers of threads."""

    def make_batch(self, position: int, following: Sequence[int], allocate: Allocate) -> Batch:
        if position == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if position == 2:
            time.sleep(600)
        if position == 3:
            raise ConnectionResetError("mine")
        none, threads = torch.empty((0, 5)), torch.tensor([torch.get_num_threads()])
        return Batch(allocate(1, 2), threads, torch.tensor([position]), none, none, [])


def failing(positions: Sequence[int], count: int = 1) -> Generator[Batch]:
    """Return a loader of `count` workers that has yielded position 0, made with one thread.

    OpenMP's threads do not survive a fork: a parallel loop would wait for them for ever.
    """
    loaded = batches(FailingMaker(), positions, SimpleNamespace(workers=count, prefetch=1), pin=False)
    batch = next(loaded)
    assert (batch.ids.tolist(), batch.labels.tolist()) == ([0], [1])
    return loaded


def test_a_worker_that_hangs_in_its_fork_is_replaced(
    digits: Path, reference: list[GlobalBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_START_TIMEOUT_S", 3)
    hangs = [True]
    os.register_at_fork(after_in_child=lambda: hangs and time.sleep(1000), after_in_parent=hangs.clear)
    assert stream(digits, STEPS, "data.workers=2")[0] == reference
    assert not hangs, "there was a fork"


def test_workers_that_keep_dying_end_the_run_and_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_MAX_REBUILDS", 1)
    with pytest.raises(StorageError, match="loader workers died 2 times at one batch"):
        next(failing(range(3)))
    with pytest.raises(RuntimeError, match="ConnectionResetError: mine"):
        next(failing([0, 3]))


def test_a_worker_that_waits_for_a_slow_disk_delays_no_exit() -> None:
    before = set(children(os.getpid()))
    failing([0, 2, 2], 2).close()  # for 600 s, if the workers were only asked to exit
    assert set(children(os.getpid())) <= before
