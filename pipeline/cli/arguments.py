"""The parser class, the argument types and the arguments that several commands share."""

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from pipeline.errors import RequestError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises a RequestError of one line instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message} (see '{self.prog} --help')")


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
Handler: TypeAlias = Callable[[argparse.Namespace], str | int]
"""Runs a command; returns its result, or its exit code if it has printed the result itself."""


def add_command(
    commands: Commands, name: str, run: Handler, help: str, description: str = "", **options: Any
) -> Parser:
    """Add a command that `run` handles. Without a description, its help line takes that place."""
    description = description or f"{help[0].upper()}{help[1:]}."
    parser = commands.add_parser(name, help=help, description=description, **options)
    parser.set_defaults(run=run, parser=parser)
    return parser


_KEYS_HELP = "'pipeline train --help' lists the keys"


def add_recipe(parser: Parser, help: str = "name or path of a recipe", keys: str = _KEYS_HELP, **settings: Any) -> None:
    parser.add_argument("recipe", type=path_or_uri, metavar="RECIPE", help=help, **settings)
    add_overrides(parser, keys)


def add_overrides(parser: Parser, keys: str = _KEYS_HELP) -> None:
    help = f"set a key of the recipe, for example train.epochs=10; {keys}"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help)


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


def share(text: str) -> float:
    """Return a share between 0 and 1, both excluded."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 1, such as 0.1")
    return number


def matching(pattern: str, expected: str) -> Callable[[str], str]:
    """Return the type of an argument that matches a pattern; errors call it `expected`."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
        return text

    return check
