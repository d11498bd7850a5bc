"""Whose code may make a model: that which the user's own recipe or command line names.

A checkpoint, a receipt or a model in a registry also names its model.arch. If that is a function
(package.module:function), a file from elsewhere could run code here. So nothing calls such a
function unless it was trusted before: by the recipe of `pipeline train`, by model.arch=… on the
command line, or by --trust. Processes that this one starts inherit it.
"""

import os

from pipeline.errors import RequestError

_VARIABLE = "PIPELINE_TRUSTED_MODEL"


def trust(arch: str) -> None:
    """Allow the function that a user named to run, here and in child processes."""
    if is_function(arch):
        os.environ[_VARIABLE] = arch


def check_is_trusted(arch: str) -> None:
    """Raise RequestError if `arch` is a function that the user has not named."""
    if is_function(arch) and os.environ.get(_VARIABLE) != arch:
        raise RequestError(
            f"model.arch={arch} is a function, which a file names and you did not", f"it runs only with --trust {arch}"
        )


def is_function(arch: str) -> bool:
    """Return True if `arch` is package.module:function."""
    return ":" in arch
