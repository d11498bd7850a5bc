"""Compute a digest of each kind of work that a run does, to compare models of CPU.

    python tests/kinds.py                           print the rows of the page
    python tests/kinds.py --check docs/receipts/kinds.md  compare them with the page

Further options: `--cpu Haswell` computes in qemu-x86_64, as that model; `--quick` leaves out what
takes long there. One process computes all kinds, because the imports take most of the time in qemu.
A kind is a function that returns tensors; where possible, it calls the project's own code.
"""

import argparse
import hashlib
import io
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.addons.run import portable

if __name__ == "__main__":
    os.environ.update(portable.VARIABLES | {"OMP_NUM_THREADS": "1"})  # torch reads them when it is imported

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional
from torchvision.models import ConvNeXt, mobilenet_v3_small, resnet18
from torchvision.models.convnext import CNBlockConfig

from pipeline.addons.datasets.images import Picture, decode
from pipeline.addons.models import zoo
from pipeline.addons.models.evaluator import Evaluator
from pipeline.addons.shard.fsdp import FSDPStrategy
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.data.augment import SampleKey, augment, draw_crop, resize_image
from pipeline.data.batch import Batch
from pipeline.data.mix import draw_mix
from pipeline.data.order import Order
from pipeline.group import Group
from pipeline.guards.nonfinite import LossGuard
from pipeline.operate.torch_settings import configure_torch
from pipeline.parallel import choose_strategy
from pipeline.plan import DataSize, Plan
from pipeline.planning import make_plan
from pipeline.randomness import generator, seed_network
from pipeline.record.terminal import SILENT
from pipeline.timing import StepTimer
from pipeline.train.state import TrainState
from pipeline.train.step import Step
from pipeline.world import World

CPU = torch.device("cpu")
WORDS = ("run.resume=never", "run.device=cpu", "batch.global=8", "augment.size=16", "train.ema=0.9",
         "track.uri=none", "evaluate.batch=8", "data.workers=0")  # fmt: skip
IMAGES = 96


# --- what a kind is made of ---


def plan_of(*words: str) -> tuple[Config, Plan]:
    config = load("digits", [*WORDS, *words])
    return config, make_plan(config, World(), DataSize(IMAGES, 16, 10))


def train(model: Callable[[], nn.Module], *words: str) -> list[Tensor]:
    """Return the state of a small run after two updates, its last loss, and its logits.

    The project's own code makes the updates.
    """
    config, plan = plan_of(*words)
    seed_network(0, "weights")
    module = model()
    if config.model.channels_last:
        module = module.to(memory_format=torch.channels_last)
    strategy = choose_strategy(config, plan, module, Group(World(), CPU))
    state = TrainState.build(strategy, LossGuard(strategy, StepTimer(), ""), config)
    step = Step(config, plan, state, StepTimer())
    for _ in range(2):
        loss = step.forward_backward(batches(config, plan, state.step))
        step.apply_gradients()
    state.model.eval()
    with torch.inference_mode():
        logits = state.model(state.strategy.normalise(step.used[0].images))
    moments = [value for of in state.optimizer.state.values() for value in of.values()]
    weights = [*state.model.state_dict().values(), *(state.ema.state_dict().values() if state.ema else ())]
    return [loss, logits, *weights, *(value for value in moments if isinstance(value, Tensor)), state.totals]


def batches(config: Config, plan: Plan, step: int) -> Iterator[Batch]:
    """Yield the passes of an update, of random pixels."""
    source = generator(0, "kinds", step)
    size, count = plan.image_size, plan.micro_batch
    for micro in range(plan.accumulate):
        images = torch.randint(256, (count, 3, size, size), generator=source, dtype=torch.uint8)
        labels = torch.randint(10, (count,), generator=source)
        mix = draw_mix(config.augment, 0, step, micro * count, count)
        yield Batch(images, labels, labels, torch.empty((0, 32), dtype=torch.uint8), mix, [])


def net(*layers: nn.Module, channels: int = 16) -> nn.Module:
    """Return a small network with `layers`, which take 16 channels, in the middle."""
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *layers, *head)


def convolution(out: int, size: int, **options: Any) -> Callable[[], nn.Module]:
    return lambda: net(nn.Conv2d(16, out, size, padding=size // 2, **options), channels=out)


def vit() -> nn.Module:
    depth = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64}
    return zoo.vit_s_16(10, image_size=16, patch_size=4, **depth)


def convnext() -> nn.Module:
    blocks = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)]
    return ConvNeXt(blocks, 0.1, num_classes=10)


def large_layers() -> Iterator[Tensor]:
    """Yield convolutions so large that oneDNN divides them by the sizes of the caches."""
    shapes = ((64, 64, 56, 3, 1), (256, 256, 14, 3, 1), (3, 64, 112, 7, 2))
    for inputs, outputs, size, kernel, stride in shapes:
        torch.manual_seed(size)
        images = torch.randn(2, inputs, size, size, requires_grad=True)
        layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2)
        result = layer(images)
        result.square().sum().backward()
        yield from (result, images.grad, layer.weight.grad, layer.bias.grad)  # type: ignore[misc]


def matrix_products() -> Iterator[Tensor]:
    torch.manual_seed(0)
    for rows, inner, columns in ((1, 512, 10), (64, 384, 1536), (197, 64, 197), (33, 7, 5)):
        left, right = torch.randn(2, rows, inner), torch.randn(2, inner, columns)
        yield from (left @ right, left[0] @ right[0], left[0].double() @ right[0].double())


def sharded_clipping() -> list[Tensor]:
    """Return random gradients, clipped by FSDP, of the first of two processes."""
    with tempfile.TemporaryDirectory() as folder:
        rank = int(os.fork() == 0)
        store = dist.FileStore(f"{folder}/store", 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        strategy = FSDPStrategy(*plan_of("parallel=fsdp"), BLOCK(), Group(World(2, rank=rank), CPU))
        weights, clipped = list(strategy.model.parameters()), []
        for draw in range(32):
            for i, weight in enumerate(weights):
                noise = torch.randn(weight.shape, generator=generator(draw, "noise", i))
                weight.grad = distribute_tensor(noise, weight.device_mesh, weight.placements)
            strategy.clip_gradients(0.1)
            clipped += [weight.grad.to_local() for weight in weights]
        dist.destroy_process_group()
        if rank:
            os._exit(0)
    return clipped


def torch_functions() -> Iterator[Tensor]:
    """Yield functions of one number, draws and sums; not those of NOT_PORTABLE."""
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(20_001, generator=generator(0, "x"), dtype=dtype) * 4
        for name in (
            "exp", "expm1", "sigmoid", "tanh", "erf", "sin", "cos", "square", "reciprocal", "softmax",
            "log_softmax", "cumsum", "argsort",
        ):  # fmt: skip
            yield getattr(torch, name)(x, *[0] * (name in ("softmax", "log_softmax", "cumsum")))
        for name in (
            "log", "log1p", "log2", "sqrt", "rsqrt", "sum", "mean", "var", "std", "norm", "logsumexp", "prod",
        ):  # fmt: skip
            yield getattr(torch, name)(x.abs() + 1e-3, *[0] * (name == "logsumexp"))
        yield from (x**3, 0.9**x, torch.erfinv(x / 40))
        yield from (functional.gelu(x), functional.mish(x), functional.normalize(x, dim=0))
        torch.manual_seed(0)
        yield nn.init.trunc_normal_(x.clone())
        yield from (x.clone().normal_(), x.clone().uniform_(), x.clone().exponential_())
    small = torch.randn(4097, generator=generator(0, "x")).bfloat16()
    yield from (small.sqrt(), small.exp(), small * small, small.sum())


# --- data ---


def files() -> Iterator[bytes]:
    """Yield a picture in each format."""
    rows, columns = np.mgrid[:60, :72]
    noise = np.random.Generator(np.random.PCG64(0)).integers(0, 40, (60, 72, 3))
    pixels = (np.stack([rows * 3, columns * 2, rows + columns], 2) + noise).astype(np.uint8)
    picture = Image.fromarray(pixels)
    for name, mode, options in (
        ("JPEG", "RGB", {"quality": 90}),
        ("JPEG", "RGB", {"quality": 75, "progressive": True, "subsampling": 0}), ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}), ("PNG", "RGB", {}), ("PNG", "P", {}), ("TIFF", "RGB", {}),
        ("WEBP", "RGB", {"quality": 80}), ("WEBP", "RGB", {"lossless": True}), ("GIF", "P", {}),
    ):  # fmt: skip
        file = io.BytesIO()
        picture.convert(mode).save(file, name, **options)
        yield file.getvalue()
    for name in ("PNG", "TIFF"):
        file = io.BytesIO()
        Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(file, name)
        yield file.getvalue()


def augmented(*words: str) -> Iterator[Tensor]:
    options = load("digits", [*WORDS, *words]).augment
    pictures = [Picture.open(data) for data in files()]
    for draw in range(12):
        picture = pictures[draw % len(pictures)]
        yield augment(picture, options, options.size, 0, SampleKey(draw // 4, draw, 0))


def resized() -> Iterator[Tensor]:
    pixels = torch.randint(256, (3, 61, 83), generator=generator(0, "pixels"), dtype=torch.uint8)
    return (resize_image(pixels, *size) for size in ((32, 32), (61, 40), (96, 128), (7, 5)))


def draws() -> Iterator[Tensor]:
    for words in (["mixup=0.2"], ["mixup=0.8", "cutmix=1"], ["cutmix=0.5"], ["mixup=1"]):
        options = load("digits", [*WORDS, *(f"augment.{word}" for word in words)]).augment
        yield from (draw_mix(options, 0, step, 0, 64) for step in range(8))
    yield torch.tensor([draw_crop(375, 500, options, 0, (0, sample, 0))[0] for sample in range(500)])


def schedules() -> Iterator[Tensor]:
    for name in ("cosine", "linear", "step", "constant"):
        plan = plan_of(f"schedule.name={name}", "train.epochs=90")[1]
        rates = [plan.learning_rate(step) for step in range(plan.total_steps)]
        yield torch.tensor(rates, dtype=torch.float64)


def orders() -> Iterator[Tensor]:
    labels = (np.arange(IMAGES) ** 2 % 10).astype(np.int32)
    for balance in ("none", "sqrt", "uniform"):
        order = Order(plan_of(f"data.balance={balance}")[1], 0, labels)
        yield from (torch.from_numpy(order.ids(step)) for step in range(40))


class Held:
    """Images for validation, random ones."""

    labels = np.arange(16, dtype=np.int32) % 10

    def __len__(self) -> int:
        return len(self.labels)

    def open(self, i: int) -> Picture:
        return Picture.open(np.random.Generator(np.random.PCG64(i)).integers(0, 256, (3, 40, 40), np.uint8))

    def expect(self, samples: Iterable[int]) -> None: ...


def evaluation() -> Iterator[Tensor]:
    config, plan = plan_of("evaluate.flip=true")
    seed_network(0, "weights")
    source: Any = SimpleNamespace(val=Held(), label_sets=())
    result = Evaluator(vit(), source, config, plan, Group(World(), CPU)).evaluate(0, SILENT, lambda: False)
    assert not result.bad_images
    yield torch.tensor(list(result.evaluation.figures.values()), dtype=torch.float64)
    yield torch.from_numpy(result.predictions.confidence)


BLOCK = lambda: net(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU())  # noqa: E731
KINDS: dict[str, Callable[[], Iterable[Tensor]]] = {
    "convolution": lambda: train(convolution(24, 3)),
    "grouped convolution": lambda: train(convolution(32, 3, groups=4)),
    "depthwise convolution": lambda: train(convolution(16, 7, groups=16)),
    "strided convolution": lambda: train(convolution(32, 3, stride=2)),
    "1×1 convolution": lambda: train(convolution(64, 1)),
    "dilated convolution": lambda: train(convolution(16, 3, dilation=2)),
    "large convolutions": large_layers,
    "matrix products": matrix_products,
    "batch norm": lambda: train(BLOCK),
    "layer norm": lambda: train(lambda: net(nn.LayerNorm([16, 16, 16]))),
    "group norm": lambda: train(lambda: net(nn.GroupNorm(4, 16))),
    "GELU": lambda: train(lambda: net(nn.GELU(), nn.GELU("tanh"))),
    "SiLU, ELU, softplus": lambda: train(lambda: net(nn.SiLU(), nn.ELU(), nn.Softplus())),
    "hard-swish": lambda: train(lambda: net(nn.Hardswish(), nn.Hardsigmoid(), nn.ReLU6())),
    "max pooling": lambda: train(lambda: net(nn.MaxPool2d(3, 2, 1))),
    "average pooling": lambda: train(lambda: net(nn.AvgPool2d(3, 2, 1))),
    "adaptive pooling": lambda: train(lambda: net(nn.AdaptiveAvgPool2d(5), nn.AdaptiveMaxPool2d(3))),
    "interpolation": lambda: train(lambda: net(nn.Upsample(scale_factor=1.5, mode="bilinear"))),
    "dropout": lambda: train(lambda: net(nn.Dropout(0.3), nn.Dropout2d(0.2))),
    "label smoothing": lambda: train(BLOCK, "train.label_smoothing=0.1"),
    "BCE": lambda: train(BLOCK, "train.loss=bce", "train.label_smoothing=0.1"),
    "mixup and cutmix": lambda: train(BLOCK, "augment.mixup=0.2", "augment.cutmix=1"),
    "SGD": lambda: train(vit, "optimizer.nesterov=true", "optimizer.weight_decay=0.01"),
    "AdamW": lambda: train(vit, "optimizer.name=adamw", "optimizer.nesterov=false"),
    "LAMB": lambda: train(vit, "optimizer.name=lamb", "optimizer.nesterov=false", "train.clip=1"),
    "Muon": lambda: train(vit, "optimizer.name=muon"),
    "Muon, convolutions": lambda: train(convolution(96, 3), "optimizer.name=muon"),
    "clipping": lambda: train(BLOCK, "train.clip=0.1"),
    "clipping by FSDP": sharded_clipping,
    "accumulation": lambda: train(BLOCK, "batch.accumulate=2"),
    "exact mode": lambda: train(BLOCK, "run.exact=true", "exact.shards=4"),
    "channels last": lambda: train(BLOCK, "model.channels_last=true"),
    "channels last, ConvNeXt": lambda: train(convnext, "augment.size=32", "model.channels_last=true"),
    "ResNet-18 at 32 px": lambda: train(resnet18, "augment.size=32"),
    "MobileNet V3 at 32 px": lambda: train(lambda: mobilenet_v3_small(num_classes=10), "augment.size=32"),
    "airbench94 at 16 px": lambda: train(zoo.airbench94),
    "functions of torch": torch_functions,
    "decoded pixels": lambda: map(decode, files()),
    "resized pixels": resized,
    "crop, flip and erasing": lambda: augmented("augment.flip=0.5", "augment.erase=0.9"),
    "shifted pixels": lambda: augmented("augment.pad=2"),
    **{
        name: lambda word=f"augment.policy={name}": augmented(word)  # type: ignore[misc]
        for name in ("randaugment", "autoaugment", "trivialaugment", "augmix")
    },
    "draws of mixup and crops": draws,
    "learning rates": schedules,
    "order of the samples": orders,
    "evaluation": evaluation,
}
SLOW = {"large convolutions", "ResNet-18 at 32 px", "MobileNet V3 at 32 px", "airbench94 at 16 px"}
"""Kinds that take more than a few seconds in qemu."""
NOT_IN_QEMU = {"augmix"}
"""Bilinear grid_sample ends qemu 7.2 with a segmentation fault."""


# --- the page ---

PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow", "simplejpeg")
EXTENSIONS = ("avx2", "fma3", "avx512_f", "avx512_bf16", "avx512_fp16", "amx_bf16")


def digest(tensors: Iterable[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        values = tensor.detach().contiguous().view(-1)
        total.update(values.view(torch.uint8).numpy().tobytes() if len(values) else b"")
    return total.hexdigest()[:16]


def software() -> str:
    """Return the row of the packages, and the C library, on which the bits may depend."""
    versions = [f"{package} {version(package).partition('+')[0]}" for package in PACKAGES]
    return f"| software | {', '.join([*versions, ' '.join(platform.libc_ver())])} |"


def this_machine() -> str:
    """Return the row of this machine, without the date."""
    found = torch.cpu.get_capabilities()
    extensions = " ".join(name for name in EXTENSIONS if found.get(name))
    caches = ", ".join(f"{found.get(name, 0) >> 10:,} KiB" for name in ("l1d_cache_size", "l2_cache_size"))
    if emulated := os.environ.get("QEMU_CPU"):  # its /proc is the host's
        text = subprocess.run(["qemu-x86_64", "--version"], capture_output=True, text=True, check=True).stdout
        name = f"{emulated}, emulated by qemu {re.findall(r'version ([0-9]+.[0-9]+)', text)[0]}"
    else:
        facts = dict(re.findall(r"^(.+?)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
        name = f"{facts['model name']} (family {facts['cpu family']}, model {facts['model']})"
    return f"| {name} | {extensions} | {caches} | {torch.__version__} |"


def constants(page: Path) -> dict[str, str]:
    """Return the digest of each kind that the page has."""
    return dict(re.findall(r"^\| (.+) \| `([0-9a-f]{16})` \|$", page.read_text(), re.MULTILINE))


def compute(*, is_quick: bool) -> dict[str, str]:
    """Return the digest of each kind, as a portable run computes it."""
    portable.use_exact_roots()
    configure_torch(deterministic=True, precision="fp32", threads=1)
    left_out = (SLOW if is_quick else set()) | (NOT_IN_QEMU if "QEMU_CPU" in os.environ else set())
    found = {}
    for name in (name for name in KINDS if name not in left_out):
        found[name] = digest(KINDS[name]())
        print(f"| {name} | `{found[name]}` |", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", metavar="PAGE", type=Path)
    parser.add_argument("--quick", action="store_true", help="only kinds that take seconds in qemu")
    parser.add_argument("--cpu", metavar="MODEL", help="compute in qemu-x86_64, for example as Haswell")
    options = parser.parse_args()
    if options.cpu and "QEMU_CPU" not in os.environ:
        os.environ["QEMU_CPU"] = options.cpu
        os.execvp("qemu-x86_64", ["qemu-x86_64", sys.executable, *sys.argv])
    print(software())
    found = compute(is_quick=options.quick)
    expected = constants(options.check) if options.check else found
    if wrong := [name for name, value in found.items() if expected.get(name) != value]:
        print(f"different from the page: {', '.join(wrong)}")
    print(this_machine())
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
