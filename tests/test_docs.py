"""What README and docs tell people to type is there, and what can run here is run."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from harness import pipeline

from pipeline.cli.main import parse
from pipeline.config.load import RECIPES, load

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)

# what the pages leave to their reader, here
PLACES = {
    "RECIPE": "digits", "RUN_DIR": "runs/digits", "CHECKPOINT": "runs/digits", "IMAGE…": "data/digits/val/3",
    "FOLDER": "data/digits", "SRC": "data/digits", "OUT": "packed", "N": "2",
}  # fmt: skip
# a run that is long enough to be used, and no longer
SHORT = (
    "model.arch=shufflenet_v2_x0_5",
    "train.max_steps=4",
    "run.device=cpu",
    "run.deterministic=true",
    "track.uri=none",
)
NOT_RUN = {
    "train my.yaml": "wants 8 GPUs",
    "rehearse": "wants Docker: tests/test_containers.py",
    "data make": "train digits has made them: tests/test_data.py",
    "data import": "wants ImageNet's archives: tests/test_import.py",
    "data get": "wants the network",
    "bench data": "tests/test_bench.py",
    "bench train": "tests/test_bench.py",
    "bench track": "tests/test_bench.py",
    "bench comm": "tests/test_bench.py",
    "bench gpu": "wants a GPU",
    "bench top1": "takes minutes",
}


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of each `pipeline` command in a page's blocks, in order, whatever starts it."""
    for _, block in FENCE.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|;|\|", line):
                words = shlex.split(part.replace("…", "x").replace("'", "’"), comments=True)
                names = [at for at, word in enumerate(words) if word in ("pipeline", ".venv/bin/pipeline")]
                if names and re.fullmatch(r"[a-z0-9]+", words[names[0] + 1]):
                    yield words[names[0] + 1 :]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_spelt_right_and_links_lead_somewhere(page: Path) -> None:
    for words in commands(page):
        options = parse(words)  # RequestError if there is no such command or option
        if words[0] in ("train", "plan", "doctor") and not options.recipe.endswith(".yaml"):
            load(options.recipe, options.overrides)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
    for name in re.findall(r"`(?:tests/(?:faults/)?)?(test_\w+\.py)`", page.read_text()):
        assert any((ROOT / "tests").rglob(name)), name


def test_every_feature_has_what_holds_it() -> None:
    rows = re.findall(r"^\| ([AB]\d+) \|(.*)\|$", (ROOT / "docs" / "features.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == [f"A{n}" for n in range(1, 27)] + [f"B{n}" for n in range(1, 18)]
    for name, cells in rows:
        assert re.search(r"`test_\w+\.py`|\]\(\w+\.md\)", cells), name


def test_there_are_commands_to_check() -> None:
    assert sum(len(list(commands(page))) for page in PAGES) > 10


def table_of_commands(page: Path) -> Iterator[list[str]]:
    """The arguments of each command of the page's table: the first of alternatives, without what may be left out."""
    for row in re.findall(r"^\| (`pipeline .*?`) \| ", page.read_text(), re.MULTILINE):
        for command in re.findall(r"`pipeline (.*?)`", row):
            required = re.sub(r" \[[^]]*\]", "", command)
            yield [word.partition("\\|")[0] for word in required.split()]


@pytest.mark.long
def test_each_command_of_the_pages_that_can_run_here_runs(tmp_path: Path) -> None:
    own_data = ROOT / "docs" / "own-data.md"  # has a test of its own
    in_blocks = [words for page in PAGES if page != own_data for words in commands(page)]
    written = [*table_of_commands(ROOT / "README.md"), *in_blocks]
    left_out = {start for words in written for start in NOT_RUN if " ".join(words).startswith(start)}
    assert left_out == NOT_RUN.keys()
    shutil.copy(RECIPES / "digits.yaml", tmp_path / "my.yaml")
    run = set()
    for words in written:
        if " ".join(words).startswith(tuple(NOT_RUN)):
            continue
        given = [PLACES.get(word, word).replace("=/data", "=data/digits") for word in words]
        more = {"train": SHORT, "doctor": ("digits", *SHORT)}.get(words[0], ())
        result = pipeline(*given, *more, cwd=tmp_path, MLFLOW_TRACKING_URI="sqlite:///mlflow.db")
        print(f"{result.seconds:5.1f} s  pipeline {' '.join(given)}")
        assert result.code == 0, (given, result.err)
        run.add(words[0])
    assert run >= {
        "train",
        "predict",
        "evaluate",
        "verify",
        "plan",
        "data",
        "report",
        "sync",
        "doctor",
        "k8s",
        "export",
    }


@pytest.mark.full
def test_your_folder_in_ten_minutes_runs_as_it_is_written(tmp_path: Path) -> None:
    page = ROOT / "docs" / "own-data.md"
    made = ("data", "make", "synthetic", "photos", "--images", "320", "--classes", "2", "--side", "40")
    assert pipeline(*made, cwd=tmp_path).code == 0
    (text,) = [block for language, block in FENCE.findall(page.read_text()) if language == "yaml"]
    recipe = yaml.safe_load(text)
    recipe["model"] = {"arch": "shufflenet_v2_x0_5"}  # whose first weights want no network
    recipe["augment"]["size"] = 32  # which wants no minutes
    recipe["run"] = {"threads": 1}  # of two, the other would wait for another test's
    recipe["train"]["epochs"] = 1
    (tmp_path / "photos.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "new").symlink_to("photos/val")
    written = [words for words in commands(page) if words[0] != "data"]
    assert [words[0] for words in written] == ["plan", "doctor", "train", "predict"]
    for words in [["data", "check", "photos"], *written]:
        result = pipeline(*words, cwd=tmp_path)
        assert result.code == 0, (words, result.err)
    assert "new/" in result.out
    assert (tmp_path / "new.png").exists()
    assert {path.name for path in (tmp_path / "runs/photos/report").glob("*.png")} >= {"curves.png", "confusion.png"}
