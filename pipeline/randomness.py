"""Seeds for every random number of a run.

Promise: every random number is a function of (seed, purpose, position). So no random state is
saved, and a run draws the same numbers after a resume and at any number of processes or threads:
only dropout is drawn per pass, and run.exact fixes how many passes there are. Why this holds: code
that needs randomness seeds a generator with `derive(seed, purpose, *position)` just before it
draws, and uses it for that position alone.

torch is imported where it is used, because `derive` is also called before torch is imported.
"""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive(seed: int, *address: int | str) -> int:
    """Return a 63-bit seed for `address`; the seeds of different addresses are independent.

    It is a BLAKE2b hash over the parts, each with its type and length, so that two addresses never
    give the same bytes.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *address):
        text = str(part).encode()
        digest.update(b"%c%d:%s" % (b"s" if isinstance(part, str) else b"i", len(text), text))
    return int.from_bytes(digest.digest(), "little") >> 1


def generator(seed: int, *address: int | str) -> "torch.Generator":
    """Return a CPU generator that is seeded for `address`."""
    import torch

    return torch.Generator().manual_seed(derive(seed, *address))


def seed_network(seed: int, *address: int | str) -> None:
    """Seed torch's default generators (CPU and GPU), which dropout draws from, for `address`."""
    import torch

    number = derive(seed, *address)
    # torch.manual_seed formats the stack for each kind of device that is not in use: 0.7 ms
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for gpu in torch.cuda.default_generators:
            gpu.manual_seed(number)
