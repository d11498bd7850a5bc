"""From the words of a command to its exit code.

A command's result goes to standard output; what it logs, and the one line of an error, to standard error.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pipeline import errors, supervision, world
from pipeline.cli import bench, data, machine, run
from pipeline.cli.arguments import Parser
from pipeline.errors import RequestError, RunError, StorageError

_DESCRIPTION = """\
Train image classifiers with PyTorch DDP: kill it anywhere, restart it, resize it; the same samples, the same bits, one
run in MLflow.

  pipeline train digits                      the embedded example, in a minute
  pipeline train digits --nproc 2            two processes on this machine
  torchrun --nproc-per-node 8 -m pipeline train my.yaml data.root=/data batch.global=1024
"""

_EPILOG = """\
exit codes: 0 done · 2 the request is wrong, do not retry · 3 the loss is not finite · 4 data or storage ·
75 temporary (interrupted, folder held by another, a peer not there yet): retry · anything else a crash
"""


def command() -> NoReturn:
    """`main`, as a process.

    One of several leaves without the interpreter's farewell: gloo's threads outlive `destroy_process_group`, and one that
    lets go of a tensor in its midst ends in SIGABRT, a run that is done too (pytorch/pytorch#179291).
    """
    code = main()
    if "RANK" in os.environ:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    is_main = os.environ.get("RANK", "0") == "0"  # of several processes one speaks
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        options = _parse(arguments)
        answer = options.run(options)
        if isinstance(answer, int):
            return answer
        if is_main:
            print(answer, flush=True)
        return errors.OK
    except RunError as ending:
        # what is found before torch is imported, every process of a machine finds; later it may be one process's own
        is_own = not ending.is_collective and (is_first_here or "torch" in sys.modules)
        if is_main or (ending.code == RequestError.code and is_own):
            print(f"pipeline: {ending}", file=sys.stderr, flush=True)
        if ending.code in errors.PERMANENT:
            supervision.stop_restarts()
        return ending.code
    except KeyboardInterrupt:
        return errors.TemporaryError.code
    except BrokenPipeError:  # whoever read our answer has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.OK
    except OSError as error:
        if error.filename is None or world.is_launched():  # a rank's is a crash, which its launcher may start anew
            raise
        print(f"pipeline: {StorageError(f'{error.filename}: {error.strerror}')}", file=sys.stderr, flush=True)
        return StorageError.code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of a command; key=value words may stand before and after its flags, which argparse alone cannot."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and hasattr(options, "overrides") and not any(word.startswith("-") for word in rest):
        options.overrides = options.overrides + rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="pipeline", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (run, data, machine, bench):
        module.add_commands(commands)
    return parser
