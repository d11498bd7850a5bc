"""From a file's bytes to uint8 pixels [3, H, W], or a named defect; never a crash, and never more memory than bounded.

The size is read from the header before anything is decoded, since 14 KB of PNG can decode to 1.3 GB. torchvision decodes
JPEG and WebP, a fifth faster than Pillow, which decodes the rest: torchvision 0.29 ends the process with a segmentation
fault on one in four damaged PNG files. Grey, palette and CMYK become RGB and alpha is dropped, as Pillow does it; 16-bit
pictures are scaled, where Pillow clips them.
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
# not all that Pillow knows: for a file that says it is EPS it starts Ghostscript
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM")
_DIRECT = ("JPEG", "WEBP")
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
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise BadImageError(f"{width} × {height} pixels, more than the {MAX_PIXELS:,} allowed")
                if image.format in _DIRECT and not getattr(image, "is_animated", False):
                    return _decode_direct(data)
                return _decode_pillow(image)
    except UnidentifiedImageError:
        raise BadImageError("not an image in a known format") from None
    except BadImageError:
        raise
    except Exception as error:  # of a damaged file Pillow's plugins say struct.error, KeyError, MemoryError and more
        raise BadImageError(" ".join(str(error).split())[:200] or type(error).__name__) from None


def _decode_direct(data: bytes) -> Tensor:
    pixels: Tensor = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
    return pixels


def _decode_pillow(image: Image.Image) -> Tensor:
    if image.mode in _WIDE:
        wide = np.array(image, np.int32)  # changed in place: 80 million pixels are 320 MB
        np.clip(wide, 0, 65535, out=wide)
        wide += 128
        wide //= 257
        return torch.from_numpy(wide.astype(np.uint8))[None].expand(3, -1, -1)
    return torch.from_numpy(np.array(image if image.mode == "RGB" else image.convert("RGB"))).permute(2, 0, 1)
