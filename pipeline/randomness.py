"""Randomness is addressed, not carried.

Promise: every random number of a run is a function of (seed, purpose, position), so nothing about randomness is saved,
and a resumed, resized or re-threaded run draws the same. Why that holds: whoever needs randomness seeds a generator with
`derive(seed, purpose, *position)` right before drawing; no generator's state outlives one sample or one pass.

The switches that make torch's own arithmetic repeatable stand here too, and nowhere else. torch is imported where it is
used: `derive` also serves what runs before torch is there.
"""

import hashlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive(seed: int, *address: int | str) -> int:
    """A 63-bit seed for the place `address`; places that differ in any part share nothing.

    BLAKE2b over the parts, each with its type and length, so that no two addresses spell the same text.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *address):
        text = str(part).encode()
        digest.update(b"%c%d:%s" % (b"s" if isinstance(part, str) else b"i", len(text), text))
    return int.from_bytes(digest.digest(), "little") >> 1


def generator(seed: int, *address: int | str) -> "torch.Generator":
    """A CPU generator at `address`."""
    import torch

    return torch.Generator().manual_seed(derive(seed, *address))


def seed_network(seed: int, *address: int | str) -> None:
    """Point the default generators (CPU and GPU), which dropout and its like draw from, at `address`."""
    import torch

    torch.manual_seed(derive(seed, *address))


def configure_torch(*, deterministic: bool, precision: str, threads: int) -> None:
    """Set torch's switches for this process: threads, TF32, and in deterministic mode kernels that repeat their bits."""
    import torch

    torch.set_num_threads(threads)
    allow_tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    torch.backends.cudnn.allow_tf32 = allow_tf32
    if deterministic:
        # cuBLAS reads this when its first handle is made, so before any GPU work
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        # an aid for finding bugs, which every step would pay for
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
