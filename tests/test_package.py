"""`pip install .` gives the `pipeline` command, which works without the repository."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from harness import ROOT, environment


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words, "--quiet", "--no-deps", "--no-index"], check=True)


def test_the_wheel_holds_every_file_and_its_command_works_without_the_repository(tmp_path: Path) -> None:
    # built from a copy, because setuptools also writes beside the source
    source, installed = tmp_path / "source", tmp_path / "installed"
    for folder in ("pipeline", "tests"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip("wheel", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = {
        path for path in (ROOT / "pipeline").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == {str(path.relative_to(ROOT)) for path in files}

    pip("install", "--target", str(installed), str(wheel))
    env = environment(PYTHONPATH=str(installed))
    for words, expected in (
        ("--help", "exit codes:"), ("plan digits --world 2", "2 processes"), ("k8s render", "kind: Job"),
    ):  # fmt: skip
        command = [str(installed / "bin/pipeline"), *words.split()]
        result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert expected in result.stdout
