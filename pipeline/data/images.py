"""From a file's bytes to uint8 pixels [3, H, W], or a named defect; never a crash, and never more memory than bounded.

The size is read from the header before anything is decoded, since 14 KB of PNG can decode to 1.3 GB. torchvision decodes
what it can (JPEG, PNG, WebP), Pillow the rest; grey, palette and CMYK become RGB and alpha is dropped, as Pillow does it.
16-bit pictures are scaled, where Pillow clips them.
"""

import io
import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.io import ImageReadMode, decode_image

MAX_PIXELS = 80_000_000
_DIRECT = ("JPEG", "PNG", "WEBP")
_WIDE = ("I;16", "I;16B", "I;16L", "I")

Image.MAX_IMAGE_PIXELS = None  # our own bound stands before each decode


class BadImageError(Exception):
    """The defect of one image, in words."""


def decode(data: bytes | NDArray[np.uint8]) -> Tensor:
    """Pixels as [3, H, W] uint8 on the CPU. BadImageError names what is wrong with the file."""
    if isinstance(data, np.ndarray):
        return torch.from_numpy(data)
    if not data:
        raise BadImageError("empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks on odd metadata
            with Image.open(io.BytesIO(data)) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise BadImageError(f"{width} × {height} pixels, more than the {MAX_PIXELS:,} allowed")
                if image.format in _DIRECT and not getattr(image, "is_animated", False):
                    return _decode_direct(data)
                return _decode_pillow(image)
    except UnidentifiedImageError:
        raise BadImageError("not an image in a known format") from None
    except (OSError, RuntimeError, ValueError, SyntaxError, EOFError) as error:
        raise BadImageError(" ".join(str(error).split())[:200] or type(error).__name__) from None


def _decode_direct(data: bytes) -> Tensor:
    pixels = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    if pixels.dtype == torch.uint16:
        pixels = ((pixels.to(torch.int32) + 128) // 257).to(torch.uint8)
    return pixels


def _decode_pillow(image: Image.Image) -> Tensor:
    if image.mode in _WIDE:
        wide = np.asarray(image).astype(np.int64)
        grey = ((wide.clip(0, 65535) + 128) // 257).astype(np.uint8)
        return torch.from_numpy(grey)[None].expand(3, -1, -1)
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
