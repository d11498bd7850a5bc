"""The first pass of a compiled model. A failure says if the model or the machine is at fault."""

import re
from collections.abc import Callable
from concurrent.futures import BrokenExecutor

from torch._dynamo.exc import TorchDynamoException

from pipeline.errors import RequestError, one_line
from pipeline.guards.signals import StopRequest

_FAULTS = (OSError, MemoryError, BrokenExecutor)
# a compiler's worker process reports its errors as text
_FAULTS_IN_TEXT = re.compile(
    r"\[Errno|No space left|Killed|SIGKILL|out of memory|MemoryError|CUDA error|\[CUDA\]"
    r"|BrokenProcessPool|exited unexpectedly"
)


def compile_model(arch: str, run_pass: Callable[[], None], stop: StopRequest) -> RequestError | None:
    """Run the first pass. Return an error if the model cannot be compiled; raise any other."""
    try:
        run_pass()
    except TorchDynamoException as error:
        if is_fault_of_machine(error):
            raise
        stop.check()  # a signal may have ended the compiler
        return RequestError(f"{arch} cannot be compiled", f"train with train.compile=off ({one_line(error)})")
    return None


def is_fault_of_machine(error: BaseException | None) -> bool:
    """Return True if a compilation failed for a reason that another start may not meet."""
    while error is not None:
        if isinstance(error, _FAULTS) or _FAULTS_IN_TEXT.search(str(error)):
            return True
        # torch raises its own errors `from None`: the cause is a field, or only the context
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return False
