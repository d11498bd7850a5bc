"""User names and passwords in URLs: taken out before anything is written down."""

import re
from urllib.parse import unquote

# up to the last @, for SQLAlchemy takes /, ? and # in a password as they are; a path follows an empty host (sqlite:///)
_CREDENTIALS = re.compile(r"://(?!/)(\S*)@")


def without_password(text: str) -> str:
    """`text` without the passwords of the URLs in it: the user's part, and words of a query that are named so."""
    text = _CREDENTIALS.sub("://", text)
    return re.sub(r"(?i)(?<=[?&])[^=&\s]*(?:password|passwd|secret|token)[^=&\s]*=[^&\s]*&?", "", text)


def split_credentials(uri: str) -> tuple[str, str, str]:
    """A URL without its user and password, and these two, decoded; empty where it has none."""
    match = _CREDENTIALS.search(uri)
    name, _, password = match[1].partition(":") if match else ("", "", "")
    return _CREDENTIALS.sub("://", uri), unquote(name), unquote(password)
