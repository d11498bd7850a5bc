"""Without a guard, or with a fault in the core, a test fails.

A guard is a line of code that a run needs only when something goes wrong. `make guards` removes
each of guards.yaml from a copy of this tree. `make mutations` puts in each fault of mutations.yaml.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from harness import ROOT, environment

Fault = dict[str, str]
TABLES = {kind: yaml.safe_load(Path(__file__).with_name(f"{kind}s.yaml").read_text())
          for kind in ("guard", "mutation")}  # fmt: skip
FAULTS = [
    pytest.param(row | {"file": file}, id=f"{kind}: {row['fault']}")
    for kind, files in TABLES.items() for file, rows in files.items() for row in rows
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_guard_is_one_place_in_its_file(fault: Fault) -> None:
    assert (ROOT / "pipeline" / fault["file"]).read_text().count(fault["old"]) == 1
    file, _, name = fault["test"].partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text()


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_its_test_fails_with_the_fault(fault: Fault, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "build", "*.pyc"))
    source = tree / "pipeline" / fault["file"]
    source.write_text(source.read_text().replace(fault["old"], fault["new"]))
    command = [sys.executable, "-m", "pytest", "-x", "--tb=line", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"tests/{fault['test']}"],
        cwd=tree, env=environment(PYTHONPATH=str(tree)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "\nFAILED " in done.stdout, done.stdout[-2000:]
