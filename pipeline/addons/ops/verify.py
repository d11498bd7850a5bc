"""`pipeline verify`: repeat a run from its receipt and compare the results bit by bit.

Promise: "identical" means that the repetition had the same weights at every step for which both
runs have a digest or a checkpoint, and that no field of the receipt from which they follow, or that
follows from them, was changed (`compare` says which these are). The repetition is an ordinary
`pipeline train` in a temporary folder; nothing is written to RUN_DIR.

With --steps A-B it starts from RUN_DIR's checkpoint of step A, so a run of a month can be verified
in parts, by several people. The steps up to A are then trusted, and the result says so.
A run that certainly cannot repeat is refused (exit 2). Different bits are exit 1, as with `cmp`. A
repetition that fails ends with its own exit code, or with 75.
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from pipeline import errors, machine
from pipeline.addons.datasets import sources
from pipeline.addons.models.trust import check_is_trusted, check_place_is_trusted
from pipeline.addons.ops.compare import compare
from pipeline.addons.ops.run import Run
from pipeline.config.schema import Config
from pipeline.errors import RequestError, TemporaryError, from_exit_code, one_line, printable_line
from pipeline.supervision import die_with_parent


def verify(run_dir: Path, steps: int | None, start: int = 0) -> int:
    """Run `pipeline verify`; print "identical: …" and return 0, or "differs: …" and 1.

    start: the step of the checkpoint to repeat from; 0 repeats from the initial weights.
    """
    run = Run.read(run_dir)
    if run.folder.lock.is_held():
        raise TemporaryError(f"the run in {run_dir} is still training: wait for its end, or stop it")
    with tempfile.TemporaryDirectory(prefix="pipeline-verify-", ignore_cleanup_errors=True) as scratch:
        repeated = Path(scratch) / "run"
        config = _repetition_config(run, repeated)
        _refuse_what_cannot_repeat(run, config, start)
        last = _last_comparable_step(run, start, steps)
        config = config.replacing("train", max_steps=last)
        if start:
            config = config.replacing("run", resume=str(_checkpoint_of(run, start).absolute()))
        print(f"repeating {run_dir}, step {start:,} to {last:,} in {repeated}", file=sys.stderr, flush=True)
        _repeat(config, run.receipt["starts"][-1], Path(scratch) / "recipe.yaml")
        new = Run.read(repeated)
        started = new.receipt["starts"][0]["step"]
        if started != start:
            raise RequestError(f"the repetition started at step {started} and not at step {start}")
        result = printable_line(compare(run, new, start, last))
    print(result, flush=True)
    if run.folder.delivered.exists():
        from pipeline.addons.mlflow.parts import note_verification

        print(note_verification(run.folder, result), file=sys.stderr, flush=True)
    return errors.OK if result.startswith("identical") else errors.CRASH


def _repetition_config(run: Run, repeated: Path) -> Config:
    """Return the run's configuration, in the folder of the repetition and without a tracker.

    It has no mirror either: from there the repetition would restore the finished run. Digits that
    are not there are made in their default place, never in a folder that only the receipt names.
    """
    words = "run.resume=auto run.trace=false track.uri=none track.report=false track.required=false"
    places = [f"run.dir={repeated}", "checkpoint.mirror=none", "data.cache=none"]
    config = run.config([*words.split(), *places])
    check_place_is_trusted("data.root", config.data.root)
    check_place_is_trusted("model.init", config.model.init)
    check_place_is_trusted("model.teacher", config.model.teacher)
    check_is_trusted(config.model.arch)  # `pipeline train` trusts what is in its recipe
    if config.data.source == "digits" and not os.path.exists(sources.data_root(config)):
        config = config.replacing("data", root=None)
    return config


def _refuse_what_cannot_repeat(run: Run, config: Config, start: int) -> None:
    refused = f"the run in {run.folder.path} cannot be repeated"
    if not config.is_deterministic:
        raise RequestError(f"{refused}: it is not deterministic", "train with run.deterministic=true")
    starts = run.starts_after(start)
    if not starts:
        raise RequestError(f"{refused}: it started from another run's checkpoint", "verify that run")
    for name in ("epochs",) if config.run.exact else ("world", "epochs"):
        for part in starts[1:]:
            if part.get(name) != starts[0].get(name):
                values = f"from {one_line(starts[0].get(name))} to {one_line(part.get(name))}"
                raise RequestError(f"{refused} in one piece: {name} changed {values} at step {part['step']}")
    if run.receipt["starts"][-1].get("device_type") == "cuda" and not machine.has_gpu():
        raise machine.no_gpu_error()
    source = sources.open_source(config)
    if source.digest != run.receipt["data"]:
        from pipeline.addons.ops.changes import describe_data_change

        changed = describe_data_change(config, source, str(run.receipt["data"]), run.folder.path / "index")
        raise RequestError(f"{refused}: the data is another: {changed}", "restore it")


def _last_comparable_step(run: Run, start: int, steps: int | None) -> int:
    """Return the last step after `start`, up to `steps`, that has an evaluation or a checkpoint."""
    later = [step for step in run.rows.keys() | run.checkpoints().keys() if step > start]
    comparable = [step for step in later if steps is None or step <= steps]
    if not comparable:
        where = f"after step {start}" + (f" up to step {steps}" if steps else "")
        problem = f"the run in {run.folder.path} has no evaluation or checkpoint {where}"
        remedy = f"the next one is of step {min(later)}" if later else ""
        raise RequestError(f"{problem}: nothing can be compared", remedy)
    return max(comparable)


def _checkpoint_of(run: Run, step: int) -> Path:
    """Return the run's checkpoint of that step, whose weights are those of the receipt.

    Raises RequestError if there is none, or if its weights are others; StorageError if the file is
    damaged.
    """
    found = run.checkpoints()
    if step not in found:
        steps = ", ".join(map(str, sorted(found))) or "none"
        remedy = "docs/reproducibility.md, 'Publish a receipt', says where to get one"
        raise RequestError(f"{run.folder.checkpoints} has no checkpoint of step {step}, only {steps}", remedy)

    from pipeline.addons.models.trained import eval_weights, weights_digest
    from pipeline.record.checkpoint_contents import read_model

    digest = f"sha256:{weights_digest(eval_weights(read_model(found[step])))}"
    stated = run.rows.get(step, {"weights": digest})["weights"]
    if stated != digest:
        problem = f"{found[step]} does not belong to the receipt"
        raise RequestError(f"{problem}: its weights are {digest}, not {stated}")
    return found[step]


def _repeat(config: Config, start: dict[str, Any], recipe: Path) -> None:
    """Train the repetition. start: the last start of the run. Raises RunError if it fails."""
    recipe.write_text(config.to_yaml(), encoding="utf-8")
    processes = ["--nproc", str(start["world"])] if start["world"] > 1 else []
    # not by run.device, which must be that of the checkpoint
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if start.get("device_type") == "cpu" else {}
    code = subprocess.run(
        [sys.executable, "-m", "pipeline", "train", str(recipe), *processes],
        stdout=subprocess.DEVNULL,  # standard output of verify is its own result line only
        env=os.environ | hidden,
        # safe: the only other threads are those of numpy, which are idle and hold no lock
        preexec_fn=partial(die_with_parent, os.getpid()),
        check=False,
    ).returncode
    if code:
        kind = from_exit_code(code) if code in errors.PERMANENT else TemporaryError
        raise kind(f"the repetition failed (exit {code}), and its own error is printed above")
