"""`pipeline evaluate`: the validation of a checkpoint, by one or more processes.

torch is imported in functions, once the request is checked.
"""

import sys
from contextlib import suppress
from pathlib import Path

from pipeline import machine
from pipeline.addons.deploy.processes import start_processes
from pipeline.addons.models.inputs import check_target, for_evaluation
from pipeline.addons.models.validation import as_trained, open_validation
from pipeline.addons.run import portable
from pipeline.config.load import MAX_YAML_BYTES, from_yaml, read_limited
from pipeline.errors import RequestError
from pipeline.guards.signals import StopRequest
from pipeline.launcher import this_world
from pipeline.lazy import addon, freeze_imports
from pipeline.planning import divide_resources
from pipeline.record.folder import RunFolder
from pipeline.record.terminal import make_terminal


def evaluate(target: str, overrides: list[str], nproc: int | None) -> str | int:
    """Run `pipeline evaluate`; return the done line, or the exit code of the processes started."""
    here = this_world(nproc)
    check_target(target)
    if nproc and nproc > 1:
        stop = StopRequest()
        stop.listen()
        return start_processes(nproc, ["evaluate", target, *overrides], stop)
    # torch reads the variables of a portable run when it is imported, before it reads a checkpoint
    folder = RunFolder(Path(target) if Path(target).is_dir() else Path(target).parent.parent)
    with suppress(OSError, ValueError, RequestError):
        text = read_limited(folder.config, MAX_YAML_BYTES).decode()
        portable.prepare(from_yaml(text, str(folder.config), overrides), here)

    with freeze_imports():
        from pipeline.addons.models.evaluator import Evaluator
        from pipeline.addons.models.trained import eval_model, eval_weights, weights_digest
        from pipeline.addons.run.progress import log_evaluation
        from pipeline.operate.start import broadcast_source, join
        from pipeline.record import checkpoint_contents, checkpoint_files

        addon("datasets.images")  # before loader workers are forked

    path = checkpoint_files.find(Path(target))
    contents = checkpoint_contents.read_model(path)
    trained, config = for_evaluation(contents["config"], str(path), overrides)
    source = None
    if here.is_main:
        if config.run.device == "cuda" and not machine.has_gpu():
            raise machine.no_gpu_error()
        source, description = open_validation(config, contents, trained, overrides)
        print(f"evaluating {path} on {description}", file=sys.stderr, flush=True)
    terminal = make_terminal(is_main=here.is_main)
    group = join(config, here)
    source = as_trained(broadcast_source(config, group, source), contents)
    model = eval_model(contents, config.model).to(group.device)
    evaluator = Evaluator(model, source, config, divide_resources(config, here), group)
    result = evaluator.evaluate(contents["step"], terminal, lambda: False)
    assert result is not None
    classes = f", {result.evaluation.classes} of {len(source.classes)} classes"
    if not source.label_sets:
        classes = f", balanced accuracy {result.evaluation.balanced_accuracy or 0:.4f} over {classes[2:]}"
    log_evaluation("validation", result, terminal, classes)
    group.shutdown()
    weights = f"sha256:{weights_digest(eval_weights(contents))}"
    return result.evaluation.done_line(contents["epoch"], weights)
