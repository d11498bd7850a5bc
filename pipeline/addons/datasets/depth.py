"""Images of more than 8 bits, scaled to uint8 by the range that their file gives."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pipeline.data.interface import UnreadableError

_BITS, _SAMPLE_FORMAT, _UNSIGNED, _SIGNED, _FLOAT = 258, 339, 1, 2, 3
_LOWEST, _HIGHEST = (340, 280), (341, 281)
"""TIFF tags of the range of the pixels: SMinSampleValue, MinSampleValue; SMaxSampleValue, …"""
_FULL, _12_BIT = 65535, 4095


def grey(image: Image.Image, *, checks_range: bool) -> NDArray[np.uint8]:
    """Return the pixels of an image in grey, [H, W].

    checks_range: see `images.decode`, `upright`. Raises UnreadableError if the range is not known.
    """
    low, high = _range(image) if checks_range else (0, _FULL)
    if (low, high) != (0, _FULL):
        return _scaled(np.array(image, np.float32), low, high)
    wide = np.array(image, np.int32)  # changed in place, because 80 million pixels take 320 MB
    if checks_range:
        check_is_bright(int(wide.max()))
    np.clip(wide, 0, _FULL, out=wide)
    wide += 128
    wide //= 257
    return wide.astype(np.uint8)


def check_is_bright(highest: int) -> None:
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
