"""Tables of labels: the same samples as an image folder, splits by group, and what is refused."""

import csv
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from harness import SMALL, quick
from streams import stream
from test_data import fill, names, small_png

from pipeline.addons.datasets.holdout import HoldOut
from pipeline.addons.datasets.index import MISSING, Index
from pipeline.addons.datasets.manifest import scan
from pipeline.addons.datasets.sources import open_source
from pipeline.cli.main import main
from pipeline.config.load import load
from pipeline.errors import RequestError, RunError

GOOD = "a/1.png,cat\na/2.png,cat\na/3.png,cat\nb/1.png,dog\nb/2.png,dog\nb/3.png,dog\n"
HEAD = "path,label\n"
LATIN = "path,label\na/1.png,K\xe4fer\n".encode("latin-1")

# The bytes of a table named t.csv, more keys, and what the error names. {GOOD}: six good rows.
WRONG: list[tuple[str | bytes, str, str]] = [
    ("", "", "row 1, column path: missing"),
    ("\n" + GOOD, "", "row 1, column path: missing"),
    (GOOD, "", "row 1, column path: missing: there are a/1.png, cat"),
    ("file,label\n" + GOOD, "", "row 1, column path: missing: there are file, label"),
    ("path,class\n" + GOOD, "", "row 1, column label: missing: there are path, class"),
    ("Path,Label\n" + GOOD, "", "data.columns.path=NAME"),
    ("path,label,label\na/1.png,cat,dog\n", "", "row 1, column label: twice"),
    ("path,label,split,split\n", "", "row 1, column split: twice"),
    (HEAD + GOOD, "data.columns.path=file", "row 1, column file: missing"),
    (HEAD + GOOD, "data.columns.split=part", "row 1, column part: missing"),
    (HEAD + GOOD, "data.columns.group=patient", "row 1, column patient: missing"),
    (HEAD + GOOD, "data.columns.label=[cat,dog]", "row 1, column cat: missing"),
    (HEAD + GOOD, "data.columns.pth=path", "data.columns"),
    (HEAD + GOOD, "data.columns=path", "data.columns=path"),
    (HEAD + GOOD, "data.columns.path=", "data.columns"),
    ((HEAD + GOOD).replace(",", ";"), "", "save it as CSV (UTF-8), with commas"),
    ((HEAD + GOOD).replace(",", "\t"), "", "with commas between the columns"),
    ((HEAD + GOOD).replace(",", "|"), "", "with commas between the columns"),
    (b"PK\x03\x04\x14\x00\x06\x00\x08\x00\x00\x00!\x00\xb7", "", "row 1"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "", "row 1: this is not UTF-8 text"),
    (LATIN, "", "row 2: this is not UTF-8 text"),
    ((HEAD + GOOD).encode("utf-16"), "", "row 1: this is not UTF-8 text"),
    (HEAD.encode() + b"a/1.png,\xff\n", "", "row 2: this is not UTF-8 text"),
    (HEAD, "", "holds no image with a label"),
    (HEAD + "\n\n\n", "", "holds no image with a label"),
    (HEAD + "a/1.png,cat\na/2.png,cat\n", "", "holds one class, cat"),
    (HEAD + "a/1.png\n", "", "row 2, column label: the row has 1 cell and the header 2"),
    (HEAD + GOOD + "a/4.png,cat,3\n", "", "row 8, column label: the row has 3 cells"),
    (HEAD + GOOD + "a/4.png,cat,\n", "", "row 8, column label: the row has 3 cells"),
    (HEAD + "a/1.png,\n" + GOOD, "", "row 2, column label: it is empty"),
    (HEAD + "a/1.png,   \n", "", "row 2, column label: it is empty"),
    (HEAD + "a/1.png,c\0t\n", "", "row 2, column label: it has a NUL character"),
    (HEAD + ",cat\n" + GOOD, "", "row 2, column path: it is empty"),
    (HEAD + "  ,cat\n" + GOOD, "", "row 2, column path: "),
    (HEAD + "a/\0.png,cat\n", "", "row 2, column path: it has a NUL character"),
    (HEAD + GOOD + "../x.png,cat\n", "", "row 8, column path: ../x.png is no file in data.root"),
    (HEAD + "a/../../x.png,cat\n", "", "row 2, column path: a/../../x.png is no file"),
    (HEAD + "..,cat\n", "", "row 2, column path: .. is no file"),
    (HEAD + "..\\x.png,cat\n", "", "row 2, column path: ..\\x.png is no file"),
    (HEAD + "/etc/passwd,cat\n", "", "row 2, column path: /etc/passwd is no file"),
    (HEAD + "C:\\a\\1.png,cat\n", "", "row 2, column path: C:\\a\\1.png is no file"),
    (HEAD + "./,cat\n", "", "row 2, column path: ./ is no file"),
    (HEAD + "a,cat\n" + GOOD, "", "row 2, column path: a is a folder"),
    (HEAD + "a/,cat\n" + GOOD, "", "row 2, column path: a is a folder"),
    (HEAD + "s3://bucket/1.png,cat\n", "", "row 2, column path: the folder of s3:/bucket/1.png"),
    (HEAD + GOOD + "c/1.png,cat\n", "", "row 8, column path: the folder of c/1.png"),
    (HEAD + "void/1.png,cat\n" + GOOD, "", "row 2, column path: the folder of void/1.png"),
    (HEAD + "a/1,cat\nb/1,dog\n", "", "row 2, column path: data.root="),
    (HEAD + GOOD, "data.root=t.csv", "the folder of a/1.png in data.root=t.csv is missing"),
    (HEAD + GOOD, "data.root=nowhere", "row 2, column path: the folder of a/1.png"),
    (HEAD + GOOD + "a/1.png,dog\n", "", "row 8, column label: a/1.png has another label in row 2"),
    (HEAD + GOOD + "a/./1.png,dog\n", "", "row 8, column label: a/1.png has another label in row 2"),
    (HEAD + "\n" + GOOD + "a\\1.png,dog\n", "", "row 9, column label: a/1.png has another label in row 3"),
    ("path,label,split\na/1.png,cat,train\na/1.png,cat,val\n", "", "row 3, column split: a/1.png has"),
    ("path,label,split\na/1.png,cat,test\na/1.png,cat,val\n", "", "row 3, column split: a/1.png has"),
    ("path,label,split\na/1.png,cat,val\na/1.png,,test\n", "", "row 3, column split: a/1.png has"),
    ("path,label,split\na/1.png,cat,\n", "", "row 2, column split"),
    ("path,label,split\na/1.png,cat,holdin\n", "", "row 2, column split: holdin is not allowed"),
    ("path,label,split\na/1.png,cat,images\n", "", "row 2, column split: images is not allowed"),
    ("path,label,split\na/1.png,cat,train\nb/1.png,dog,val\n", "", "no image to train of class dog"),
    ("path,label,split\na/1.png,cat,val\nb/1.png,dog,val\n", "", "no image to train of class cat, dog"),
    ("path,label,split\na/1.png,cat,test\nb/1.png,dog,test\n", "", "holds no image with a label"),
    (HEAD + GOOD, "data.split_by=group", "row 2, column group: missing or empty"),
    ("path,label,group\na/1.png,cat,x\na/2.png,dog, \n", "data.split_by=group", "row 3, column group"),
    ("path,label,group,split\na/1.png,cat,x,train\na/2.png,dog,x,val\n", "data.split_by=group",
     "row 3, column group: x is in train in row 2"),
    ("path,cat,dog\na/1.png,1,2\n", "data.columns.label=[cat,dog]", "row 2, column dog: 2 is not 0 or 1"),
    ("path,cat,dog\na/1.png,,1\n", "data.columns.label=[cat,dog]", "row 2, column cat:  is not 0 or 1"),
    ("path,cat\na/1.png,1\na/2.png,0\n", "data.columns.label=[cat]", "holds one class, cat"),
    (HEAD + f"a/1.png,{'x' * 200_000}\n", "", "row 2: field larger than field limit"),
    (HEAD + GOOD + 'a/4.png,"cat\n', "", "row 8: unexpected end of data"),
    (HEAD + 'a/1.png,"cat"s\n', "", "row 2: "),
    (HEAD + "a/1.png,cat\ra/2.png,dog\n", "", "row 2: new-line character"),
    (HEAD + GOOD, "data.table=a", "data.table=a does not have the name of a table"),
    (HEAD + GOOD, "data.table=void.csv", "data.table=void.csv cannot be read: not a regular file"),
    (HEAD + GOOD, "data.table=none.csv", "data.table=none.csv cannot be read: No such file"),
    (HEAD + GOOD, "data.table=none", "data.table is missing"),
    (HEAD + GOOD, "data.table=t.xlsx", "does not have the name of a table"),
    (HEAD + GOOD, "data.table=s3://bucket/t.csv", "s3://bucket/t.csv"),
    (HEAD + GOOD, "data.root=s3://bucket/x", "data.source=pack"),
    (HEAD + GOOD, "data.source=folder data.root=.", "data.table=t.csv is for data.source=table"),
    (HEAD + GOOD, "data.source=folder data.table=auto data.root=. data.split_by=group", "data make table"),
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with three images in each of a/ and b/, and an empty folder."""
    monkeypatch.chdir(fill(tmp_path, *(f"{folder}/{i}.png" for folder in "ab" for i in (1, 2, 3))))
    for name in ("void", "void.csv"):
        (tmp_path / name).mkdir()
    return tmp_path


def index_of(table: str | bytes, *words: str, name: str = "t.csv") -> Index:
    """Write a table and open it as a training does."""
    Path(name).write_bytes(table if isinstance(table, bytes) else table.encode())
    return open_here(*words, name=name)


def open_here(*words: str, name: str = "t.csv") -> Index:
    index = open_source(load("digits", ["data.source=table", f"data.table={name}", *words])).index
    assert isinstance(index, Index)
    assert Index.from_bytes(index.to_bytes()).digest == index.digest
    return index


def rows(index: Index) -> dict[str, tuple[str, str]]:
    """Return label and split of each image by its name."""
    return {
        split.name(i).decode(): (index.label_name(split.labels[i]), part)
        for part, split in (("train", index.train), ("val", index.val))
        for i in range(len(split))
    }


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("table", "words", "expected"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_table_is_one_line_that_names_row_and_column(
    table: str | bytes, words: str, expected: str
) -> None:
    with pytest.raises(RunError) as caught:
        index_of(table, *words.split())
    assert caught.type is RequestError
    assert expected.replace("  ", " ") in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.mark.usefixtures("here")
def test_a_table_is_read_as_people_write_it() -> None:
    plain = index_of(HEAD + GOOD)
    assert rows(plain)["a/1.png"][0] == "cat"
    assert (plain.classes, len(plain.train), len(plain.val)) == (("cat", "dog"), 4, 2)
    for table in (
        "\ufeff" + HEAD + GOOD, (HEAD + GOOD).replace("\n", "\r\n"), HEAD + GOOD.replace("/", "\\"),
        HEAD + "\n" + GOOD.replace("a/", "./a//"), "label , path,x\n" + "".join(
            f"{label},{path},\n" for path, label in (line.split(",") for line in GOOD.split())
        ), HEAD + "".join(reversed((HEAD + GOOD).splitlines(keepends=True)[1:])), (HEAD + GOOD)[:-1],
    ):  # fmt: skip
        assert index_of(table).digest == plain.digest
    assert index_of((HEAD + GOOD).replace(",", "\t"), name="t.tsv").digest == plain.digest
    renamed = ("data.columns.path=file name", "data.columns.label=species")
    assert index_of("file name,species\n" + GOOD, *renamed).digest == plain.digest
    with_test = index_of(
        "path,label,split\na/1.png,cat,Training\na/2.png,cat,valid\nb/1.png,dog,trn\nb/2.png,dog,dev\n"
        "a/3.png,,test\nb/1.png,dog,train\n"
    )
    assert rows(with_test)["a/2.png"] == ("cat", "val")
    assert with_test.size.notes == "left out: 1 of the test split, 1 repeated rows"
    assert with_test.split_rule() is None
    held = index_of("path,label,split\n" + GOOD.replace("\n", ",train\n"))
    assert (held.digest, held.split_rule()) == (plain.digest, plain.split_rule())


@pytest.mark.usefixtures("here")
def test_labels_that_look_equal_are_one_class_and_the_plan_says_so() -> None:
    index = index_of(HEAD + GOOD.replace("1.png,cat", "1.png,Caf\xe9").replace(
        "2.png,cat", "2.png,Cafe\u0301 ").replace("3.png,cat", "3.png,Caf\xe9"))  # fmt: skip
    assert index.classes == ("Caf\xe9", "dog")
    (note,) = index.notes
    assert note.startswith("taken as one label: ")
    assert "('Cafe\\u0301 ') = " in note
    assert "('Caf\\xe9')" in note
    fill(Path("a"), "Cafe\u0301.png".encode(), "e\u0301/1.png".encode())
    index = index_of(HEAD + GOOD + "a/Caf\xe9.png,cat\na/\xe9/1.png,cat\n")
    assert {"a/Cafe\u0301.png", "a/e\u0301/1.png"} <= rows(index).keys()
    assert MISSING not in index.train.sizes
    assert index_of(HEAD + GOOD.replace("cat", "007").replace("dog", "7")).classes == ("007", "7")


@pytest.mark.usefixtures("here")
def test_a_missing_file_is_a_named_defect(capsys: pytest.CaptureFixture[str]) -> None:
    index = index_of(HEAD + GOOD + "a/4.png,cat\n")
    assert "1 file missing, such as a/4.png in row 8" in index.size.notes
    assert main(["data", "check", "t.csv", "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert found["defects"] == [{"file": "a/4.png", "reason": "No such file or directory"}]
    assert (found["images"], found["classes"]) == (7, {"cat": 4, "dog": 3})


@pytest.mark.usefixtures("here")
def test_data_check_names_twins_across_splits_and_images_with_two_labels(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, shade in (("a/1", 40), ("a/2", 90), ("a/3", 40), ("b/1", 130), ("b/2", 90), ("b/3", 220)):
        Path(f"{name}.png").write_bytes(small_png(shade))
    table = "path,label,split\n" + GOOD.replace("\n", ",train\n").replace("3.png,cat,train", "3.png,cat,val")
    Path("t.csv").write_text(table)
    assert main(["data", "check", "t.csv", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["twins"] == [["a/1.png", "a/3.png"]]
    assert found["two_labels"] == [["a/2.png", "b/2.png"]]
    assert main(["data", "check", "t.csv", "--write-sums"]) == 2


@pytest.mark.usefixtures("here")
def test_several_labels_are_sets_of_classes_however_they_are_written() -> None:
    labels = ["cat;dog", "dog", "", "cat", " dog ; cat;", "cat; cat"]
    paths = [line.split(",")[0] for line in GOOD.split()]
    table = "path,label,split\n" + "".join(
        f"{path},{label},{'val' if path == 'b/3.png' else 'train'}\n"
        for path, label in zip(paths, labels, strict=True)
    )
    index = index_of(table)
    assert (index.classes, index.label_sets) == (("cat", "dog"), ((), (0,), (0, 1), (1,)))
    assert rows(index)["b/2.png"][0] == "cat;dog"
    assert index.train.labels.tolist() == [2, 3, 0, 1, 2]
    assert index.class_counts(index.train).tolist() == [3, 3]
    columns = "path,dog,cat,split\n" + "".join(
        f"{path},{int('dog' in label)},{float('cat' in label)},{'val' if path == 'b/3.png' else 'train'}\n"
        for path, label in zip(paths, labels, strict=True)
    )
    with pytest.raises(RequestError, match="no image to train of class bird"):
        index_of(table.replace("cat; cat,val", "bird;cat,val"))
    assert index_of(columns, "data.columns.label=[dog, cat]").digest == index.digest
    assert main(["data", "pack", "t.csv", "out", "--level", "raw=8", "data.columns.label=[dog, cat]"]) == 0
    packed = open_source(load("digits", ["data.source=pack", "data.root=out"]))
    assert packed.label_sets == index.label_sets
    assert packed.train.labels.tolist() == index.train.labels.tolist()


def test_groups_stay_together_and_classes_keep_their_shares() -> None:
    draw = np.random.default_rng(5)
    for share, size in ((0.1, 1), (0.1, 8), (0.3, 40), (0.5, 3), (0.2, 333), (0.02, 200)):
        groups = [f"g{i // size}" for i in range(1000)]
        images = [(f"{i}".encode(), int(draw.integers(0, 4))) for i in range(1000)]
        chosen = HoldOut(share, "group").chosen(images, groups)
        held = [name in chosen for name, _ in images]
        sides = {(group, side) for group, side in zip(groups, held, strict=True)}
        assert len(sides) == len(set(groups))
        assert chosen == HoldOut(share, "group").chosen(images[::-1], groups[::-1])
        for label in range(4):
            own = [side for (_, one), side in zip(images, held, strict=True) if one == label]
            assert 0 < sum(own) < len(own)
            assert abs(sum(own) - share * len(own)) <= max(3, size)
    alone = [(b"1", 0), (b"2", 0), (b"3", 1), (b"4", 1), (b"5", 1)]
    chosen = HoldOut(0.5, "group").chosen(alone, ["x", "x", "x", "y", "z"])  # class 0 is in one group
    assert chosen in ({b"4"}, {b"5"}, {b"4", b"5"})


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Iterator[Path]:
    """Return a folder with digits/, 36 of the digits with train/ and val/, and a table of them."""
    root = tmp_path_factory.mktemp("tables")
    for split, count in (("train", 8), ("val", 2)):
        for label in "012":
            for path in sorted((digits / split / label).iterdir())[:count]:
                (root / "digits" / split / label).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, root / "digits" / split / label)
    before = Path.cwd()
    os.chdir(root)
    assert main(["data", "make", "table", "digits"]) == 0
    yield root
    os.chdir(before)


def test_made_tables_have_the_images_of_their_folder(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = (tables / "digits/labels.csv").read_text()
    with open(tables / "digits/labels.csv", newline="") as file:
        assert next(csv.reader(file)) == ["path", "label", "split"]
    index, folder = open_here(name="digits/labels.csv"), scan(Path("digits"), HoldOut())
    assert (index.digest, index.classes) == (folder.digest, folder.classes)
    assert main(["data", "make", "table", "digits"]) == 2
    assert "digits/labels.csv already exists" in capsys.readouterr().err
    assert (tables / "digits/labels.csv").read_text() == written
    plain = fill(tmp_path / "plain", *(f"{label}/{i}.png" for label in "xy" for i in range(9)))
    assert main(["data", "make", "table", str(plain)]) == 0
    index, folder = open_here(name=str(plain / "labels.csv")), scan(plain, HoldOut())
    assert (index.digest, names(index.val)) == (folder.digest, names(folder.val))
    bad = fill(tmp_path / "bad", b"x/\xff.png", b"x/1.png", b"y/1.png", b"y/2.png")
    assert main(["data", "make", "table", str(bad)]) == 2


@pytest.mark.usefixtures("tables", "jpegtran")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_the_stream_is_the_same_over_a_folder_its_table_and_their_pack() -> None:
    words = ("batch.global=8", "augment.size=32", "data.workers=0")
    expected, _ = stream(Path("digits"), range(5), "data.source=folder", *words)
    table = ("data.source=table", "data.table=digits/labels.csv", *words)
    assert main(["data", "pack", "digits/labels.csv", "packed"]) == 0
    for world in (1, 2, 4):
        assert stream(Path("digits"), range(5), *table, world=world)[0] == expected
        assert stream(Path("packed"), range(5), "data.source=pack", *words, world=world)[0] == expected


@pytest.mark.usefixtures("tables")
def test_a_table_trains_to_the_weights_of_its_folder_and_is_evaluated_wherever_it_is(tmp_path: Path) -> None:
    words = (
        *SMALL,
        "train.max_steps=3",
        "data.workers=0",
        "schedule.warmup=0",
        "batch.global=8",
        "train.epochs=2",
    )
    data = {"folder": ("data.source=folder", "data.root=digits"),
            "table": ("data.source=table", "data.table=digits/labels.csv")}  # fmt: skip
    results = {
        name: quick("train", "digits", *keys, *words, f"run.dir=runs/{name}") for name, keys in data.items()
    }
    assert results["table"].done == results["folder"].done
    shutil.copytree("digits", tmp_path / "moved")
    (tmp_path / "moved/labels.csv").rename(tmp_path / "labels.csv")
    moved = ("data.source=table", f"data.table={tmp_path}/labels.csv", f"data.root={tmp_path}/moved")
    resumed = quick("train", "digits", *moved, *words, "train.max_steps=4", "run.dir=runs/table")
    assert resumed.done["step"] == "4"
    evaluated = quick("evaluate", "runs/table", *moved[1:])
    assert evaluated.done == resumed.done | {"epoch": evaluated.done["epoch"]}
    lines = (tmp_path / "labels.csv").read_text().splitlines(keepends=True)
    changed = lines[1].replace(",0,", ",1,")
    (tmp_path / "labels.csv").write_text("".join([lines[0], changed, *lines[2:]]))
    other = quick("train", "digits", *moved, *words, "train.max_steps=5", "run.dir=runs/table")
    assert (other.code, "has another label" in other.error) == (2, True)


@pytest.mark.usefixtures("here", "jpegtran")
def test_parquet_tables_and_packs_of_images_in_them(capsys: pytest.CaptureFixture[str]) -> None:
    paths, labels = zip(*(line.split(",") for line in GOOD.split()), strict=True)
    table = pa.table({"path": paths, "label": pa.array(labels).dictionary_encode(), "n": range(6)})
    pyarrow.parquet.write_table(table, "t.parquet")
    assert open_here(name="t.parquet").digest == index_of(HEAD + GOOD).digest
    images = [{"bytes": Path(path).read_bytes(), "path": None} for path in paths]
    features = {"label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}
    schema = pa.schema({"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "label": pa.int64()})
    schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    inside = pa.table({"image": images, "label": [int(label == "dog") for label in labels]}, schema)
    pyarrow.parquet.write_table(inside, "in.parquet", row_group_size=4)
    with pytest.raises(RequestError, match=r"'pipeline data pack in\.parquet OUT'"):
        open_here(name="in.parquet")
    assert main(["data", "check", "in.parquet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["classes"] == {"cat": 3, "dog": 3}
    assert main(["data", "pack", "in.parquet", "packed"]) == 0
    source = open_source(load("digits", ["data.source=pack", "data.root=packed"]))
    sides = (source.train, source.val)
    found = {images.name(i): images.read(i) for images in sides for i in range(len(images))}
    assert found == {f"{row:08}": image["bytes"] for row, image in enumerate(images, 2)}
    for column, error in (
        ("path", "row 2, column path: dict is not allowed"),
        ("label", "row 2, column label: list"),
    ):
        pyarrow.parquet.write_table(
            pa.table({"path": paths, "label": labels} | {column: [[1]] * 6 if column == "label" else images}),
            "t.parquet",
        )
        with pytest.raises(RequestError, match=error):
            open_here(name="t.parquet")
    for columns in ({"image": paths, "label": labels}, {"path": paths, "species": labels}):
        pyarrow.parquet.write_table(pa.table(columns), "t.parquet")
        with pytest.raises(
            RequestError, match=f"column .*: missing: there are {', '.join(columns)}: name it"
        ):
            open_here(name="t.parquet")
    pyarrow.parquet.write_table(inside.append_column("split", [["test"] * 6]), "t.parquet")
    assert main(["data", "check", "t.parquet"]) == 2
    assert "holds no image with a label" in capsys.readouterr().err
    for data in (b"", b"PAR1" * 9, Path("in.parquet").read_bytes()[:-9]):
        with pytest.raises(RequestError, match="Parquet"):
            index_of(data, name="t.parquet")
