"""Argument types and the parser class that every command shares."""

import argparse
import os
import re
from pathlib import Path

from pipeline.errors import RequestError

OVERRIDES_HELP = "key=value changes the recipe; the keys are listed by 'pipeline train --help'"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and RequestErrors."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise RequestError(f"{message} (see '{self.prog} --help')")


def path_or_uri(text: str) -> str:
    """A path, or the address of a model: no shell expands `~` in `--out=~/x`, in quotes or in a manifest."""
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
        raise argparse.ArgumentTypeError(f"{text!r} is not a name: letters, digits and . / : @ - _")
    return text


def memory_quantity(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[MGT]i", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory: 512Mi or 64Gi for example")
    return text


def variable(text: str) -> str:
    if not text.partition("=")[0] or "=" not in text:
        raise argparse.ArgumentTypeError(f"{text.partition('=')[0]!r} is not NAME=VALUE")
    return text
