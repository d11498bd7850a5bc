"""Values as people may see them: user names and passwords are removed from URLs."""

import re
from urllib.parse import unquote

_URL = r"([\w+.-]*:)(//?)(?!/)(%s*)"  # sqlite:///PATH has no host; a Path has one slash where the URL has two
_HOST = re.compile(r"(\[[^]]*\]|[^]\[/?#:@]*)(:\d{1,5})?(?=[/?#]|$)")
_NO_HOST = ("models", "runs", "dbfs", "file", "mlflow-artifacts", "sqlite")
"""Schemes in which one slash is the start of a path."""
_CONTAINER = re.compile(r"(abfss?|wasbs?)://[^/?#:@]+@")
"""Azure's storage names a container before the @."""
_DATABASE = re.compile(r"(postgres(ql)?|mysql|mariadb|mssql|oracle)(\+\w+)?://[^:/]*:")
"""SQLAlchemy takes what follows up to an @ for a password, even a port and a path."""


def without_password(text: str) -> str:
    """Return `text` without the credentials of its URLs, also those in their query strings."""
    text = re.sub(_URL % r"\S", _without_userinfo, text)
    return re.sub(
        r"(?i)(?<=[?&])[^=&\s]*(?:password|passwd|pwd|passphrase|secret|token)[^=&\s]*=[^&\s]*&?", "", text
    )


def hide_credentials(value: str) -> str:
    """Return a value, which may be no valid URL, without what may be a user and a password.

    A password in it may have blanks. USER:PASSWORD@HOST needs no scheme.
    """
    value = re.sub(_URL % r"[\s\S]", _without_userinfo, value)
    return without_password(re.sub(r"(?s)^[^/\s:@]+:(?!/|\d{1,5}/).*@", "", value))


def split_credentials(uri: str) -> tuple[str, str, str]:
    """Return a URL without its credentials, the user and the password (decoded, or "")."""
    url = re.search(_URL % r"\S", uri)
    userinfo = _userinfo(url) if url else ""
    name, _, password = userinfo[:-1].partition(":")
    return uri.replace(userinfo, "", 1), unquote(name), unquote(password)


def _without_userinfo(url: re.Match[str]) -> str:
    return url[1] + url[2] + without_password(url[3].removeprefix(_userinfo(url)))


def _userinfo(url: re.Match[str]) -> str:
    """Return the credentials in a match of `_URL`, with their @, or "".

    They end at the last @ of the host's part, as in urllib. Passwords with /, ? and # work, too:
    if that part is no HOST and no HOST:PORT, the credentials end at the last @ of all.
    """
    scheme, slashes, rest = url.groups()
    if (slashes == "/" and re.split("[:+]", scheme)[0] in _NO_HOST) or _CONTAINER.match(url[0]):
        return ""
    if not _DATABASE.match(url[0]):
        if _HOST.match(rest):
            return ""
        host = re.split("[/?#]", rest)[0]
        rest = host if "@" in host else rest
    return "".join(rest.rpartition("@")[:2])


def show(value: object) -> str:
    """Return a value as a user writes it, printable, without passwords, at most 60 characters."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return str(value).lower()
    text = f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)
    text = hide_credentials(text)
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()
