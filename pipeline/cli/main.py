"""Entry point of the command line: parse the arguments, run the command, return its exit code.

A command's result goes to standard output, its log and the one line of an error to standard error.
"""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pipeline import __version__, errors, launcher, supervision, world
from pipeline.cli.arguments import Parser
from pipeline.errors import RequestError, RunError, StorageError, TemporaryError, storage_outage
from pipeline.lazy import addon
from pipeline.operate import early_stop

_COMMANDS = (
    "pipeline.cli.run",
    "pipeline.addons.ops.plan",
    "pipeline.addons.models.commands",
    "pipeline.addons.report.commands",
    "pipeline.addons.mlflow.commands",
    "pipeline.addons.datasets.commands",
    "pipeline.addons.ops.commands",
    "pipeline.addons.deploy.commands",
)
"""The modules that add commands, in the order of the help."""
_DESCRIPTION = """\
Train image classifiers with PyTorch DDP. Kill a run, restart it, resize it:
it resumes with the same samples and bit-identical weights, as one MLflow run.

  pipeline train digits             train the built-in example, about a minute
  pipeline train digits --nproc 2   the same with two processes on this machine
  pipeline recipes                  list the recipes
"""

_EPILOG = """\
'pipeline COMMAND --help' describes a command.
'pipeline train --help' also lists every key of a recipe.

exit codes:
  0    done
  1    'verify' found a difference
  2    the request is invalid: do not retry
  3    the loss is not finite
  4    data or storage failed
  75   temporary (interrupted, run folder in use, node not reachable yet): retry
  any other code is a crash
"""


def command() -> NoReturn:
    """Run `main` as a process and exit with its code."""
    with contextlib.suppress(FileNotFoundError):  # the current folder was deleted
        if os.getcwd() not in sys.path:
            # child processes must not add it: a data folder from elsewhere may hold a yaml.py
            os.environ["PYTHONSAFEPATH"] = "1"
    exit_with(main())


def exit_with(code: int) -> NoReturn:
    """Exit the process."""
    if "RANK" in os.environ:
        # gloo's threads outlive `destroy_process_group`, and one that frees a tensor while the
        # interpreter shuts down aborts the process, even if the run is done (pytorch#179291)
        os._exit(code)
    sys.exit(code)


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if words is None else list(words)
    if words[:1] not in (["train"], ["evaluate"]):
        launcher.forget_launcher()
    return execute(words, make_parser())


def execute(words: Sequence[str], parser: Parser) -> int:
    """Run what `parser` finds in the words; return the exit code. Only rank 0 prints the result."""
    addon("run.streams").tolerate_failures()
    is_main, is_first_here = launcher.is_first("RANK"), launcher.is_first("LOCAL_RANK")
    try:
        options = parse(words, parser)
        result = options.run(options)
        code = result if isinstance(result, int) else errors.OK
        if is_main and not isinstance(result, int):
            _erase_live_line()
            print(result, flush=True)
        if (error := addon("run.streams").output_error()) and code == errors.OK:
            raise StorageError(f"standard output cannot be written: {error.strerror}")
        return code
    except RunError as error:
        if isinstance(error, early_stop.EarlyStopError) and early_stop.LAUNCHER_REPORTS in os.environ:
            early_stop.die_of_signal()
        # Errors found before torch is imported are the same on all local ranks: print them once per
        # machine. A later error, unless it is collective, may be this rank's alone.
        is_own = not error.is_collective and (is_first_here or "torch" in sys.modules)
        if is_main or (error.code == RequestError.code and is_own):
            _print_error(addon("ops.credentials").without_password(str(error)))
        if error.code in errors.PERMANENT:
            supervision.stop_restarts()
        return error.code
    except KeyboardInterrupt:
        if is_main:
            _print_error("interrupted: give the same command again")
        return TemporaryError.code
    except OSError as error:
        if error.filename is None or world.is_launched():
            raise  # in a rank it is a crash: the launcher may restart it
        failure = storage_outage(error.filename, error) or StorageError(f"{error.filename}: {error.strerror}")
        _print_error(str(failure))
        return failure.code


def _print_error(line: str) -> None:
    _erase_live_line()
    print(f"pipeline: {line}", file=sys.stderr, flush=True)


def _erase_live_line() -> None:
    """Erase what `record.terminal` shows as progress on a terminal: that line has no end."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def make_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(prog="pipeline", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"pipeline {__version__}")
    commands = parser.add_commands("COMMAND")
    for module in _COMMANDS:
        importlib.import_module(module).add_commands(commands)
    return parser


def parse(words: Sequence[str], parser: Parser | None = None) -> argparse.Namespace:
    """Return a command's options. Raises RequestError if they are wrong.

    key=value words may come before and after the flags, which argparse alone does not allow.
    """
    parser = parser or make_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow; this ends the process
        import argcomplete

        argcomplete.autocomplete(parser, always_complete_options=False)
    if words:
        addon("ops.replaced").refuse_replaced(words[0])
    options, rest = parser.parse_known_args(words)
    if rest and hasattr(options, "overrides") and not any(word.startswith("-") for word in rest):
        options.overrides = options.overrides + rest
    elif rest:
        options.parser.refuse(rest)
    for name in getattr(options, "trust", None) or ():
        addon("models.trust").trust(name)
    return options
