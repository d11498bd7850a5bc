"""The help text for the configuration's keys, and the error lines for invalid keys and values."""

import difflib
import sys
import textwrap
from functools import cache
from typing import Any

from pipeline.config.credentials import hide_credentials
from pipeline.config.schema import Config, Section

_OTHER_NAMES = {
    "batch": "batch.global", "batch-size": "batch.global", "data": "data.root", "learning-rate": "optimizer.lr",
    "model": "model.arch", "optimizer": "optimizer.name", "output": "run.dir", "scheduler": "schedule.name",
}  # fmt: skip
"""Names that other training programs give to some keys."""


def describe_keys(width: int = 80) -> str:
    """Return the help text: by section, each key with its default, meaning and allowed values."""
    blocks: dict[str, list[str]] = {}
    for key, (schema, default) in all_keys().items():
        if key != "recipe":
            text = " ".join(schema["description"].split())
            value = "none" if default is None and "none: " in text else show(default)
            lines = [*textwrap.wrap(text, width - 6), *textwrap.wrap(f"Allowed: {_allowed(schema)}.", width - 6)]
            section = key.partition(".")[0] if "." in key else "top level"
            blocks.setdefault(section, []).append("\n      ".join([f"  {key}={value}", *lines]))
    return "\n\n".join("\n".join([f"{section}:", *keys]) for section, keys in blocks.items())


def words_of(key: str) -> list[str]:
    """Return the words that are values of a key, such as `cosine`; [] if it has none."""
    schema, default = all_keys().get(key, ({}, None))
    words = [word for option in schema.get("anyOf", [schema]) for word in _words(option)]
    return words if not isinstance(default, str) or default in words else [default, *words]


def _words(schema: dict[str, Any]) -> list[str]:
    by_type = {"boolean": ["true", "false"], "null": ["auto", "none"]}
    return schema.get("enum") or by_type.get(schema.get("type", ""), [])


def nearest(word: str, words: list[str], cutoff: float = 0.5) -> str:
    """Return "; did you mean X?" for the closest of `words`, or "". `word` may lack its section."""
    close = [key for key in words if key.endswith(f".{word}")]
    close = close or difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


def explain(error: Any) -> tuple[str, str]:
    """Return problem and remedy of an error of pydantic: the key, its value, the allowed values."""
    location = [str(part) for part in error["loc"]]
    parts, given = list(location), error["input"]
    while parts and ".".join(parts) not in all_keys() and (parts[-1].isdigit() or parts[:2] == ["model", "args"]):
        parts.pop()  # an element of a list, or of model.args: name the key
    key = ".".join(parts)
    if error["type"] == "extra_forbidden":
        return unknown_key(".".join(location), given)
    if error["type"] == "string_unicode" and key not in all_keys():  # the name of the key is not UTF-8
        return unknown_key(".".join([*parts, given]), "")
    if error["type"] == "value_error" and key not in all_keys():  # a validator of several keys has its own message
        problem, remedy = (*error["ctx"]["error"].args, "")[:2]
        return str(problem), str(remedy)
    if is_section(key):
        return not_a_section(key, given)
    if error["type"] == "string_unicode" or isinstance(error.get("ctx", {}).get("error"), UnicodeEncodeError):
        encoding = sys.getfilesystemencoding()
        problem = f"{key}={show(given)} is not {encoding} text, as this locale needs"
        return problem, "rename it, or set LC_ALL=C.UTF-8"
    schema, default = all_keys()[key]
    if error["type"] == "missing" and parts == location:  # otherwise a list has too few elements
        return f"{key} is missing", f"give {_allowed(schema)}"
    return f"{key}={show(given)} is not allowed", f"give {_allowed(schema)}{_example(key, schema, default)}"


def is_section(key: str) -> bool:
    return key in Config.model_fields and key not in all_keys()


def not_a_section(key: str, given: object) -> tuple[str, str]:
    inside = ", ".join(name for name in all_keys() if name.startswith(f"{key}."))
    return f"{key}={show(given)} is not allowed, because {key} is a section", f"give its keys {inside}"


def unknown_key(key: str, given: object) -> tuple[str, str]:
    while isinstance(given, dict) and given:  # if the whole section is unknown, name the first key in it
        inner, given = next(iter(given.items()))
        key = f"{key}.{inner}"
    if key in all_keys():  # a dotted key in YAML
        section, _, name = key.partition(".")
        return f"'{key}: {show(given)}' is not allowed in a recipe", f"write '{section}: {{{name}: {show(given)}}}'"
    close = nearest(key, list(all_keys())) or f"; the sections are {', '.join(Config.model_fields)}"
    return f"{show(key)}={show(given)}: there is no key '{show(key)}'{close}", ""


def not_an_override(words: list[str], at: int) -> str:
    """Return the error line for `words[at]`, which is not key=value."""
    word, before, following = words[at], words[at - 1] if at else "", words[at + 1 : at + 3]
    line = f"'{show(word)}' is not key=value, such as train.epochs=10"
    if before.endswith("="):  # train.epochs= 3
        return f"{line}; write {show(before + word)}"
    if "=" in before and (word in ("epoch", "epochs", "step", "steps", "%") or word.endswith("]")):
        return f"{line}; quote a value that has a space, as in '{show(f'{before} {word}')}'"
    key = _key_named(word.rstrip(":"))
    if key is None:
        return line + nearest(word, list(all_keys()), 0.7)
    value = "".join(following[: 2 if following[:1] == ["="] else 1]).removeprefix("=")
    return f"{line}; write {key}={show(value) if value and '=' not in value else 'VALUE'}"


def flag_as_override(flag: str, following: str) -> str:
    """Return ": write train.epochs=3" for the flag --epochs and the word after it, or ""."""
    name, _, value = flag.lstrip("-").partition("=")
    key = _key_named(name)
    if key is None:
        return ""
    value = value or ("" if following.startswith("-") or "=" in following else following)
    return f": a key of the recipe has no dashes, write {key}={show(value) if value else 'VALUE'}"


def _key_named(word: str) -> str | None:
    """Return the key that a word names: in full, without its section or as other programs do."""
    name = _OTHER_NAMES.get(word.replace("_", "-"), word)
    close = [key for key in all_keys() if key == name or key.endswith(f".{name}")]
    return close[0] if len(close) == 1 else None


def show(value: object) -> str:
    """Return a value as a user writes it, printable, without passwords, at most 60 characters."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return str(value).lower()
    text = hide_credentials(f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value))
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()


@cache
def all_keys() -> dict[str, tuple[dict[str, Any], Any]]:
    """Return each dotted key with its JSON schema and its default, in the order of the schema."""
    schema = Config.model_json_schema(by_alias=True)
    keys: dict[str, tuple[dict[str, Any], Any]] = {}
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            section = schema["$defs"][field.annotation.__name__]["properties"]
            for inner_name, inner in field.annotation.model_fields.items():
                alias = inner.alias or inner_name
                keys[f"{name}.{alias}"] = (section[alias], inner.default)
        else:
            keys[name] = (schema["properties"][name], field.default)
    return keys


def _allowed(schema: dict[str, Any]) -> str:
    """Return the values that a JSON schema allows, in words."""
    if "allowed" in schema:  # the words of a field with its own pattern
        return str(schema["allowed"])
    if "anyOf" in schema:
        return ", or ".join(_allowed(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(schema["enum"])
    if "format" in schema:
        above = " above 0" if schema["format"] == "interval" else ""
        return f"a duration{above} such as '10 epochs', '500 steps' or '5 %'"
    if "prefixItems" in schema:
        items = schema["prefixItems"]
        return f"{len(items)} values [{', '.join(map(_allowed, items))}]"
    names = {"integer": "an integer", "number": "a number", "boolean": "true | false", "null": "auto | none"}
    return names.get(schema.get("type", ""), "a one-line string") + _bounds(schema)


def _example(key: str, schema: dict[str, Any], default: object) -> str:
    """Return an example of a list, quoted as a shell needs it; "" for other values."""
    example = schema.get("examples", [default])[0]
    return f", such as '{key}={show(example)}'" if isinstance(example, list | tuple) else ""


def _bounds(schema: dict[str, Any]) -> str:
    """Return " from 0 to 1"; the bounds with signs if one is exclusive or missing; or ""."""
    if "minimum" in schema and "maximum" in schema:
        return f" from {_number(schema['minimum'])} to {_number(schema['maximum'])}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return " and".join(f" {sign} {_number(schema[name])}" for name, sign in signs.items() if name in schema)


def _number(value: float) -> str:
    """Return a number in decimal, or as a power of two if it is large: 2^40, 2^63−1."""
    if value <= 10**9:
        return f"{value:.12g}"
    exponent = int(value).bit_length()
    return f"2^{exponent - 1}" if value == 1 << exponent - 1 else f"2^{exponent}−1"
