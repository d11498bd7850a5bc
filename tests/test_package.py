"""`pip install .` gives the `pipeline` command, which works without the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pipeline"


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words, "--quiet", "--no-deps", "--no-index"], check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, because setuptools also writes beside the source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(PACKAGE, source / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", source / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    target = wheel.parent / "installed"
    pip("install", "--target", str(target), str(wheel))
    return target


def test_the_wheel_holds_every_file_of_the_package_and_no_test(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {str(path.relative_to(ROOT)) for path in files}


def test_the_installed_command_works_without_the_repository(installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    run = partial(subprocess.run, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    where = run([sys.executable, "-c", "import pipeline; print(pipeline.__file__)"])
    assert where.stdout == f"{installed}/pipeline/__init__.py\n"
    for words, expected in (
        ("--help", "exit codes:"), ("plan digits --world 2", "2 processes on 1 node"), ("k8s render", "kind: Job"),
    ):  # fmt: skip
        result = run([str(installed / "bin/pipeline"), *words.split()])
        assert result.returncode == 0, result.stderr
        assert expected in result.stdout
