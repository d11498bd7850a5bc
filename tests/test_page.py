"""The web page of a run is one file that opens anywhere and shows what the run's folder holds."""

import json
import re
import shlex
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import NO_BROWSER, Browser, find_program

from pipeline.addons.report import evaluations
from pipeline.addons.report.evaluations import SavedEvaluation, save_augmented, save_evaluation
from pipeline.addons.report.page import render_page
from pipeline.addons.report.predictions import Predictions
from pipeline.cli.main import main
from pipeline.config.load import load
from pipeline.plan import DataSize
from pipeline.planning import make_plan
from pipeline.record.folder import RunFolder
from pipeline.world import World

HOSTILE = "<script>alert(1)</script>"
CLASSES = [HOSTILE, '"><img src="https://example.org/x.png">', "a long name " * 12]
DONE = "done step=28 epoch=2 top1=0.6667 top5=0.9833 images=3/3 weights=sha256:4f0c"
FIGURES = [word.partition("=")[2] for word in DONE.split()[1:]]
SECTIONS = ["curves", "confusion", "classes", "reliability", "mistakes", "augmentation", "time",
            "evaluations", "receipt", "commands", "configuration"]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a finished run, made by hand, with hostile class names."""
    run = RunFolder(tmp_path / "my run")
    run.path.mkdir()
    config = load("digits", ["run.deterministic=true"])
    plan = make_plan(config, World(size=2, local_size=2), DataSize(1437, 3, 3))
    run.config.write_text(config.to_yaml())
    run.plan.write_text(json.dumps(plan.to_dict()))
    predictions = Predictions(
        np.array([0, 1, 2], np.int32), np.array([0, 0, 2], np.int32), np.ones(3, np.float32)
    )
    pixels = np.zeros((1, 3, 8, 8), np.uint8)
    save_evaluation(run, 28, SavedEvaluation(predictions, CLASSES, np.array([1]), pixels))
    save_augmented(run, pixels, CLASSES[:1])
    scores = {"top1": 2 / 3, "top5": 0.98, "loss": 0.5, "images": "3/3"}
    evaluated = {"step": 28, "weights": "sha256:4f0c", **scores}
    tags = {"world": 2, "epochs": 2, "data": "1f2e", "version": "0.2", "device": "<b>GPU</b>"}
    times = {"time/epoch_s": 8.0, "time/data_s": 6.0, "time/copy_s": 2.0, "time/images_per_s": 300.0}
    rows = [
        {"time": 1_795_411_905_407, "event": "created", "run": "6c0d"},
        {"time": 1_795_411_905_415, "event": "started", "step": 0, "resumed": False, "tags": tags},
        {"time": 1_795_411_907_000, "step": 5,
         "metrics": {"train/loss": 2.3, "train/top1": 0.1, "train/lr": 0.01}},
        {"time": 1_795_411_908_000, "step": 14, "metrics": times},
        {"time": 1_795_411_909_000, "event": "evaluated", **evaluated},
        {"time": 1_795_411_910_000, "event": "ended", "status": "FINISHED", "step": 28,
         "line": DONE, "best": None},
    ]  # fmt: skip
    run.journal.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(run.path)]) == 0
    return run.path


class Page(HTMLParser):
    """The elements and texts of the page of a run's folder, written now."""

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


def test_the_page_shows_the_folder_and_names_no_other_file(folder: Path) -> None:
    page = Page(folder)
    assert page.source == (folder / "report" / "index.html").read_text(), "the same bytes again"
    assert page.sections() == SECTIONS
    run, again = shlex.quote(str(folder)), shlex.quote(f"{folder}-again")
    repeat = f"pipeline train {shlex.quote(f'{folder}/config.yaml')} run.dir={again} --nproc 2"
    expected = {*FIGURES, "finished", "75.0 %", "6.0 s", repeat, f"pipeline verify {run}"}
    assert expected | {*CLASSES[:2], "<b>GPU</b>"} <= set(page.texts), "a class's name is text"
    forbidden = {"script", "link", "iframe", "object", "a", "base", "form"}
    assert not {tag for tag, _ in page.elements} & forbidden
    assert all((image["src"] or "").startswith("data:image/png;base64,") for image in page.all("img"))
    assert len(page.all("img")) == 6, "four pictures, a mistake and an augmented image"
    names = {name for _, attributes in page.elements for name in attributes}
    assert not {name for name in names if name.startswith("on") or name in ("href", "srcset", "background")}
    assert not re.search(r"url\(|@import", page.source)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert {"http-equiv": "Content-Security-Policy", "content": policy} in page.all("meta")


def test_a_missing_or_damaged_part_is_left_out_and_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert DONE not in page.texts
    journal.write_text(rows)

    for name in ("plan.json", "report/curves.png", "report/classes.png"):
        (folder / name).unlink()
    saved = folder / "report" / "data" / "step-00000028.npz"
    with monkeypatch.context() as patch:
        patch.setattr(evaluations, "_MAX_BYTES", 100)
        assert "mistakes" not in Page(folder).sections(), "it would unpack to too many bytes"
    saved.write_bytes(saved.read_bytes()[:100])
    page = Page(folder)
    shown = ["confusion", "reliability", "augmentation", "time", "configuration", "left-out"]
    assert page.sections() == shown
    named = {"summary", "curves", "frequent confusions", "accuracy of each class", "mistakes", "commands"}
    assert named <= set(page.texts)


def test_the_page_opens_in_a_browser_without_a_network(folder: Path, tmp_path: Path) -> None:
    address = (folder / "report" / "index.html").as_uri()
    program = find_program() or pytest.skip(NO_BROWSER)
    with closing(Browser(program, tmp_path / "profile")) as browser:
        for width in (400, 1200):
            browser.requests.clear()
            browser.open(address, width, 900)
            text = browser.evaluate("document.body.innerText")
            assert all(figure in text for figure in (*FIGURES, HOSTILE))
            assert browser.evaluate("[...document.images].map(image => image.naturalWidth > 0)") == [True] * 6
            assert browser.evaluate("document.scripts.length") == 0
            assert browser.evaluate("document.documentElement.scrollWidth") == width, "no overflow"
            assert {name for name in browser.requests if not name.startswith("data:")} == {address}
