"""The parser class, the argument types and the arguments that several commands share."""

import argparse
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
    commands: Commands, name: str, run: Handler, help: str, description: str = "", **settings: Any
) -> Parser:
    """Add a command that `run` handles. Without a description, its help line takes that place."""
    description = description or f"{help[0].upper()}{help[1:]}."
    parser = commands.add_parser(name, help=help, description=description, **settings)
    parser.set_defaults(run=run)
    return parser


def add_recipe(parser: Parser) -> None:
    parser.add_argument("recipe", type=path_or_uri, metavar="RECIPE", help="name or path of a recipe")
    add_overrides(parser)


def add_overrides(parser: Parser) -> None:
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value",
        help="set a key of the recipe, for example train.epochs=10; 'pipeline train --help' lists the keys",
    )  # fmt: skip


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


def word(text: str) -> str:
    if not re.fullmatch(r"[\w./:@-]+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name: use letters, digits and . / : @ - _")
    return text


def memory_quantity(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[MGT]i", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory, such as 512Mi or 64Gi")
    return text


def variable(text: str) -> str:
    name, equals, _ = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{name!r} is not NAME=VALUE")  # the value may be a secret
    return text
