"""The table of folders in docs/your-data.md is what the commands do."""

from pathlib import Path

from folders import FOLDERS, rows, table

PAGE = Path(__file__).parent.parent / "docs/your-data.md"
SHOWN = ("Train/", "training/", "train/` and `valid", "images/", "turned", "12-bit", "MACOSX", "jfif",
         "as two classes", "files of train", "a link", "25 images")  # fmt: skip


def test_folders_are_read_as_the_page_says(tmp_path: Path) -> None:
    folders = {name: make for name, make in FOLDERS.items() if any(part in name for part in SHOWN)}
    assert len(folders) == len(SHOWN)
    page = PAGE.read_text()
    for line in table(rows(folders, tmp_path)).splitlines():
        assert line in page
