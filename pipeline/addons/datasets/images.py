"""Decoding image files to upright uint8 pixels [3, H, W], with a named error for each bad file.

No file crashes the process or takes more than a bounded amount of memory: the size is read from the
header before anything is decoded, since 14 KB of PNG can decode to 1.3 GB. simplejpeg, which is
libjpeg-turbo and no more, decodes JPEG; Pillow decodes the rest, and what simplejpeg finds odd.
Both give the same pixels. As with Pillow, grey, palette and CMYK become RGB and alpha is dropped;
but images of more than 8 bits are scaled by the range that their file gives, where Pillow clips.

`upright=False` reads images as version 0.2 did, for its runs and packs: Pillow turned TIFF files
only, and no range was asked for.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from pipeline.addons.datasets import jpeg, jpeg_restarts
from pipeline.data.interface import UnreadableError
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
_ROWS, _COLUMNS = 1, 2
_TURNS: dict[int, tuple[bool, tuple[int, ...]]] = {
    1: (False, ()), 2: (False, (_COLUMNS,)), 3: (False, (_ROWS, _COLUMNS)), 4: (False, (_ROWS,)),
    5: (True, ()), 6: (True, (_COLUMNS,)), 7: (True, (_ROWS, _COLUMNS)), 8: (True, (_ROWS,)),
}  # fmt: skip
"""For each EXIF orientation: whether to swap rows and columns, and what to flip then."""
_WARNING = "Corrupt JPEG data"
"""Beginning of libjpeg's warnings, after which it goes on, for example about bytes below a crop."""
_EOI = bytes((0xFF, jpeg.EOI))
_BITS, _SAMPLE_FORMAT, _UNSIGNED, _SIGNED, _FLOAT = 258, 339, 1, 2, 3
_LOWEST, _HIGHEST = (340, 280), (341, 281)
"""TIFF tags of the range of the pixels: SMinSampleValue, MinSampleValue; SMaxSampleValue, …"""
_FULL, _12_BIT = 65535, 4095

Image.MAX_IMAGE_PIXELS = None  # MAX_PIXELS is checked before each decode
warnings.filterwarnings("ignore", module=r"PIL\.")  # about odd metadata


@dataclass(frozen=True)
class Picture:
    """An image of known size that is decoded on demand; of a JPEG only what a crop needs."""

    height: int
    width: int
    data: bytes | Tensor  # a JPEG with a well-formed header, or pixels [3, H, W]
    frame: jpeg.Frame | None = None  # the header of that JPEG
    orientation: int = 1  # the EXIF orientation that is applied; pixels are turned already

    @classmethod
    def open(cls, data: bytes | NDArray[np.uint8], *, upright: bool = True) -> "Picture":
        """Read the header of a file, or take decoded pixels [3, H, W]. Raises UnreadableError."""
        if isinstance(data, np.ndarray):
            return cls(data.shape[1], data.shape[2], torch.from_numpy(data))
        if not data:
            raise UnreadableError("empty file")
        if frame := jpeg.frame(data):  # Pillow would read the same from the header, at five times the cost
            _check(data, frame.height, frame.width, has_scans=not frame.is_sequential)
            orientation = jpeg.orientation(frame) if upright else 1
            orientation = orientation if orientation in _TURNS else 1
            swaps, _ = _TURNS[orientation]
            height, width = (frame.width, frame.height) if swaps else (frame.height, frame.width)
            return cls(height, width, data, frame, orientation)
        with _as_bad_image(), Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check(data, image.height, image.width, has_scans=image.format == "JPEG")
            # Pillow turns a TIFF by itself when it decodes it, and forgets its orientation
            orientation = _orientation(image) if upright and image.format == "TIFF" else 1
            pixels = _decode_pillow(image, checks_range=upright)
            if upright and image.format != "TIFF":
                orientation = _orientation(image)
                pixels = _turn(pixels, orientation)
            return cls(pixels.shape[1], pixels.shape[2], pixels, None, orientation)

    def region(self, top: int, left: int, height: int, width: int) -> Tensor:
        """Return a crop [3, height, width] uint8, maybe as a view. Raises UnreadableError."""
        if not self.frame:
            assert isinstance(self.data, Tensor)
            return _crop(self.data, top, left, height, width)
        assert isinstance(self.data, bytes)
        # where the box of the upright image lies in the stored one
        swaps, flips = _TURNS[self.orientation]
        top = self.height - top - height if _ROWS in flips else top
        left = self.width - left - width if _COLUMNS in flips else left
        if swaps:
            top, left, height, width = left, top, width, height
        data: bytes | bytearray = self.data
        upper = None
        with _as_bad_image():
            if cut := jpeg_restarts.part(self.data, self.frame, top, left, height, width):
                data, top, left = cut
            elif self.frame.is_sequential and top + height < self.frame.height:
                upper = jpeg.upper(self.data, self.frame, top + height)
            pixels = _decode_jpeg(data, self.frame, upper)
        return _turn(_crop(pixels, top, left, height, width), self.orientation)


def jpeg_decoder() -> str:
    """Return the name of the package that decodes JPEG here, with the way to a faster one."""
    return "simplejpeg" if simplejpeg else "Pillow, which is slower ('pip install simplejpeg')"


def decode(data: bytes | NDArray[np.uint8], *, upright: bool = True) -> Tensor:
    """Return all pixels, [3, H, W] uint8, on the CPU. Raises UnreadableError."""
    picture = Picture.open(data, upright=upright)
    return picture.region(0, 0, picture.height, picture.width)


@contextmanager
def _as_bad_image() -> Iterator[None]:
    try:
        yield
    except UnreadableError:
        raise
    except UnidentifiedImageError:
        raise UnreadableError("not an image in a known format") from None
    except Exception as error:  # for damaged files Pillow's plugins raise struct.error, KeyError and more
        raise UnreadableError(one_line(error) or type(error).__name__) from None


def _decode_jpeg(data: bytes | bytearray, frame: jpeg.Frame, upper: bytearray | None) -> Tensor:
    """Return the pixels of a JPEG, or those of `upper` at least, see `jpeg.upper`."""
    if simplejpeg:
        with suppress(ValueError, KeyError):  # Pillow decodes it, or says what is wrong
            return _decode_with_simplejpeg(upper or data, frame.scan)
    # Pillow gets the whole file, so that its verdict does not depend on the crop
    with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
        _check(data, image.height, image.width)
        return _decode_pillow(image, checks_range=False)


def _decode_with_simplejpeg(data: bytes | bytearray, scan: int) -> Tensor:
    """Decode a JPEG, coded from `scan`. Raises ValueError or KeyError for odd or damaged files."""
    height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    _check(data, height, width)
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


def _check(data: bytes | bytearray, height: int, width: int, *, has_scans: bool = False) -> None:
    if width * height > MAX_PIXELS:
        raise UnreadableError(f"{width} × {height} pixels, more than the {MAX_PIXELS:,} allowed")
    # a progressive JPEG of a few KB can ask for a thousand passes over all its pixels
    if has_scans and data.count(b"\xff\xda") > _MAX_SCANS:
        raise UnreadableError(f"more than the {_MAX_SCANS} scans allowed")


def _crop(pixels: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    if top + height > pixels.shape[1] or left + width > pixels.shape[2]:
        raise UnreadableError("the size in its header is not that of its data")
    return pixels[:, top : top + height, left : left + width]


def _orientation(image: Image.Image) -> int:
    with suppress(Exception):
        found = image.getexif().get(jpeg.ORIENTATION)
        return int(found) if found in _TURNS else 1
    return 1


def _turn(pixels: Tensor, orientation: int) -> Tensor:
    swaps, flips = _TURNS[orientation]
    pixels = pixels.transpose(1, 2) if swaps else pixels
    return pixels.flip(flips) if flips else pixels


def _decode_pillow(image: Image.Image, *, checks_range: bool) -> Tensor:
    """Return the stored pixels of an image, [3, H, W] uint8, in RGB.

    checks_range: raise UnreadableError for an image of more than 8 bits whose range is not known.
    """
    # of an image of 16 bits in colour, Pillow takes the upper 8 bits
    tiles = getattr(image, "tile", [])
    is_16_bit = image.format in ("PNG", "TIFF") and any(";16" in str(tile[3]) for tile in tiles)
    image.load()
    if image.mode in _16_BIT_MODES or (image.mode == "F" and checks_range):
        return torch.from_numpy(_grey(image, checks_range=checks_range))[None].expand(3, -1, -1)
    pixels = np.array(image if image.mode == "RGB" else image.convert("RGB"))
    if checks_range and is_16_bit:
        _check_is_bright(int(pixels.max()) << 8)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _grey(image: Image.Image, *, checks_range: bool) -> NDArray[np.uint8]:
    """Return the pixels of an image in grey, [H, W].

    checks_range: as of `_decode_pillow`. Raises UnreadableError if the range is not known.
    """
    low, high = _range(image) if checks_range else (0, _FULL)
    if (low, high) != (0, _FULL):
        return _scaled(np.array(image, np.float32), low, high)
    wide = np.array(image, np.int32)  # changed in place, because 80 million pixels take 320 MB
    if checks_range:
        _check_is_bright(int(wide.max()))
    np.clip(wide, 0, _FULL, out=wide)
    wide += 128
    wide //= 257
    return wide.astype(np.uint8)


def _check_is_bright(highest: int) -> None:
    """Raise UnreadableError if the highest value of 16-bit pixels is nearly black."""
    if 0 < highest <= _12_BIT:
        problem = f"16-bit pixels that are all below {_12_BIT + 1:,}, which is nearly black"
        raise UnreadableError(f"{problem}: if they are 12-bit values, multiply them by 16")


def _range(image: Image.Image) -> tuple[float, float]:
    """Return the values of black and white. UnreadableError if the file gives none."""
    # PNG has 16 bits; Pillow scales the values of PPM to them
    if image.format != "TIFF" and image.mode != "F":
        return 0, _FULL
    tags = getattr(image, "tag_v2", {_BITS: 32, _SAMPLE_FORMAT: _FLOAT})  # else a float image of PPM's family
    bits, kind, low, high = (
        np.ravel(next((tags[name] for name in names if name in tags), default))[0]
        for names, default in (((_BITS,), 8), ((_SAMPLE_FORMAT,), _UNSIGNED), (_LOWEST, 0), (_HIGHEST, 0))
    )
    if kind in (_SIGNED, _FLOAT) or bits > 16:
        if low < high:
            return float(low), float(high)
        pixels = f"{bits}-bit {'float' if kind == _FLOAT else 'integer'} pixels"
        problem = f"{pixels}, and no TIFF tag SMaxSampleValue says which value is white"
        raise UnreadableError(f"{problem}: save it with 8 bits, or with 16 bits and no sign")
    # other values are statistics of the image: the highest one that occurs
    return 0, float(high) if high in (_12_BIT, 255, 1023, 16383) else 2 ** int(bits) - 1


def _scaled(wide: NDArray[np.float32], low: float, high: float) -> NDArray[np.uint8]:
    """Return pixels from `low` (black) to `high` (white) as uint8; changes `wide`."""
    if not (low <= wide.min() and wide.max() <= high):  # also if one is not a number
        raise UnreadableError(f"it has pixels outside of the range {low:g} to {high:g} that its tags give")
    wide -= low
    wide *= 255 / (high - low)
    wide += 0.5
    return wide.astype(np.uint8)
