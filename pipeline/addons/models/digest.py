"""The digest of a model's weights, by which runs are compared."""

import hashlib
import zlib

import torch
from torch import Tensor


def weights_digest(weights: dict[str, Tensor]) -> str:
    """Return the SHA-256 of a state dict, as hex digits, see `digest_and_checksums`."""
    return digest_and_checksums(weights)[0]


def digest_and_checksums(weights: dict[str, Tensor]) -> tuple[str, str]:
    """Return the SHA-256 of a state dict, and the CRC-32 of each tensor's bytes, joined.

    The SHA-256 is over each parameter and buffer in name order: name, NUL, dtype, NUL, shape, NUL,
    bytes (little-endian). In the same order, each tensor has eight hex digits of the second string.
    """
    digest, checksums = hashlib.sha256(), []
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        shape = ",".join(str(length) for length in tensor.shape)
        data = tensor.reshape(-1).view(torch.uint8).numpy().data  # a view: the bytes are not copied
        digest.update(f"{name}\0{tensor.dtype}\0{shape}\0".encode())
        digest.update(data)
        checksums.append(f"{zlib.crc32(data):08x}")
    return digest.hexdigest(), "".join(checksums)
