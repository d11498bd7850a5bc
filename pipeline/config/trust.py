"""Whose code may make a model: that which the user's own recipe or command line names.

A checkpoint, a receipt or a model in a registry also names its model.arch. If that is a function
(package.module:function), a file from elsewhere could run code here. So nothing calls such a
function unless it was trusted before: by the recipe of `pipeline train`, by model.arch=… on the
command line, or by --trust. Processes that this one starts inherit it.
"""

import os

_VARIABLE = "PIPELINE_TRUSTED_MODEL"


def trust(arch: str) -> None:
    """Allow what a user named, a function or a place, to be used here and in child processes."""
    if is_function(arch) and arch not in trusted():
        os.environ[_VARIABLE] = "\n".join([*trusted(), arch])


def trusted() -> list[str]:
    """Return the functions and places that a user named."""
    return os.environ.get(_VARIABLE, "").splitlines()


def is_function(arch: str) -> bool:
    """Return True if `arch` is package.module:function."""
    return ":" in arch
