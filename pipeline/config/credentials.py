"""Removal of user names and passwords from URLs, before anything is written down."""

import re
from urllib.parse import unquote

# Up to the last @, because SQLAlchemy accepts /, ? and # in a password. sqlite:///PATH has no host.
_CREDENTIALS = re.compile(r"://(?!/)(\S*)@")


def without_password(text: str) -> str:
    """Return `text` without the credentials of its URLs, also those in their query strings."""
    text = re.sub(r"(?<!models)(:/{1,2})(?!/)\S*@", r"\1", text)  # a Path has one slash where the URL has two
    return re.sub(r"(?i)(?<=[?&])[^=&\s]*(?:password|passwd|pwd|passphrase|secret|token)[^=&\s]*=[^&\s]*&?", "", text)


def hide_credentials(value: str) -> str:
    """Return a value, which may be no valid URL, without what may be a user and a password.

    That is all between :// or the start and the last @. models:/NAME@ALIAS and a path keep theirs.
    """
    return without_password(re.sub(r"(?s)((?<=://)(?!/)|^(?=[^/\s:@]+:(?!/))).*@", "", value, count=1))


def split_credentials(uri: str) -> tuple[str, str, str]:
    """Return a URL without its credentials, the user and the password (decoded, or "")."""
    match = _CREDENTIALS.search(uri)
    name, _, password = match[1].partition(":") if match else ("", "", "")
    return _CREDENTIALS.sub("://", uri), unquote(name), unquote(password)
