"""The command `completion`, and the words that it offers: commands, flags, recipes, keys, values.

argcomplete's shell function calls `pipeline` at each press of the tab key, with `_ARGCOMPLETE` in
the environment. So this must be quick: the schema of the keys is built only to complete a key.
"""

import argparse
import os
from collections.abc import Callable
from typing import NoReturn

from pipeline.cli.arguments import Commands, Parser, add_command


def add_commands(commands: Commands) -> None:
    parser = add_command(
        commands, "completion", _completion, "print a script that makes bash or zsh complete pipeline's arguments",
        "Print a script that makes the shell complete commands, flags, recipes, keys and their values. Add the line"
        " below to ~/.bashrc or, after compinit and with zsh for bash, to ~/.zshrc.",
        'eval "$(pipeline completion bash)"',
    )  # fmt: skip
    parser.add_argument("shell", choices=("bash", "zsh"), help="your shell")


def _completion(options: argparse.Namespace) -> str:
    from argcomplete.shell_integration import shellcode

    return shellcode(["pipeline"], shell=options.shell).strip()


def is_asked() -> bool:
    """Return True if the shell function of `completion` has started this process."""
    return "_ARGCOMPLETE" in os.environ


def complete(parser: Parser) -> NoReturn:
    """Write the completions of the command line in COMP_LINE for the shell, and exit."""
    from argcomplete.finders import CompletionFinder

    class Finder(CompletionFinder):
        def collect_completions(
            self, active_parsers: list[argparse.ArgumentParser], parsed_args: argparse.Namespace, cword_prefix: str
        ) -> list[str]:
            command = active_parsers[-1]
            for action in command._actions:
                if action.dest in _COMPLETERS:
                    action.completer = _COMPLETERS[action.dest]  # type: ignore[attr-defined]
                # after a flag, argparse alone takes no key=value words: see `parse`
                if action.dest == "overrides" and not command.active_actions:  # type: ignore[attr-defined]
                    command.active_actions = [action]  # type: ignore[attr-defined]
            return super().collect_completions(active_parsers, parsed_args, cword_prefix)

    Finder()(parser, always_complete_options=False)
    raise AssertionError("argcomplete has ended this process")


def _recipes(prefix: str, **_: object) -> list[str]:
    """Return the names of the recipes, and the YAML files that begin with `prefix`."""
    from argcomplete.completers import FilesCompleter

    from pipeline.config.recipes import recipe_names

    return [*recipe_names(), *FilesCompleter(("yaml", "yml"))(prefix)]


def _overrides(prefix: str, **_: object) -> list[str]:
    """Return the keys as `key=`; once a key is complete, the words that are its values."""
    from pipeline.config.help import all_keys, words_of

    key = prefix.partition("=")[0]
    if key != prefix:
        return [f"{key}={word}" for word in words_of(key)]
    return [f"{key}=" for key in all_keys() if key != "recipe"]


_COMPLETERS: dict[str, Callable[..., list[str]]] = {"recipe": _recipes, "overrides": _overrides}
