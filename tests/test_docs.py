"""The commands in README and docs parse, those that can run here run, and pages can be followed."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from follow_page import FENCE, follow
from follow_page import commands as shell_commands
from harness import quick

from pipeline.cli.main import parse
from pipeline.config.load import RECIPES, load

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md") if (ROOT / name).exists()),
    *sorted(DOCS.glob("*.md")),
]
FOLLOWED = ("README", "getting-started", "your-data", "mlflow", "reproducibility")
"""The pages that are run as a whole: your-data in CI, the others by hand, with `follow_page`."""

# Values for the placeholders of the pages.
PLACEHOLDERS = {
    "RECIPE": "digits", "RUN_DIR": "runs/digits", "CHECKPOINT": "runs/digits", "IMAGE…": "data/digits/val/3",
    "FOLDER": "data/digits", "SRC": "data/digits", "OUT": "packed", "N": "2",
}  # fmt: skip
# Overrides for a run of a few seconds, whose results the other commands use.
SHORT = (
    "model.arch=shufflenet_v2_x0_5", "train.max_steps=4", "run.device=cpu", "run.deterministic=true",
    "track.uri=none",
)  # fmt: skip
NOT_RUN = {
    "train my.yaml": "needs 8 GPUs",
    "doctor my.yaml": "needs 8 GPUs",
    "rehearse": "needs Docker: tests/test_containers.py",
    "data make": "`train digits` has made them: tests/test_data.py",
    "data import": "needs ImageNet's archives: tests/test_import.py",
    "data get": "needs the network",
    "data pack photos s3:": "needs an object store: tests/test_store_pack.py",
    "sync runs/my": "needs an object store",
}
"""Commands that the test does not run, and why."""


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each `pipeline` command in the code blocks of a page."""
    for language, block in FENCE.findall(page.read_text()):
        if language not in ("sh", "text", ""):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|;|\|", line):
                words = shlex.split(
                    part.replace("sha256:…", f"sha256:{64 * '0'}").replace("…", "x").replace("'", "’"),
                    comments=True,
                )
                starts = [
                    index for index, word in enumerate(words, 1) if word in ("pipeline", ".venv/bin/pipeline")
                ]
                if starts and re.fullmatch(r"[a-z0-9]+", words[starts[0]]):
                    yield words[starts[0] :]


@pytest.mark.parametrize("end", ["2", "0 FailureTarget Failed"])
def test_waiting_for_a_job_on_a_cluster_also_ends_when_it_fails(end: str, tmp_path: Path) -> None:
    text = (DOCS / "kubernetes.md").read_text()
    assert not re.search(r"kubectl wait.* job/", text), "it knows one end only"
    loops = re.findall(r"^until kubectl get job .*$", text, re.MULTILINE)
    for loop in loops[:1] if end == "2" else loops:
        (tmp_path / "answers").write_text(f"\n \n0 Suspended\n{end} \nnot asked\n")
        program = "kubectl() { sed -n 1p answers; sed -i 1d answers; }; sleep() { :; }; "
        command = ["bash", "-c", program + loop]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=20, check=False)
        assert (done.returncode, done.stdout.strip()) == (0, end), loop


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path) -> None:
    for words in commands(page):
        if "--help" in words:
            continue
        options = parse(words)  # RequestError if there is no such command or option
        if words[0] in ("train", "plan", "doctor") and not options.recipe.endswith(".yaml"):
            load(options.recipe, options.overrides)


def table_of_commands(page: Path) -> Iterator[list[str]]:
    """Yield the required arguments of each command in the page's tables (the first alternative)."""
    for row in re.findall(r"^\| (`pipeline .*?`) \| ", page.read_text(), re.MULTILINE):
        for command in re.findall(r"`pipeline (.*?)`", row):
            required = re.sub(r" \[[^]]*\]", "", command)
            yield [word.partition("\\|")[0] for word in required.split()]


@pytest.mark.usefixtures("jpegtran")
@pytest.mark.long
def test_each_documented_command_that_can_run_here_succeeds(tmp_path: Path) -> None:
    documented = list(table_of_commands(DOCS / "commands.md"))
    for page in PAGES:
        if page.stem not in FOLLOWED:
            documented += commands(page)
    skipped = {start for words in documented for start in NOT_RUN if " ".join(words).startswith(start)}
    assert skipped == NOT_RUN.keys()
    shutil.copy(RECIPES / "digits.yaml", tmp_path / "my.yaml")
    run = set()
    for words in documented:
        if " ".join(words).startswith(tuple(NOT_RUN)):
            continue
        arguments = [PLACEHOLDERS.get(word, word).replace("root=/data", "root=data/digits") for word in words]
        overrides = {"train": SHORT, "doctor": ("digits", *SHORT)}.get(words[0], ())
        result = quick(*arguments, *overrides, cwd=tmp_path, MLFLOW_TRACKING_URI="sqlite:///mlflow.db")
        print(f"{result.seconds:5.1f} s  pipeline {' '.join(arguments)}")
        assert result.code == 0, (arguments, result.err)
        run.add(words[0])
    expected = "train predict evaluate verify plan data report sync doctor k8s export"
    assert run >= set(expected.split())


@pytest.mark.full
def test_a_page_can_be_followed_in_a_fresh_clone(tmp_path: Path) -> None:
    assert follow(DOCS / "your-data.md", tmp_path) == 0


def test_following_a_page_ends_at_the_first_command_that_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\ncat > made.txt <<'EOF'\ntwo words\nEOF\n# a comment\ntest -f \\\n  made.txt\n```\n"
        "```text\ntouch ../not-a-command\n```\n```sh\nfalse\ntouch ../too-late\n```\n"
    )
    assert list(shell_commands(page)) == [
        "cat > made.txt <<'EOF'\ntwo words\nEOF", "test -f \\\n  made.txt", "false", "touch ../too-late",
    ]  # fmt: skip
    assert follow(page, tmp_path) != 0
    assert (tmp_path / "clone/made.txt").read_text() == "two words\n"
    assert not {"not-a-command", "too-late"} & {path.name for path in tmp_path.iterdir()}
