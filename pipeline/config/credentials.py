"""Removal of user names and passwords from URLs, before anything is written down."""

import re
from urllib.parse import unquote

# Up to the last @, because SQLAlchemy accepts /, ? and # in a password. sqlite:///PATH has no host.
_CREDENTIALS = re.compile(r"://(?!/)(\S*)@")


def without_password(text: str) -> str:
    """Return `text` without the credentials of its URLs, also those in their query strings."""
    text = _CREDENTIALS.sub("://", text)
    return re.sub(r"(?i)(?<=[?&])[^=&\s]*(?:password|passwd|secret|token)[^=&\s]*=[^&\s]*&?", "", text)


def split_credentials(uri: str) -> tuple[str, str, str]:
    """Return a URL without its credentials, the user and the password (decoded, or "")."""
    match = _CREDENTIALS.search(uri)
    name, _, password = match[1].partition(":") if match else ("", "", "")
    return _CREDENTIALS.sub("://", uri), unquote(name), unquote(password)
