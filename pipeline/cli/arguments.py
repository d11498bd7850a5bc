"""The parser class, the argument types and the arguments that several commands share."""

import argparse
import os
import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from pipeline.errors import RequestError, nearest
from pipeline.lazy import addon

_KEYS_HELP = "'pipeline train --help' lists the keys"

Handler: TypeAlias = Callable[[argparse.Namespace], str | int]
"""Runs a command; returns its result, or its exit code if it has printed the result itself."""
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""The commands of one level."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises a RequestError of one line instead of exiting."""

    def __init__(self, *, description: str, **options: Any) -> None:
        if "\n" not in description:
            description = textwrap.fill(description, help_width())
        # examples keep their lines
        super().__init__(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **options
        )

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message} (see '{self.prog} --help')")

    def add_commands(self, metavar: str) -> Commands:
        """Add the level of commands below this one, which prints its help without a command."""
        self.set_defaults(run=lambda _: self.format_help().rstrip(), parser=self)
        return self.add_subparsers(title=f"{metavar.lower()}s", metavar=metavar)

    def refuse(self, rest: list[str]) -> NoReturn:
        """Raise RequestError for what could not be parsed: its first flag, or its first word."""
        word = next((word for word in rest if word.startswith("-")), rest[0])
        name = word.partition("=")[0]
        addon("ops.replaced").refuse_replaced(name)
        flags = re.findall(r"--[\w-]+", self.format_usage())
        self.error(f"unexpected argument {name!r}{nearest(name, flags, cutoff=0.7)}")


def help_width() -> int:
    """Return the width of help texts, as argparse chooses it."""
    return shutil.get_terminal_size().columns - 2


def add_command(
    commands: Commands, name: str, run: Handler, help: str, description: str = "", *examples: str, **more: Any
) -> Parser:  # fmt: skip
    """Add a command that `run` handles. Without a description, its help line takes that place."""
    description = description or f"{help[0].upper()}{help[1:]}."
    epilog = "\n  ".join(["example:" if len(examples) == 1 else "examples:", *examples]) if examples else None
    parser = commands.add_parser(name, help=help, description=description, epilog=epilog, **more)
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_recipe(
    parser: Parser, help: str = "name or path of a recipe", keys: str = _KEYS_HELP, **settings: Any
) -> None:
    parser.add_argument("recipe", type=path_or_uri, metavar="RECIPE", help=help, **settings)
    add_overrides(parser, keys)


def add_overrides(parser: Parser, keys: str = _KEYS_HELP) -> None:
    help = f"set a key of the recipe, for example train.epochs=10; {keys}"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help)


def add_nproc(parser: Parser) -> None:
    help = "start N processes on this machine"
    parser.add_argument("--nproc", type=positive_int, metavar="N", help=help)


def add_trust(parser: Parser) -> None:
    """Add the option that allows a function named by a checkpoint, receipt or registry to run."""
    help = "run this function of your own, which the model names as its model.arch"
    parser.add_argument("--trust", action="append", metavar="package.module:function", help=help)


def path_or_uri(text: str) -> str:
    """Return a path, or the URI of a model, with a leading `~` expanded.

    No shell does that in `--out=~/x`, in quotes or in a manifest.
    """
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path")
    return os.path.expanduser(text)


def path(text: str) -> Path:
    return Path(path_or_uri(text))


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
