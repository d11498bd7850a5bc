"""A picture of pictures: tiles in rows, each with a line below it. The only drawing that `predict` and reports share.

matplotlib is imported where something is drawn: it takes a second, and no training process needs it.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_COLUMNS = 8
_TILE_INCHES = 1.3


class Tile(NamedTuple):
    pixels: NDArray[np.uint8]
    """[3, H, W]."""
    caption: str


def draw_sheet(path: Path, tiles: list[Tile], title: str = "") -> None:
    """Writes the tiles, in order, as a PNG file. OSError where it cannot be written."""
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(tiles))
    rows = -(-len(tiles) // columns)
    figure = Figure((columns * _TILE_INCHES, rows * (_TILE_INCHES + 0.35) + 0.4), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=9)
    for at, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axes.axis("off")
        if at < len(tiles):
            axes.imshow(tiles[at].pixels.transpose(1, 2, 0))
            place = {"transform": axes.transAxes, "ha": "center", "va": "top"}
            axes.text(0.5, -0.04, tiles[at].caption, fontsize=6, parse_math=False, **place)
    figure.savefig(path, dpi=120)
