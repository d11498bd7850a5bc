"""The pages of the project are complete, as short as promised, and valid for their readers."""

import contextlib
import io
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from pipeline.cli.main import parse

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_readme_is_read_in_minutes() -> None:
    assert len(README.splitlines()) <= 120
    assert len(README.split()) <= 900
    first_screen = README[: README.index("make test") + 9]
    assert re.findall(r"^make \w+", first_screen, re.MULTILINE) == ["make train", "make test"]


def test_every_link_leads_somewhere_and_the_readme_links_every_page() -> None:
    broken, linked = [], set()
    for page in PAGES:
        for link, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", page.read_text()):
            target = page.parent / link if link else page
            heads = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE) if anchor else []
            anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            if not target.exists() or (anchor and anchor not in anchors):
                broken.append(f"{page.name}: {link}#{anchor}")
            linked |= {target} if page.name == "README.md" else set()
    assert not broken
    assert not set(PAGES) - {ROOT / "README.md", *linked}


def help_of(*words: str) -> str:
    """Return the help text of a command."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        parse([*words, "--help"])
    return text.getvalue()


def test_the_table_of_commands_is_complete_and_names_existing_flags() -> None:
    rows = re.findall(
        r"^\| `pipeline ([a-z0-9 ]+)(.*?)` \| ", (ROOT / "docs/commands.md").read_text(), re.MULTILINE
    )
    commands = {row.split()[0] for row, _ in rows}
    assert commands == set(re.findall(r"^ {4}([a-z0-9]+)\b", help_of(), re.MULTILINE))
    for row, arguments in rows:
        words = [word for word in row.split() if word not in ("digits", "imagenette", "imagenet", "bash")]
        text = help_of(*words)
        assert not [flag for flag in re.findall(r"--[a-z-]+", arguments) if flag not in text], row


@pytest.mark.parametrize("page", ["README.md", "docs/promises.md"])
def test_every_promise_names_its_tests(page: str) -> None:
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    text = (ROOT / page).read_text()
    section = text.partition("\n## Promises\n")[2].partition("\n## ")[0] or text
    rows = re.findall(r"^\| (?!promise|feature|---)(.+) \| (.+) \|$", section, re.MULTILINE)
    assert len(rows) >= 10
    for promise, named in rows:
        assert promise.endswith((".", ")."))
        files = re.findall(r"`(?:tests/)?((?:faults/)?test_\w+\.py)`", named)
        assert files, promise
        assert {Path(file).name for file in files} <= tests, named


def test_the_prose_keeps_to_100_columns() -> None:
    prose = [re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL) for page in PAGES]
    long = [line for text in prose for line in text.splitlines() if len(line) > 100 and line[0] != "|"]
    assert not long


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("vendor.github-workflows", "workflows/*.yml"),
        ("custom.github-workflows-require-timeout", "workflows/*.yml"),
        ("vendor.github-issue-forms", "ISSUE_TEMPLATE/*.yml"),
    ],
)
def test_what_github_reads_follows_its_schema(schema: str, pattern: str) -> None:
    files = [str(path) for path in (ROOT / ".github").glob(pattern)]
    assert files
    command = [str(ROOT / ".venv/bin/check-jsonschema"), "--builtin-schema", schema, *files]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_a_workflow_may_only_read() -> None:
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            assert "permissions" not in job
            used = [step["uses"] for step in job["steps"] if "uses" in step]
            assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used)
