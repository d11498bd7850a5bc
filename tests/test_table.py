"""Tables of labels: the same samples as an image folder, splits by group, and what is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from harness import SMALL, quick, refused
from test_data import fill, names

from pipeline.addons.datasets.holdout import HoldOut
from pipeline.addons.datasets.index import MISSING, Index
from pipeline.addons.datasets.manifest import scan
from pipeline.addons.datasets.sources import open_source
from pipeline.cli.main import main
from pipeline.config.load import load
from pipeline.errors import RequestError

GOOD = "a/1.png,cat\na/2.png,cat\na/3.png,cat\nb/1.png,dog\nb/2.png,dog\nb/3.png,dog\n"
HEAD, SPLIT = "path,label\n", "path,label,split\n"
TABLE = HEAD + GOOD
SETS = "data.columns.label=[cat,dog]"

# The bytes of a table named t.csv, more keys, and what the error names.
WRONG: list[tuple[str | bytes, str, str]] = [
    ("", "", "row 1, column path: missing"),
    ("Path,Label\n" + GOOD, "", "missing: there are Path, Label: name one with data.columns.path="),
    ("path,class\n" + GOOD, "", "row 1, column label: missing: there are path, class"),
    ("path,label,label\na/1.png,cat,dog\n", "", "row 1, column label: twice"),
    (TABLE, "data.columns.split=part", "row 1, column part: missing"),
    (TABLE, SETS, "row 1, column cat: missing"),
    (TABLE, "data.columns.pth=path", "data.columns"),
    (TABLE, "data.columns=path", "data.columns=path"),
    (TABLE.replace(",", ";"), "", "save it as CSV (UTF-8), with commas"),
    ((HEAD + "a/1.png,K\xe4fer\n").encode("latin-1"), "", "row 2: this is not UTF-8 text"),
    (HEAD + "\n\n\n", "", "holds no image with a label"),
    (HEAD + "a/1.png,cat\na/2.png,cat\n", "", "holds one class, cat"),
    (HEAD + "a/1.png\n", "", "row 2, column label: the row has 1 cell and the header 2"),
    (HEAD + "a/1.png,   \n", "", "row 2, column label: it is empty"),
    (HEAD + "a/1.png,c\0t\n", "", "row 2, column label: it has a NUL character"),
    (HEAD + ",cat\n" + GOOD, "", "row 2, column path: it is empty"),
    (HEAD + "a/\0.png,cat\n", "", "row 2, column path: it has a NUL character"),
    *((TABLE + f"{path},cat\n", "", f"row 8, column path: {path} is no file in data.root")
      for path in ("../x.png", "a/../../x.png", "..", "..\\x.png", "/etc/passwd", "C:\\a\\1.png", "./")),
    (HEAD + "a/,cat\n" + GOOD, "", "row 2, column path: a is a folder"),
    (TABLE + "c/1.png,cat\n", "", "row 8, column path: the folder of c/1.png"),
    (HEAD + "void/1.png,cat\n" + GOOD, "", "row 2, column path: the folder of void/1.png"),
    (HEAD + "a/1,cat\nb/1,dog\n", "", "row 2, column path: data.root="),
    (TABLE, "data.root=t.csv", "the folder of a/1.png in data.root=t.csv is missing"),
    (HEAD + "\n" + GOOD + "a\\1.png,dog\n", "", "row 9, column label: a/1.png has another label in row 3"),
    (SPLIT + "a/1.png,cat,train\na/1.png,cat,val\n", "", "row 3, column split: a/1.png has"),
    (SPLIT + "a/1.png,cat,images\n", "", "row 2, column split: images is not allowed"),
    (SPLIT + "a/1.png,cat,train\nb/1.png,dog,val\n", "", "no image to train of class dog"),
    (SPLIT + "a/1.png,cat,test\nb/1.png,dog,test\n", "", "holds no image with a label"),
    (TABLE, "data.split_by=group", "row 2, column group: missing or empty"),
    ("path,label,group\na/1.png,cat,x\na/2.png,dog, \n", "data.split_by=group", "row 3, column group"),
    ("path,label,group,split\na/1.png,cat,x,train\na/2.png,dog,x,val\n", "data.split_by=group",
     "row 3, column group: x is in train in row 2"),
    ("path,cat,dog\na/1.png,1,2\n", SETS, "row 2, column dog: 2 is not 0 or 1"),
    ("path,cat\na/1.png,1\na/2.png,0\n", "data.columns.label=[cat]", "holds one class, cat"),
    (HEAD + f"a/1.png,{'x' * 200_000}\n", "", "row 2: field larger than field limit"),
    (TABLE + 'a/4.png,"cat\n', "", "row 8: unexpected end of data"),
    (HEAD + "a/1.png,cat\ra/2.png,dog\n", "", "row 2: new-line character"),
    (TABLE, "data.table=void.csv", "data.table=void.csv cannot be read: not a regular file"),
    (TABLE, "data.table=none.csv", "data.table=none.csv cannot be read: No such file"),
    (TABLE, "data.table=none", "data.table is missing"),
    (TABLE, "data.table=t.xlsx", "does not have the name of a table"),
    (TABLE, "data.table=s3://bucket/t.csv", "s3://bucket/t.csv"),
    (TABLE, "data.root=s3://bucket/x", "data.source=pack"),
    (TABLE, "data.source=folder data.root=.", "data.table=t.csv is for data.source=table"),
    (TABLE, "data.source=folder data.table=auto data.root=. data.split_by=group", "data make table"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder with three images in each of a/ and b/, and an empty folder."""
    monkeypatch.chdir(fill(tmp_path, *(f"{folder}/{i}.png" for folder in "ab" for i in (1, 2, 3))))
    for name in ("void", "void.csv"):
        (tmp_path / name).mkdir()


def index_of(table: str | bytes, *words: str, name: str = "t.csv") -> Index:
    """Write a table and open it as a training does."""
    Path(name).write_bytes(table if isinstance(table, bytes) else table.encode())
    return open_here(*words, name=name)


def open_here(*words: str, name: str = "t.csv") -> Index:
    index = open_source(load("digits", ["data.source=table", f"data.table={name}", *words])).index
    assert isinstance(index, Index)
    assert Index.from_bytes(index.to_bytes()).digest == index.digest
    return index


@pytest.mark.parametrize(("table", "words", "expected"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_table_is_named_by_row_and_column(table: str | bytes, words: str, expected: str) -> None:
    line = refused(lambda: index_of(table, *words.split()))
    assert expected in line
    assert line.isprintable()
    assert len(line) < 400


def test_a_table_is_read_as_people_write_it() -> None:
    plain = index_of(TABLE)
    assert (plain.classes, len(plain.train), len(plain.val)) == (("cat", "dog"), 4, 2)
    for table in (
        "\ufeff" + TABLE,
        TABLE.replace("\n", "\r\n"),
        HEAD + GOOD.replace("/", "\\"),
        HEAD + "\n" + GOOD.replace("a/", "./a//"),
        "label , path,x\n" + re.sub("(.+),(.+)", r"\2,\1,", GOOD),
        HEAD + "".join(reversed(GOOD.splitlines(keepends=True))),
        TABLE[:-1],
    ):
        assert index_of(table).digest == plain.digest
    assert index_of(TABLE.replace(",", "\t"), name="t.tsv").digest == plain.digest
    renamed = ("data.columns.path=file name", "data.columns.label=species")
    assert index_of("file name,species\n" + GOOD, *renamed).digest == plain.digest
    with_test = index_of(
        SPLIT + "a/1.png,cat,Training\na/2.png,cat,valid\nb/1.png,dog,trn\nb/2.png,dog,dev\n"
        "a/3.png,,test\nb/1.png,dog,train\n"
    )
    assert (names(with_test.val), with_test.val.labels.tolist()) == ([b"a/2.png", b"b/2.png"], [0, 1])
    assert with_test.size.notes == "left out: 1 of the test split, 1 repeated rows"
    assert with_test.split_rule() is None
    held = index_of(SPLIT + GOOD.replace("\n", ",train\n"))
    assert (held.digest, held.split_rule()) == (plain.digest, plain.split_rule())


def test_labels_that_look_equal_are_one_class_and_the_plan_says_so() -> None:
    index = index_of(TABLE.replace("2.png,cat", "2.png,Cafe\u0301 ").replace("cat", "Caf\xe9"))
    assert index.classes == ("Caf\xe9", "dog")
    (note,) = index.notes
    assert note.startswith("taken as one label: ")
    assert "('Cafe\\u0301 ') = " in note
    fill(Path("a"), "Cafe\u0301.png".encode(), "e\u0301/1.png".encode())
    index = index_of(TABLE + "a/Caf\xe9.png,cat\na/\xe9/1.png,cat\n")
    assert {"a/Cafe\u0301.png".encode(), "a/e\u0301/1.png".encode()} <= {*index.names()}
    assert MISSING not in index.train.sizes
    assert index_of(TABLE.replace("cat", "007").replace("dog", "7")).classes == ("007", "7")


def test_missing_files_and_equal_images_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "1 file missing, such as a/4.png in row 8" in index_of(TABLE + "a/4.png,cat\n").size.notes
    assert main(["data", "check", "t.csv", "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert found["defects"] == [{"file": "a/4.png", "reason": "No such file or directory"}]
    assert (found["images"], found["classes"]) == (7, {"cat": 4, "dog": 3})
    assert found["two_labels"] == [["a/2.png", "b/1.png"], ["a/3.png", "b/2.png"]]
    assert main(["data", "check", "t.csv", "--write-sums"]) == 2


def test_several_labels_are_sets_of_classes_however_they_are_written() -> None:
    labels = ["cat;dog", "dog", "", "cat", " dog ; cat;", "cat; cat"]
    paths = [line.split(",")[0] for line in GOOD.split()]
    table, columns = SPLIT, "path,dog,cat,split\n"
    for path, label in zip(paths, labels, strict=True):
        split = "val" if path == "b/3.png" else "train"
        table += f"{path},{label},{split}\n"
        columns += f"{path},{int('dog' in label)},{float('cat' in label)},{split}\n"
    index = index_of(table)
    assert (index.classes, index.label_sets) == (("cat", "dog"), ((), (0,), (0, 1), (1,)))
    assert index.label_name(2) == "cat;dog"
    assert index.train.labels.tolist() == [2, 3, 0, 1, 2]
    assert index.class_counts(index.train).tolist() == [3, 3]
    line = refused(lambda: index_of(table.replace("cat; cat,val", "bird;cat,val")))
    assert "no image to train of class bird" in line
    assert index_of(columns, SETS).digest == index.digest


def test_groups_stay_together_and_classes_keep_their_shares() -> None:
    labels = np.random.default_rng(5).integers(0, 4, 1000)
    images = [(f"{i}".encode(), int(label)) for i, label in enumerate(labels)]
    for share, size in ((0.1, 1), (0.1, 8), (0.3, 40), (0.5, 3), (0.2, 333), (0.02, 200)):
        groups = [f"g{i // size}" for i in range(1000)]
        chosen = HoldOut(share, "group").chosen(images, groups)
        assert chosen == HoldOut(share, "group").chosen(images[::-1], groups[::-1])
        held = np.array([name in chosen for name, _ in images])
        assert len({*zip(groups, held.tolist(), strict=True)}) == len({*groups}), "each is on one side"
        for label in range(4):
            own = held[labels == label]
            assert 0 < own.sum() < len(own)
            assert abs(own.sum() - share * len(own)) <= max(3, size)
    alone = [(b"1", 0), (b"2", 0), (b"3", 1), (b"4", 1), (b"5", 1)]
    chosen = HoldOut(0.5, "group").chosen(alone, ["x", "x", "x", "y", "z"])  # class 0 is in one group
    assert chosen in ({b"4"}, {b"5"}, {b"4", b"5"})


def test_a_made_table_has_its_folders_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, table = tmp_path / "plain", tmp_path / "plain/labels.csv"
    fill(root, *(f"{label}/{i}.png" for label in "xy" for i in range(9)))
    assert main(["data", "make", "table", str(root)]) == 0
    index, folder, written = open_here(name=str(table)), scan(root, HoldOut()), table.read_bytes()
    assert (index.digest, names(index.val)) == (folder.digest, names(folder.val))
    assert main(["data", "make", "table", str(root)]) == 2
    assert f"{table} already exists" in capsys.readouterr().err
    assert table.read_bytes() == written
    bad = fill(tmp_path / "bad", b"x/\xff.png", b"x/1.png", b"y/1.png", b"y/2.png")
    assert main(["data", "make", "table", str(bad)]) == 2


def test_a_table_trains_to_the_weights_of_its_folder(tmp_path: Path) -> None:
    for split, count in (("train", 8), ("val", 2)):
        fill(tmp_path, *(f"digits/{split}/{label}/{i}.png" for label in "012" for i in range(count)))
    assert main(["data", "make", "table", "digits"]) == 0
    words = (*SMALL, "train.max_steps=3", "data.workers=0", "schedule.warmup=0", "batch.global=8")
    folder = ("data.source=folder", "data.root=digits", "run.dir=runs/folder")
    table = ("data.source=table", "data.table=digits/labels.csv", "run.dir=runs/table")
    of_folder, of_table = (quick("train", "digits", *data, *words) for data in (folder, table))
    assert of_table.done == of_folder.done
    Path("digits").rename("moved")
    Path("moved/labels.csv").rename("labels.csv")
    moved = ("data.source=table", "data.table=labels.csv", "data.root=moved")
    again = ("train", "digits", *moved, *words, "run.dir=runs/table")
    resumed = quick(*again, "train.max_steps=4")
    assert resumed.done["step"] == "4"
    evaluated = quick("evaluate", "runs/table", *moved[1:])
    assert evaluated.done == resumed.done | {"epoch": evaluated.done["epoch"]}
    Path("labels.csv").write_text(Path("labels.csv").read_text().replace(",0,", ",1,", 1))
    assert "has another label" in quick(*again, "train.max_steps=5", code=2).error


@pytest.mark.usefixtures("jpegtran")
def test_parquet_tables_and_packs_of_images_in_them(capsys: pytest.CaptureFixture[str]) -> None:
    paths, labels = zip(*(line.split(",") for line in GOOD.split()), strict=True)
    table = pa.table({"path": paths, "label": pa.array(labels).dictionary_encode(), "n": range(6)})
    pyarrow.parquet.write_table(table, "t.parquet")
    assert open_here(name="t.parquet").digest == index_of(TABLE).digest
    images = [{"bytes": Path(path).read_bytes(), "path": None} for path in paths]
    fields = {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "label": pa.int64()}
    features = {"label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}
    schema = pa.schema(fields, {"huggingface": json.dumps({"info": {"features": features}})})
    inside = pa.table({"image": images, "label": [int(label == "dog") for label in labels]}, schema)
    pyarrow.parquet.write_table(inside, "in.parquet", row_group_size=4)
    with pytest.raises(RequestError, match=r"'pipeline data pack in\.parquet OUT'"):
        open_here(name="in.parquet")
    assert main(["data", "check", "in.parquet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["classes"] == {"cat": 3, "dog": 3}
    assert main(["data", "pack", "in.parquet", "packed"]) == 0
    source = open_source(load("digits", ["data.source=pack", "data.root=packed"]))
    found = {side.name(i): side.read(i) for side in (source.train, source.val) for i in range(len(side))}
    assert found == {f"{row:08}": image["bytes"] for row, image in enumerate(images, 2)}
    for columns, error in (
        ({"path": images, "label": labels}, "row 2, column path: dict is not allowed"),
        ({"path": paths, "label": [[1]] * 6}, "row 2, column label: list"),
        ({"image": paths, "label": labels}, "column .*: missing: there are image, label: name it"),
        ({"path": paths, "species": labels}, "column .*: missing: there are path, species: name it"),
    ):
        pyarrow.parquet.write_table(pa.table(columns), "t.parquet")
        with pytest.raises(RequestError, match=error):
            open_here(name="t.parquet")
    pyarrow.parquet.write_table(inside.append_column("split", [["test"] * 6]), "t.parquet")
    assert main(["data", "check", "t.parquet"]) == 2
    assert "holds no image with a label" in capsys.readouterr().err
    for data in (b"", b"PAR1" * 9, Path("in.parquet").read_bytes()[:-9]):
        with pytest.raises(RequestError, match="Parquet"):
            index_of(data, name="t.parquet")
