"""Without a guard, or with a fault in the core, a test fails.

A guard is a line of code that a run needs only when something goes wrong. `make guards` removes
each of guards.yaml from a copy of this tree. `make mutations` puts in each fault of mutations.yaml.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
Fault = dict[str, str]


def each(table: str) -> list[object]:
    """Return the faults of a table in this folder, with their files."""
    files = yaml.safe_load(Path(__file__).with_name(f"{table}.yaml").read_text())
    return [
        pytest.param(row | {"file": file}, id=row["fault"]) for file, rows in files.items() for row in rows
    ]


@pytest.mark.parametrize("fault", [*each("guards"), *each("mutations")])
def test_a_guard_is_one_place_in_its_file(fault: Fault) -> None:
    assert (ROOT / "pipeline" / fault["file"]).read_text().count(fault["old"]) == 1
    file, _, name = fault["test"].partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text()


@pytest.mark.long
@pytest.mark.parametrize("fault", each("guards"))
def test_without_a_guard_its_test_fails(fault: Fault, tmp_path: Path) -> None:
    assert_noticed(fault, tmp_path / "tree")


@pytest.mark.long
@pytest.mark.parametrize("fault", each("mutations"))
def test_with_a_mutation_its_test_fails(fault: Fault, tmp_path: Path) -> None:
    assert_noticed(fault, tmp_path / "tree")


def assert_noticed(fault: Fault, tree: Path) -> None:
    """Assert that the test fails in a copy of this tree, with the other text."""
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "build", "*.pyc"))
    source = tree / "pipeline" / fault["file"]
    source.write_text(source.read_text().replace(fault["old"], fault["new"]))
    command = [sys.executable, "-m", "pytest", "-x", "--tb=line", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"tests/{fault['test']}"],
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "\nFAILED " in done.stdout, done.stdout[-2000:]
