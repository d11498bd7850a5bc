"""The validation of a checkpoint, by one or more processes."""

from typing import Any

from pipeline.config.schema import Config
from pipeline.data.sources import Source
from pipeline.lazy import part
from pipeline.model.trained import eval_model, eval_weights
from pipeline.model.weights import weights_digest
from pipeline.planning import divide_resources
from pipeline.record.terminal import make_terminal
from pipeline.train.setup import broadcast_source, join
from pipeline.world import World


def run_evaluation(config: Config, world: World, contents: dict[str, Any], source: Source | None) -> str:
    """Validate a checkpoint's contents as one process of `world`, and return the result line."""
    terminal = make_terminal(is_main=world.is_main)
    group = join(config, world)
    source = broadcast_source(config, group, source)
    model = eval_model(contents, config.model).to(group.device)
    evaluator = part("evaluator")(model, source.val, config, divide_resources(config, world), group)
    result = evaluator.evaluate(contents["step"], terminal, lambda: False)
    assert result is not None
    balanced = f"balanced accuracy {result.evaluation.balanced_accuracy or 0:.4f}"
    classes = f"{result.evaluation.classes} of {len(source.classes)} classes"
    part("log evaluation")("validation", result, terminal, f", {balanced} over {classes}")
    group.shutdown()
    weights = f"sha256:{weights_digest(eval_weights(contents))}"
    line: str = result.evaluation.done_line(contents["epoch"], weights)
    return line
