"""From a file's bytes to uint8 pixels [3, H, W], or a named defect; never a crash, and never more memory than bounded.

The size is read from the header before anything is decoded, since 14 KB of PNG can decode to 1.3 GB. torchvision decodes
JPEG and WebP, a fifth faster than Pillow, which decodes the rest: torchvision 0.29 ends the process with a segmentation
fault on one in four damaged PNG files. Grey, palette and CMYK become RGB and alpha is dropped, as Pillow does it; 16-bit
pictures are scaled, where Pillow clips them.
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
# not all that Pillow knows: for a file that says it is EPS it starts Ghostscript
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM")
_DIRECT = ("JPEG", "WEBP")
_WIDE = ("I;16", "I;16B", "I;16L", "I")
_ONE_AT_A_TIME = threading.Lock()  # standard error is the process's
_NOWHERE = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

Image.MAX_IMAGE_PIXELS = None  # our own bound stands before each decode
EpsImagePlugin.gs_binary = False  # no Ghostscript in the loaders that a benchmark compares with, either


class BadImageError(Exception):
    """The defect of one image, in words."""


@dataclass(frozen=True)
class Picture:
    """An image of known size, whose pixels are decoded when they are asked for: of a JPEG no more than has to be."""

    height: int
    width: int
    coded: bytes | Tensor
    frame: jpeg.Frame | None = None

    @classmethod
    def of(cls, data: bytes | NDArray[np.uint8]) -> "Picture":
        """Reads the header; BadImageError names what is wrong with it. Ready pixels [3, H, W] need none."""
        if isinstance(data, np.ndarray):
            return cls(data.shape[1], data.shape[2], torch.from_numpy(data))
        if not data:
            raise BadImageError("empty file")
        frame = jpeg.frame(data)
        if frame:  # what Pillow would say of it as well, at five times the cost
            _check_size(frame.height, frame.width)
            if not frame.is_sequential:
                _check_scans(data)
            return cls(frame.height, frame.width, data, frame)
        with _named(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks on odd metadata
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                _check_size(image.height, image.width)
                if image.format == "JPEG":
                    _check_scans(data)
                if image.format in _DIRECT and not getattr(image, "is_animated", False):
                    return cls(image.height, image.width, data)
                return cls(image.height, image.width, _decode_pillow(image))

    def region(self, top: int, left: int, height: int, width: int) -> Tensor:
        """[3, height, width] uint8, a view of what had to be decoded. BadImageError if it cannot be."""
        if isinstance(self.coded, Tensor):
            pixels = self.coded
        else:
            with _named():
                cut = self.frame and jpeg.part(self.coded, self.frame, top, left, height, width)
                if cut:
                    part, top, left = cut
                    pixels = _decode(part)
                elif self.frame and self.frame.is_sequential and top + height < self.frame.height:
                    with _silence():
                        pixels = _decode(jpeg.upper(self.coded, self.frame, top + height))
                else:
                    pixels = _decode(bytearray(self.coded))
        if top + height > pixels.shape[1] or left + width > pixels.shape[2]:
            raise BadImageError("its header tells another size than its data")
        return pixels[:, top : top + height, left : left + width]


def decode(data: bytes | NDArray[np.uint8]) -> Tensor:
    """Pixels as [3, H, W] uint8 on the CPU. BadImageError names what is wrong with the file."""
    picture = Picture.of(data)
    return picture.region(0, 0, picture.height, picture.width)


@contextmanager
def _named() -> Iterator[None]:
    """Whatever a decoder says becomes a BadImageError: of a damaged file Pillow's plugins say struct.error, KeyError,
    MemoryError and more."""
    try:
        yield
    except BadImageError:
        raise
    except UnidentifiedImageError:
        raise BadImageError("not an image in a known format") from None
    except Exception as error:
        raise BadImageError(" ".join(str(error).split())[:200] or type(error).__name__) from None


def _decode(coded: bytearray) -> Tensor:
    pixels: Tensor = decode_image(torch.frombuffer(coded, dtype=torch.uint8), ImageReadMode.RGB)
    return pixels


@contextmanager
def _silence() -> Iterator[None]:
    """Standard error is closed to libjpeg, which would say of each file that it ends early."""
    with _ONE_AT_A_TIME:
        try:
            error = os.dup(2)
        except OSError:  # there is none
            yield
            return
        try:
            os.dup2(_NOWHERE, 2)
            yield
        finally:
            os.dup2(error, 2)
            os.close(error)


def _check_size(height: int, width: int) -> None:
    if width * height > MAX_PIXELS:
        raise BadImageError(f"{width} × {height} pixels, more than the {MAX_PIXELS:,} allowed")


def _check_scans(data: bytes) -> None:
    """A progressive JPEG of a few KB can ask for a pass over all its pixels a thousand times."""
    if data.count(b"\xff\xda") > _MAX_SCANS:
        raise BadImageError(f"more than the {_MAX_SCANS} scans allowed")


def _decode_pillow(image: Image.Image) -> Tensor:
    if image.mode in _WIDE:
        wide = np.array(image, np.int32)  # changed in place: 80 million pixels are 320 MB
        np.clip(wide, 0, 65535, out=wide)
        wide += 128
        wide //= 257
        return torch.from_numpy(wide.astype(np.uint8))[None].expand(3, -1, -1)
    return torch.from_numpy(np.array(image if image.mode == "RGB" else image.convert("RGB"))).permute(2, 0, 1)
