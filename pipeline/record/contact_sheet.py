"""A contact sheet: images in a grid, each with a caption below it.

matplotlib is imported inside the function: it takes a second, and no training process needs it.
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


def draw_contact_sheet(path: Path, tiles: list[Tile], title: str = "") -> None:
    """Write the tiles, row by row, as a PNG file. Raises OSError if it cannot be written."""
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(tiles))
    rows = -(-len(tiles) // columns)
    figure = Figure((columns * _TILE_INCHES, rows * (_TILE_INCHES + 0.35) + 0.4), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=9)
    cells = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in cells:
        axes.axis("off")
    for axes, tile in zip(cells, tiles, strict=False):
        axes.imshow(tile.pixels.transpose(1, 2, 0))
        below = {"transform": axes.transAxes, "ha": "center", "va": "top"}
        axes.text(0.5, -0.04, tile.caption, fontsize=6, parse_math=False, **below)
    figure.savefig(path, dpi=120)
