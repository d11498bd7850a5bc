"""Whose code may make a model: that which the user's own recipe or command line names.

A checkpoint, a receipt or a model in a registry also names its model.arch. If that is a function
(package.module:function), a file from elsewhere could run code here. So nothing calls such a
function unless it was trusted before: by the recipe of `pipeline train`, by model.arch=… on the
command line, or by --trust. Processes that this one starts inherit it.

`pipeline verify` reads the places that a receipt names. A bucket or a model in a registry is read
with the user's credentials, so these need --trust, too.
"""

import os
import shlex

from pipeline.errors import RequestError

_VARIABLE = "PIPELINE_TRUSTED_MODEL"


def trust(arch: str) -> None:
    """Allow what a user named, a function or a place, to be used here and in child processes."""
    if ":" in arch and arch not in _trusted():
        os.environ[_VARIABLE] = "\n".join([*_trusted(), arch])


def _trusted() -> list[str]:
    return os.environ.get(_VARIABLE, "").splitlines()


def check_is_trusted(arch: str) -> None:
    """Raise RequestError if `arch` is a function that the user has not named."""
    if ":" in arch and arch not in _trusted():
        problem = f"model.arch={arch} is a function, which a file names and you did not"
        raise RequestError(problem, f"it runs only with --trust {arch}")


def check_place_is_trusted(key: str, place: str | None) -> None:
    """Raise RequestError if a file names a bucket or a registry, and the user does not."""
    if place and ":/" in place and place not in _trusted():
        problem = f"{key}={place} would be read with your credentials, and a file names it and you did not"
        raise RequestError(problem, f"if you trust that file, add --trust {shlex.quote(place)}")
