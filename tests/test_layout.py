"""The house: imports run one way, torch comes late, and what must never be in the source is not."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pipeline

HOUSE = Path(pipeline.__file__).parent
FILES = {
    ".".join(["pipeline", *path.relative_to(HOUSE).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in sorted(HOUSE.rglob("*.py"))
}
ROOMS = re.sub(r"\s+", " ", re.search(r"__main__,[\w\s,]+files", pipeline.__doc__ or "")[0]).split(", ")  # type: ignore[index]


def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


def imported(module: str) -> Iterator[str]:
    """Modules that `module` imports: at its top, in functions and for type checking."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import in line {node.lineno}"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in FILES else str(node.module)


def inside(module: str) -> set[str]:
    return {name for name in imported(module) if name.startswith("pipeline.")}


def room(module: str) -> str:
    return module.split(".")[1]


def importers(library: str) -> set[str]:
    return {module for module in FILES if any(name.split(".")[0] == library for name in imported(module))}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_docstring_of_the_package_names_every_room() -> None:
    assert sorted(ROOMS) == sorted({room(module) for module in FILES if module != "pipeline"})


@pytest.mark.parametrize("module", [module for module in FILES if module != "pipeline"])
def test_imports_run_one_way(module: str) -> None:
    at_or_below = ROOMS[ROOMS.index(room(module)) :]
    above = {name for name in inside(module) if room(name) not in at_or_below}
    assert not above, f"{module} imports from above: {above}"


def test_no_modules_import_each_other() -> None:
    TopologicalSorter({module: inside(module) - {module} for module in FILES}).prepare()  # CycleError names the circle


def test_the_path_from_the_data_to_the_weights_can_be_followed() -> None:
    """docs/design.md names at most 12 stops; each exists, and an earlier one names it."""
    design = (HOUSE.parent / "docs/design.md").read_text()
    stops = re.findall(r"^\d+\. `(pipeline/[\w/]+\.py)` `([\w.]+)`", design, flags=re.MULTILINE)
    assert 8 < len(stops) <= 12
    bodies = []
    for file, name in stops:
        node: ast.AST = ast.parse((HOUSE.parent / file).read_text())
        for part in name.split("."):
            node = next(inner for inner in ast.walk(node) if getattr(inner, "name", None) == part)
        bodies.append(ast.unparse(node))
    for number, (_, name) in enumerate(stops[1:], 1):
        last = name.rpartition(".")[2]
        assert any(last in body for body in bodies[:number]), f"nothing before it calls {name}"


def test_mlflow_and_docker_stay_in_their_modules() -> None:
    assert importers("mlflow") <= {module for module in FILES if module.startswith("pipeline.record.mlflow")}
    assert importers("docker") <= {"pipeline.deploy.rehearse"}


def test_nothing_is_unpickled() -> None:
    for module, path in FILES.items():
        assert not re.search(r"weights_only\s*=\s*False", path.read_text()), module
        assert not re.search(r"mlflow\.\w+\.load_model|pyfunc", path.read_text()), "it unpickles and imports"
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert given.get("weights_only") == "True", f"{module} line {node.lineno}"
    for library in ("pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"):
        assert not importers(library)


def test_what_checks_a_request_needs_no_torch() -> None:
    modules = (
        "config.load", "plan", "world", "supervision", "machine", "errors", "files", "randomness", "data.manifest",
        "data.sources", "record.folder", "record.figures", "record.description", "preflight.request", "operate.report",
        "operate.launch", "__main__",
    )  # fmt: skip
    names = [f"pipeline.{module}" for module in modules]
    code = f"import importlib, sys\nfor name in {names}: importlib.import_module(name); print(name, 'torch' in sys.modules)"
    assert run(code).splitlines() == [f"{name} False" for name in names]


def test_a_training_process_needs_neither_mlflow_nor_docker_nor_matplotlib() -> None:
    names = "('torch', 'mlflow', 'docker', 'matplotlib')"
    code = f"import sys, pipeline.train.session; print([name in sys.modules for name in {names}])"
    assert run(code) == "[True, False, False, False]\n"
