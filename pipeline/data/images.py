"""Decoding image files to uint8 pixels [3, H, W], with a named error for each bad file.

No file crashes the process or takes more than a bounded amount of memory: the size is read from the
header before anything is decoded, since 14 KB of PNG can decode to 1.3 GB. torchvision decodes JPEG
and WebP, a fifth faster than Pillow. Pillow decodes the rest, because torchvision 0.29 ends the
process with a segmentation fault on one in four damaged PNG files. As with Pillow, grey, palette
and CMYK become RGB and alpha is dropped; but 16-bit images are scaled, where Pillow clips them.
"""

import io
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import EpsImagePlugin, Image, UnidentifiedImageError
from torch import Tensor
from torchvision.io import ImageReadMode, decode_image

from pipeline.data import jpeg

MAX_PIXELS = 80_000_000
_MAX_SCANS = 64
# not every format of Pillow: for EPS it would start Ghostscript
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM")
_TORCHVISION_FORMATS = ("JPEG", "WEBP")
_16_BIT_MODES = ("I;16", "I;16B", "I;16L", "I")
_STDERR_LOCK = threading.Lock()
_DEVNULL = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

Image.MAX_IMAGE_PIXELS = None  # MAX_PIXELS is checked before each decode
EpsImagePlugin.gs_binary = False  # also no Ghostscript in the loaders that a benchmark compares with


class BadImageError(Exception):
    """The defect of one image, as a phrase for a message."""


@dataclass(frozen=True)
class Picture:
    """An image of known size that is decoded on demand; of a JPEG only what a crop needs."""

    height: int
    width: int
    data: bytes | Tensor
    """A file to decode, or pixels [3, H, W]."""
    frame: jpeg.Frame | None = None
    """The header of a JPEG, if it is well-formed."""

    @classmethod
    def open(cls, data: bytes | NDArray[np.uint8]) -> "Picture":
        """Read the header of a file, or take decoded pixels [3, H, W]. Raises BadImageError."""
        if isinstance(data, np.ndarray):
            return cls(data.shape[1], data.shape[2], torch.from_numpy(data))
        if not data:
            raise BadImageError("empty file")
        frame = jpeg.frame(data)
        if frame:  # Pillow would read the same from the header, at five times the cost
            _check_size(frame.height, frame.width)
            if not frame.is_sequential:
                _check_scans(data)
            return cls(frame.height, frame.width, data, frame)
        with _as_bad_image(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about odd metadata
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                _check_size(image.height, image.width)
                if image.format == "JPEG":
                    _check_scans(data)
                if image.format in _TORCHVISION_FORMATS and not getattr(image, "is_animated", False):
                    return cls(image.height, image.width, data)
                return cls(image.height, image.width, _decode_pillow(image))

    def region(self, top: int, left: int, height: int, width: int) -> Tensor:
        """Return a crop [3, height, width] uint8, maybe as a view. Raises BadImageError."""
        if isinstance(self.data, Tensor):
            pixels = self.data
        else:
            with _as_bad_image():
                part = self.frame and jpeg.part(self.data, self.frame, top, left, height, width)
                if part:
                    data, top, left = part
                    pixels = _decode(data)
                elif self.frame and self.frame.is_sequential and top + height < self.frame.height:
                    with _silent_stderr():
                        pixels = _decode(jpeg.upper(self.data, self.frame, top + height))
                else:
                    pixels = _decode(bytearray(self.data))
        if top + height > pixels.shape[1] or left + width > pixels.shape[2]:
            raise BadImageError("the size in its header is not that of its data")
        return pixels[:, top : top + height, left : left + width]


def decode(data: bytes | NDArray[np.uint8]) -> Tensor:
    """Return all pixels, [3, H, W] uint8, on the CPU. Raises BadImageError."""
    picture = Picture.open(data)
    return picture.region(0, 0, picture.height, picture.width)


@contextmanager
def _as_bad_image() -> Iterator[None]:
    """Raise a BadImageError for any exception of a decoder.

    For damaged files Pillow's plugins raise struct.error, KeyError, MemoryError and more.
    """
    try:
        yield
    except BadImageError:
        raise
    except UnidentifiedImageError:
        raise BadImageError("not an image in a known format") from None
    except Exception as error:
        raise BadImageError(" ".join(str(error).split())[:200] or type(error).__name__) from None


def _decode(data: bytearray) -> Tensor:
    pixels: Tensor = decode_image(torch.frombuffer(data, dtype=torch.uint8), ImageReadMode.RGB)
    return pixels


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Silence standard error: libjpeg would warn that each cropped file ends early."""
    with _STDERR_LOCK:
        try:
            stderr = os.dup(2)
        except OSError:  # it is closed
            yield
            return
        try:
            os.dup2(_DEVNULL, 2)
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _check_size(height: int, width: int) -> None:
    if width * height > MAX_PIXELS:
        raise BadImageError(f"{width} × {height} pixels, more than the {MAX_PIXELS:,} allowed")


def _check_scans(data: bytes) -> None:
    # a progressive JPEG of a few KB can ask for a thousand passes over all its pixels
    if data.count(b"\xff\xda") > _MAX_SCANS:
        raise BadImageError(f"more than the {_MAX_SCANS} scans allowed")


def _decode_pillow(image: Image.Image) -> Tensor:
    if image.mode in _16_BIT_MODES:
        wide = np.array(image, np.int32)  # changed in place, because 80 million pixels take 320 MB
        np.clip(wide, 0, 65535, out=wide)
        wide += 128
        wide //= 257
        return torch.from_numpy(wide.astype(np.uint8))[None].expand(3, -1, -1)
    return torch.from_numpy(np.array(image if image.mode == "RGB" else image.convert("RGB"))).permute(2, 0, 1)
