"""The command line by itself: help, recipes, completion, plan --json and --best; `make ui`."""

import argparse
import json
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

from harness import ROOT, MakeJob, environment, quick
from ui import address

from pipeline.addons.ops.keys import all_keys
from pipeline.addons.run.receipt import best_checkpoint, rank
from pipeline.cli.arguments import Parser
from pipeline.cli.main import make_parser
from pipeline.config.load import recipe_names


def names(parser: Parser, name: str = "") -> list[str]:
    """Return the names of a parser's commands, and its own."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    inner = [names(found, f"{name} {word}") for group in groups for word, found in group.choices.items()]
    return [name.strip(), *chain.from_iterable(inner)]


COMMANDS = names(make_parser())


def test_every_command_has_its_help_and_a_group_lists_its_commands() -> None:
    for name in COMMANDS:
        inner = [command for command in COMMANDS if command and command.rpartition(" ")[0] == name]
        help_ = [] if inner else ["--help"]  # of a group without a command, the help is printed
        text = quick(*name.split(), *help_, code=0).out
        assert text.startswith(f"usage: pipeline {name}".rstrip())
        for command in inner:
            assert re.search(rf"^ +{command.split()[-1]}\b", text, re.MULTILINE)


def test_the_help_of_train_has_every_key_below_its_section() -> None:
    blocks = quick("train", "--help").out.partition("by section:\n\n")[2].split("\n\n")
    keys = {block.partition(":")[0]: re.findall(r"^  ([\w.]+)=", block, re.MULTILINE) for block in blocks}
    assert keys.pop("top level") == ["parallel"]
    assert {key for inner in keys.values() for key in inner} == all_keys().keys() - {"recipe", "parallel"}
    assert all(key.startswith(f"{section}.") for section, inner in keys.items() for key in inner)


def test_the_recipes_are_listed_with_their_comments() -> None:
    blocks = [block.splitlines() for block in quick("recipes").out.split("\n\n")]
    assert [block[0] for block in blocks] == recipe_names()
    for block in blocks:
        names = re.findall(r"^  ([A-Z][\w ]+): ", "\n".join(block), re.MULTILINE)
        assert names == ["What", "Target", "Expected time", "Processes", "Data", "Source"]
        if command := re.search(r"Data: .*pipeline (data [^'.;]*)", " ".join(block)):
            make_parser().parse_args(command[1].partition(" Source")[0].split())


def test_a_plan_in_json_is_that_of_the_run(digits: Path) -> None:
    plan = json.loads(quick("plan", "digits", f"data.root={digits}", "--world", "2", "--json").out)
    assert (plan["world"], plan["process_batch"], plan["total_steps"]) == (2, 48, 168)
    assert plan["parameters"] == 11_181_642
    assert "128.0 MiB a process" in plan["memory"]


def test_commands_flags_and_files_are_completed_without_a_slow_import(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").touch()
    for module in ("torch", "pydantic"):
        (tmp_path / f"{module}.py").write_text("import os\nos._exit(99)\n")
    shell = ["sh", "-c", '"$0" -m pipeline 8>&1 >/dev/null', sys.executable]  # as argcomplete's script does

    def complete(line: str) -> list[str]:
        words = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
        env = environment(PYTHONPATH=f"{tmp_path}:{ROOT}", _ARGCOMPLETE_IFS=" ", **words)
        done = subprocess.run(shell, capture_output=True, text=True, env=env, cwd=tmp_path, check=True)
        return done.stdout.split()

    assert set(complete("pipeline ")) == {name for name in COMMANDS if name and " " not in name}
    assert complete("pipeline train digits --") == ["--help", "--nproc", "--quiet"]
    assert complete("pipeline plan my") == ["my.yaml"]


def test_best_takes_the_best_checkpoint(job: MakeJob, image: Path) -> None:
    words = ("data.workers=0", "evaluate.every=4 steps", "checkpoint.keep=1", "train.max_steps=12")
    # the learning rate is too high: the best checkpoint is not the last
    run = job(*words, "optimizer.lr=2").finished()
    folder = str(run.folder)
    row = max(json.loads((run.folder / "receipt.json").read_text())["evaluations"], key=rank)
    assert row["step"] < 12, "the test needs a best checkpoint that is not the last"
    assert f"use it   pipeline predict {folder} --best IMAGE" in run.log()

    best, _ = run.checkpoints()
    assert best_checkpoint(folder) == best
    targets = ((folder, "--best"), (str(best),), (folder,))
    found, same, last = (quick("predict", *target, str(image), "--json").out for target in targets)
    assert found == same != last
    assert f"weights={row['weights']}" in quick("evaluate", folder, "--best").out
    exported = quick("export", folder, "--best", "--to", "safetensors")
    assert f"the model of step {row['step']};" in exported.out


def test_the_address_is_that_of_the_newest_run_in_the_database(tmp_path: Path) -> None:
    assert address(tmp_path, "5001") == "http://127.0.0.1:5001/#/experiments?workflowType=machine_learning"
    own, other = f"sqlite:///{tmp_path}/mlflow.db", "https://mlflow.example.org"
    for age, (name, server) in enumerate((("elsewhere", other), ("new", own), ("old", own))):
        (tmp_path / name).mkdir()
        sent = tmp_path / name / "mlflow.json"
        sent.write_text(json.dumps({server: {"run_id": f"{name}-id", "experiment_id": "1", "offset": 9}}))
        os.utime(sent, (1000 - age, 1000 - age))
    page = "experiments/1/runs/new-id?workflowType=machine_learning"
    assert address(tmp_path, "5000") == f"http://127.0.0.1:5000/#/{page}"
