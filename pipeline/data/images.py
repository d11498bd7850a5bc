"""Decoding image files to uint8 pixels [3, H, W], with a named error for each bad file.

No file crashes the process or takes more than a bounded amount of memory: the size is read from the
header before anything is decoded, since 14 KB of PNG can decode to 1.3 GB. simplejpeg, which is
libjpeg-turbo and no more, decodes JPEG; Pillow decodes the rest, and what simplejpeg finds odd.
Both give the same pixels. As with Pillow, grey, palette and CMYK become RGB and alpha is dropped;
but 16-bit images are scaled, where Pillow clips them.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import EpsImagePlugin, Image, UnidentifiedImageError
from torch import Tensor

from pipeline.data import jpeg
from pipeline.errors import one_line

try:
    import simplejpeg
except ImportError:  # a machine with torch alone: Pillow decodes the same, slower
    simplejpeg = None

MAX_PIXELS = 80_000_000
_MAX_SCANS = 64
# not every format of Pillow: for EPS it would start Ghostscript
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM")
_16_BIT_MODES = ("I;16", "I;16B", "I;16L", "I")
_BAND = 256  # rows
_WARNING = "Corrupt JPEG data"
"""Beginning of libjpeg's warnings, after which it goes on, for example about bytes below a crop."""
_EOI = bytes((0xFF, jpeg.EOI))

Image.MAX_IMAGE_PIXELS = None  # MAX_PIXELS is checked before each decode
warnings.filterwarnings("ignore", module=r"PIL\.")  # about odd metadata
EpsImagePlugin.gs_binary = False  # also no Ghostscript in the loaders that a benchmark compares with


class BadImageError(Exception):
    """The defect of one image, as a phrase for a message."""


@dataclass(frozen=True)
class Picture:
    """An image of known size that is decoded on demand; of a JPEG only what a crop needs."""

    height: int
    width: int
    data: bytes | Tensor
    """A JPEG with a well-formed header, or pixels [3, H, W]."""
    frame: jpeg.Frame | None = None
    """The header of that JPEG."""

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
        with _as_bad_image(), Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_size(image.height, image.width)
            if image.format == "JPEG":
                _check_scans(data)
            return cls(image.height, image.width, _decode_pillow(image))

    def region(self, top: int, left: int, height: int, width: int) -> Tensor:
        """Return a crop [3, height, width] uint8, maybe as a view. Raises BadImageError."""
        if isinstance(self.data, Tensor):
            pixels = self.data
        else:
            assert self.frame
            data: bytes | bytearray = self.data
            upper = None
            with _as_bad_image():
                if part := jpeg.part(self.data, self.frame, top, left, height, width):
                    data, top, left = part
                elif self.frame.is_sequential and top + height < self.frame.height:
                    upper = jpeg.upper(self.data, self.frame, top + height)
                pixels = decode_jpeg(data, self.frame, upper)
        if top + height > pixels.shape[1] or left + width > pixels.shape[2]:
            raise BadImageError("the size in its header is not that of its data")
        return pixels[:, top : top + height, left : left + width]


def jpeg_decoder() -> str:
    """Return the name of the package that decodes JPEG here, with the way to a faster one."""
    return "simplejpeg" if simplejpeg else "Pillow, which is slower ('pip install simplejpeg')"


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
        raise BadImageError(one_line(error) or type(error).__name__) from None


def decode_jpeg(data: bytes | bytearray, frame: jpeg.Frame, upper: bytearray | None = None) -> Tensor:
    """Return the pixels of a JPEG, [3, H, W] uint8.

    upper: see `jpeg.upper`; if given, lower rows may be missing. Pillow gets the whole file, so
    that its verdict does not depend on the crop.
    """
    if simplejpeg:
        with suppress(ValueError, KeyError):  # Pillow decodes it, or says what is wrong
            return _decode_with_simplejpeg(upper or data, frame.scan)
    with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
        _check_size(image.height, image.width)
        return _decode_pillow(image)


def _decode_with_simplejpeg(data: bytes | bytearray, scan: int) -> Tensor:
    """Decode a JPEG whose entropy-coded bytes begin at `scan`.

    Raises ValueError or KeyError for what is left to Pillow: odd or damaged files.
    """
    height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    _check_size(height, width)
    if colours in ("CMYK", "YCCK"):
        raise ValueError("Pillow converts them in another way")
    pixels = np.empty((height, width, 3), np.uint8)
    try:
        simplejpeg.decode_jpeg(data, buffer=pixels)
    except ValueError as error:
        # warnings of the header were raised above: all rows are decoded if the file has an end
        if _WARNING not in str(error) or data.rfind(_EOI, scan) < 0:
            raise
    return torch.from_numpy(pixels).permute(2, 0, 1)


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
    image.load()
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    for top in range(0, image.height, _BAND):  # not all rows at once: 80 million pixels would take 240 MB twice more
        band = image.crop((0, top, image.width, min(image.height, top + _BAND)))
        pixels[top : top + _BAND] = np.asarray(band if band.mode == "RGB" else band.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1)
