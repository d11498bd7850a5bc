"""Tables in Parquet files: their cells as text, and images that are in the file itself."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.addons.datasets.index import MISSING, SplitImages
from pipeline.data.interface import UnreadableError
from pipeline.errors import RequestError, list_first, one_line
from pipeline.files import parse_json

# errors of a damaged file, and of metadata that others wrote
_ERRORS = (pa.ArrowException, ValueError, LookupError, TypeError, AttributeError)


def rows(table: Any) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield the rows of a `table.Table`. Images in the file itself are named by their rows."""
    path, image = table.columns["path"], table.columns["image"][0]
    try:
        file = pq.ParquetFile(table.path)
        names = file.schema_arrow.names
        kind = file.schema_arrow.field(image).type if image in names and path[0] not in names else pa.null()
        is_inside = pa.types.is_struct(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
        if missing := {*([] if is_inside else path), *table.columns["label"]} - {*names}:
            remedy = f"there are {list_first(names, 8)}: name it in data.columns"
            raise table.wrong(1, min(missing), "missing", remedy)
        if is_inside and not table.may_hold_images:
            make = f"pack them with 'pipeline data pack {shlex.quote(str(table.path))} OUT'"
            given = f"data.table={table.path} holds the images themselves, which train faster from a pack"
            raise RequestError(given, f"{make}, and give data.source=pack data.root=OUT")
        read = [name for role in ("path", "label", "split", "group") for name in table.columns[role]]
        read = [name for name in dict.fromkeys(read) if name in names]
        data = file.read(columns=read)
        columns = [_texts(table, name, data) for name in read]
        if is_inside:
            read, columns = [*path, *read], [[f"{row:08}" for row in range(2, len(data) + 2)], *columns]
            for group in range(file.num_row_groups):
                sizes = pc.binary_length(_images(table.path, group, image)).to_pylist()
                places = [(MISSING if size is None else size, (group, i, 0)) for i, size in enumerate(sizes)]
                table.images_inside += places
    except _ERRORS as error:
        raise RequestError(f"{table.path} cannot be read as Parquet: {one_line(error)}") from None
    yield 1, read
    yield from enumerate(zip(*columns, strict=True), 2)


def _texts(table: Any, name: str, data: pa.Table) -> list[str]:
    """Return the cells of a column as text: of a class that Hugging Face numbers, its name."""
    cells, metadata = data[name].to_pylist(), (data.schema.metadata or {}).get(b"huggingface", b"{}")
    features = parse_json(metadata).get("info", {}).get("features", {})
    names = dict(enumerate(features.get(name, {}).get("names") or []))
    for row, cell in enumerate(cells, 2):
        if not isinstance(cell, str | int | float | None):
            raise table.wrong(row, name, f"{type(cell).__name__} is not allowed", "give texts or numbers")
    return ["" if cell is None else str(names.get(cell, cell)) for cell in cells]


def _images(path: Any, group: int, column: str) -> Any:
    """Return the bytes of the images of a row group, of a column of bytes or of {bytes, path}."""
    data = pq.ParquetFile(path).read_row_group(group, columns=[column], use_threads=False)[column]
    return pc.struct_field(data, "bytes") if pa.types.is_struct(data.type) else data


@dataclass(frozen=True)
class ParquetImages(SplitImages):
    """Images in a Parquet file, which are read a row group at a time."""

    column: str
    _read: dict[int, Any] = field(default_factory=dict, compare=False)  # the row group that was read last

    def read(self, i: int) -> bytes:
        if self.size(i) == MISSING:
            raise UnreadableError("its row holds no image")
        group, row, _ = self.split.places[3 * i : 3 * i + 3].tolist()
        try:
            images = self._read.get(group)
            if images is None:
                images = _images(self.root, group, self.column)
                self._read.clear()
                self._read[group] = images
            return bytes(images[row].as_py())
        except (pa.ArrowException, OSError) as error:
            raise UnreadableError(one_line(error)) from None
