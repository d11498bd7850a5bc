"""The pages are complete and short, their commands are correct, and they can be followed."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path

import pytest
import yaml
from follow_page import FENCE, follow
from follow_page import commands as shell_commands
from harness import ROOT

from pipeline.cli.main import parse
from pipeline.config.load import load

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each `pipeline` command in the code blocks of a page."""
    for language, block in FENCE.findall(page.read_text()):
        text = block.replace("\\\n", " ").replace("sha256:…", f"sha256:{64 * '0'}").replace("…", "x")
        parts = re.split(r"&&|;|\||\n", text.replace("'", "’")) if language in ("sh", "text", "") else ()
        for words in (shlex.split(part, comments=True) for part in parts):
            found = [*dropwhile(lambda word: word not in ("pipeline", ".venv/bin/pipeline"), words)][1:]
            if found and re.fullmatch(r"[a-z0-9]+", found[0]):
                yield found


def test_waiting_for_a_job_on_a_cluster_also_ends_when_it_fails(tmp_path: Path) -> None:
    text = (DOCS / "kubernetes.md").read_text()
    assert not re.search(r"kubectl wait.* job/", text), "it knows one end only"
    end, loops = "FailureTarget Failed", re.findall(r"^until kubectl get job .*$", text, re.MULTILINE)
    assert len(loops) == 2
    for loop in loops:
        (tmp_path / "answers").write_text(f"\n \n0 Suspended\n{end} \nnot asked\n")
        program = "kubectl() { sed -n 1p answers; sed -i 1d answers; }; sleep() { :; }; "
        command = ["bash", "-c", program + loop]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=20, check=False)
        assert (done.returncode, done.stdout.strip()) == (0, end), loop


def test_commands_parse() -> None:
    for page in PAGES:
        for words in (words for words in commands(page) if "--help" not in words):
            options = parse(words)  # RequestError if there is no such command or option
            if words[0] in ("train", "plan", "doctor") and not options.recipe.endswith(".yaml"):
                load(options.recipe, options.overrides)


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


def test_the_table_of_commands_is_complete_and_its_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    def help_of(*words: str) -> str:
        with pytest.raises(SystemExit):
            parse([*words, "--help"])
        return capsys.readouterr().out

    table = (DOCS / "commands.md").read_text()
    rows = re.findall(r"^\| `pipeline ([a-z0-9 ]+)(.*?)` \| ", table, re.MULTILINE)
    commands = {row.split()[0] for row, _ in rows}
    assert commands == set(re.findall(r"^ {4}([a-z0-9]+)\b", help_of(), re.MULTILINE))
    for row, arguments in rows:
        words = [word for word in row.split() if word not in ("digits", "imagenette", "imagenet", "bash")]
        assert set(re.findall(r"--[a-z-]+", arguments)) <= set(re.findall(r"--[a-z-]+", help_of(*words))), row


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
    prose = [FENCE.sub("", page.read_text()) for page in PAGES]
    long = [line for text in prose for line in text.splitlines() if len(line) > 100 and line[0] != "|"]
    assert not long


def test_what_github_reads_follows_its_schema_and_may_only_read() -> None:
    check = [str(ROOT / ".venv/bin/check-jsonschema"), "--builtin-schema"]
    for schema, pattern in (
        ("vendor.github-workflows", "workflows/*.yml"),
        ("custom.github-workflows-require-timeout", "workflows/*.yml"),
        ("vendor.github-issue-forms", "ISSUE_TEMPLATE/*.yml"),
    ):
        files = [str(path) for path in (ROOT / ".github").glob(pattern)]
        checked = subprocess.run([*check, schema, *files], capture_output=True, text=True, check=False)
        assert (checked.returncode, bool(files)) == (0, True), checked.stdout
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            assert "permissions" not in job
            used = [step["uses"] for step in job["steps"] if "uses" in step]
            assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used)
