"""The model in a checkpoint, for evaluation and prediction."""

from typing import Any

from torch import Tensor, nn

from pipeline.config.sections import Model
from pipeline.errors import StorageError, one_line
from pipeline.model.architectures import build
from pipeline.model.weights import load_weights


def eval_weights(contents: dict[str, Any]) -> dict[str, Tensor]:
    """Return the state dict that was evaluated: that of the EMA if there is one."""
    weights: dict[str, Tensor] = contents["average"] or contents["model"]
    return weights


def eval_model(contents: dict[str, Any], options: Model) -> nn.Module:
    """Return the model that was evaluated, in eval mode.

    Raises RequestError if its architecture is unknown, StorageError if the weights do not fit it.
    """
    model = build(options, len(contents["classes"])).eval()
    try:
        load_weights(model, eval_weights(contents))
    except (RuntimeError, ValueError) as error:
        expected = f"a {options.arch} with {len(contents['classes'])} classes ({one_line(error, 120)} …)"
        problem = f"the weights of the checkpoint are not those of {expected}"
        raise StorageError(problem, "use another checkpoint") from None
    return model
