"""The layout of the archives that torch.save writes, checked before torch reads one."""

import io
import struct
import zipfile


def check_archive(data: bytes) -> None:
    """Raise ValueError if an archive states more bytes than it has, as only a hostile one does.

    torch.save compresses nothing. Without this check, 6 MB could fill the memory.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
    unpacked = sum(member.file_size for member in members)
    if unpacked > len(data):
        raise ValueError(f"its parts would unpack to {unpacked:,} bytes, but it has {len(data):,}")
    # Python's reader found these sizes: torch before 2.13 does not tell its own. Both must find the
    # same directory, so the archive must be laid out as torch.save does: the last three records are
    # in their places, the directory ends where they begin, and no entry states its size twice.
    records = len(data) - 98
    size, offset = struct.unpack("<QQ", data[-58:-42])
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, records, 1)
    if (
        (data[:4], data[-98:-94], data[-42:-22]) != (b"PK\3\4", b"PK\6\6", locator)
        or (data[-22:-18], data[-2:]) != (b"PK\5\6", b"\0\0")
        or offset + size != records
        or any(member.compress_type or b"\xff\xff\xff\xff" in member.extra for member in members)
    ):
        raise ValueError("its directory is not laid out as torch.save does")
