"""The checks that nothing runs or is read which only a file names (see `config.trust`).

`pipeline verify` reads the places that a receipt names. A bucket or a model in a registry is read
with the user's credentials, so these need --trust, too.
"""

import shlex

from pipeline.config.trust import is_function, trusted
from pipeline.errors import RequestError


def check_is_trusted(arch: str) -> None:
    """Raise RequestError if `arch` is a function that the user has not named."""
    if is_function(arch) and arch not in trusted():
        problem = f"model.arch={arch} is a function, which a file names and you did not"
        raise RequestError(problem, f"it runs only with --trust {arch}")


def check_place_is_trusted(key: str, place: str | None) -> None:
    """Raise RequestError if a file names a bucket or a registry, and the user does not."""
    if place and ":/" in place and place not in trusted():
        problem = f"{key}={place} would be read with your credentials, and a file names it and you did not"
        raise RequestError(problem, f"if you trust that file, add --trust {shlex.quote(place)}")
