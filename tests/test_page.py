"""The figures and the page of a run show what its folder holds; the page opens anywhere."""

import json
import re
import shlex
import shutil
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import NO_BROWSER, Browser, find_program
from harness import SMALL, Job, quick
from matplotlib.text import Text

from pipeline.addons.report import evaluations, figures
from pipeline.addons.report.figures import EVALUATION_FIGURES
from pipeline.addons.report.page import render_page
from pipeline.addons.report.predictions import Predictions
from pipeline.record.folder import RunFolder

HOSTILE = ["<script>alert(1)<script>", '"><img src="x.png">']
SECTIONS = ["curves", "confusion", "classes", "reliability", "mistakes", "augmentation", "time",
            "evaluations", "receipt", "commands", "configuration"]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Job:
    root = tmp_path_factory.mktemp("page")
    for split in ("train", "val"):
        for digit, name in enumerate(HOSTILE):
            shutil.copytree(digits / split / str(digit), root / "data" / split / name)
    words = ["digits", "data.source=folder", f"data.root={root / 'data'}", *SMALL, "track.report=true"]
    return Job(root / "run", [*words, "data.workers=0", "train.max_steps=6"], nproc=2).finished()


@pytest.fixture
def folder(run: Job, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(run.folder, tmp_path / "my run"))
    quick("report", str(copy), code=0)
    return copy


class Page(HTMLParser):
    """The elements and texts of the page of a run's folder, made now."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.source = render_page(RunFolder(folder))
        self.feed(self.source)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, text: str) -> None:
        self.texts.append(text.strip())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def sections(self) -> list[str | None]:
        return [section["id"] for section in self.all("section")]


def test_the_page_shows_the_folder_and_names_no_other_file(folder: Path, run: Job) -> None:
    page = Page(folder)
    assert page.source == (folder / "report" / "index.html").read_text(), "the same bytes again"
    assert page.sections() == SECTIONS
    config, again = shlex.quote(f"{folder}/config.yaml"), shlex.quote(f"{folder}-again")
    repeat = f"pipeline train {config} run.dir={again} --nproc 2"
    figures = [word.partition("=")[2] for word in run.output().split()[1:]]
    expected = {*figures, "finished", repeat, f"pipeline verify {shlex.quote(str(folder))}"}
    assert expected | {*HOSTILE} <= set(page.texts), "a class's name is text"
    forbidden = {"script", "link", "iframe", "object", "a", "base", "form"}
    assert not {tag for tag, _ in page.elements} & forbidden
    assert all((image["src"] or "").startswith("data:image/png;base64,") for image in page.all("img"))
    assert len(page.all("img")) >= 6, "four pictures, mistakes and augmented images"
    names = {name for _, attributes in page.elements for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in ("href", "srcset", "background")}
    assert not re.search(r"url\(|@import", page.source)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert {"http-equiv": "Content-Security-Policy", "content": policy} in page.all("meta")


def test_a_damaged_part_is_left_out_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = folder / "journal.jsonl"
    rows = journal.read_text()
    for damage in ({"weights": 5}, {"loss": "low"}, {"top1": "high"}):
        row = {"time": 1, "event": "evaluated", "step": 30, "weights": "", "top1": 0.9, "images": "3/3"}
        journal.write_text(rows + json.dumps(row | damage) + "\n")
        page = Page(folder)
        assert page.sections() == [*(name for name in SECTIONS if name != "evaluations"), "left-out"]
        assert "evaluations" in page.texts
    journal.write_text("".join(rows.splitlines(keepends=True)[:2]))
    page = Page(folder)
    assert "running or killed" in page.texts, "a run that has just started has a page"
    assert "finished" not in page.texts

    (saved,) = evaluations.saved_evaluations(folder / "report")
    with monkeypatch.context() as patch:
        patch.setattr(evaluations, "_MAX_BYTES", 100)
        assert "mistakes" not in Page(folder).sections(), "it would unpack to too many bytes"
    for name in ("plan.json", "report/curves.png", "report/classes.png"):
        (folder / name).unlink()
    whole = saved.read_bytes()
    for damage in (lambda: saved.write_bytes(whole[:100]), lambda: np.savez(saved, labels=np.array([{}]))):
        damage()
        log = quick("report", str(folder), code=0).err
        assert log.count(f"cannot be drawn: {saved.name} is damaged") == len(EVALUATION_FIGURES)
        page = Page(folder)
        assert not {"classes", "mistakes", "commands"} & {*page.sections()}
        assert {"summary", "frequent confusions", "accuracy of each class", "commands"} <= set(page.texts)
    not_started = quick("report", str(folder / "report"), code=2)
    assert "is not the folder of a run that has started" in not_started.error


# seven images, one of which cannot be decoded
PREDICTIONS = Predictions(
    np.array([0, 1, 2, 2, 1, -1, 0], np.int32),
    np.array([0, 2, 2, 1, 0, 1, 2], np.int32),
    np.array([0.9, 0.4, 0.8, 0.95, 0.6, 0.99, 0.6], np.float32),
)


def test_mistakes_are_sorted_by_confidence_and_confusion_counts_each_image_once() -> None:
    # most confident first, equal ones in order; a bad image is no mistake
    assert evaluations.most_confident_mistakes(PREDICTIONS, 3).tolist() == [3, 4, 6]
    matrix = evaluations.confusion_matrix(PREDICTIONS, np.arange(3))
    assert matrix.tolist() == [[1, 0, 1], [1, 0, 1], [0, 1, 1]]
    # class 0 has one false negative and one false positive
    assert evaluations.most_confused_classes(PREDICTIONS, 3, 2).tolist() == [1, 2]
    assert evaluations.confusion_matrix(PREDICTIONS, np.array([1, 2])).tolist() == [[0, 1], [1, 1]]
    assert evaluations.most_frequent_confusions(PREDICTIONS, 1) == [(0, 2, 1)]
    assert [numbers.tolist() for numbers in PREDICTIONS.count_correct(3)] == [[1, 0, 1], [2, 2, 2]]
    absent = Predictions(np.array([0, 0, 2], np.int32), np.array([0, 1, 2], np.int32), np.ones(3))
    assert absent.balanced_accuracy() == 0.75, "of the classes that have images"


def draw(predictions: Predictions, classes: list[str]) -> list[bytes]:
    pixels = np.empty((0, 3, 8, 8), np.uint8)
    evaluation = evaluations.SavedEvaluation(predictions, classes, np.empty(0, np.int64), pixels)
    return [make(evaluation, "step 12") for make in EVALUATION_FIGURES.values()]


def test_figures_say_what_their_numbers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    make = figures._figure
    monkeypatch.setattr(figures, "_figure", lambda *size: drawn.append(make(*size)) or drawn[-1])
    draw(PREDICTIONS, ["$5", "日本", "i" * 200])
    confusion, classes, reliability = [{text.get_text() for text in figure.findobj(Text)} for figure in drawn]
    names = {"$5", "class 1", "i" * 23 + "…"}
    assert {"true class", "predicted class", "1", *names} <= confusion
    assert {"0/2", "1/2", *names} <= classes
    assert any("expected calibration error 0.4750, 15 bins" in text for text in reliability)

    labels, predicted = np.random.default_rng(0).integers(0, 20_000, (2, 100_000), np.int32)
    many = Predictions(labels, predicted, np.ones(100_000, np.float32))
    for png in draw(many, [f"class {label}" for label in range(20_000)]):
        assert png.startswith(b"\x89PNG")


def test_each_class_has_a_recall_of_its_own_by_a_name_that_mlflow_takes() -> None:
    classes = ["a/b", "a:b", "..", ".", "c.d", "plain"]
    labels = np.arange(len(classes), dtype=np.int32)
    recalls = Predictions(labels, labels, np.ones(len(classes))).by_class(classes)
    assert list(recalls) == [f"recall/{name}" for name in ("a_b_0", "a_b_1", ".._2", "._3", "c.d", "plain")]


def test_the_page_opens_in_a_browser_without_a_network(folder: Path, tmp_path: Path) -> None:
    address = (folder / "report" / "index.html").as_uri()
    with closing(Browser(find_program() or pytest.skip(NO_BROWSER), tmp_path / "profile")) as browser:
        for width in (400, 1200):
            browser.requests.clear()
            browser.open(address, width, 900)
            assert HOSTILE[0] in browser.evaluate("document.body.innerText")
            assert all(browser.evaluate("[...document.images].map(image => image.naturalWidth > 0)"))
            assert browser.evaluate("document.scripts.length") == 0
            assert browser.evaluate("document.documentElement.scrollWidth") == width, "no overflow"
            assert {name for name in browser.requests if not name.startswith("data:")} == {address}
