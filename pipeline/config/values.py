"""The types of a configuration's values: how each is read from a word, and what it allows."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

from pipeline.lazy import addon

T = TypeVar("T")
UNSET = ("auto", "null", "~", "")
"""Words that mean the default, together with YAML's words for a missing value."""


def read_as(value: object, *words: str) -> BeforeValidator:
    """Return a validator that replaces `words`, in any case, by `value`."""
    return BeforeValidator(
        lambda given: value if isinstance(given, str) and given.lower() in words else given
    )


@dataclass(frozen=True)
class Duration:
    """A length of training in epochs, steps or percent of all steps."""

    amount: float
    unit: str

    @classmethod
    def parse(cls, text: object) -> "Duration":
        """Parse `10 epochs`, `500 steps`, `5 %` (of all steps) or `0`, or raise ValueError."""
        if isinstance(text, Duration):
            return text
        words = "0 steps" if str(text).strip() == "0" else str(text).strip()
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)\s*(epochs?|steps?|%)", words, re.ASCII)
        if not match or (match[2].startswith("step") and "." in match[1]):
            raise ValueError("not a duration")
        return cls(float(match[1]), match[2] if match[2] == "%" else match[2].removesuffix("s") + "s")

    def __str__(self) -> str:
        return f"{f'{self.amount:.6f}'.rstrip('0').rstrip('.')} {self.unit}"  # `parse` does not read 1e-06


def _positive(duration: Duration) -> Duration:
    if duration.amount == 0:
        raise ValueError("zero")
    return duration


def _normalise_path(text: str) -> str:
    """Expand `~` and remove redundant slashes; leave a URI (s3://, models:/) as it is.

    Raises UnicodeEncodeError, a ValueError, if no file can have this name in this locale.
    """
    os.fsencode(text)
    return text if ":/" in text else str(Path(os.path.expanduser(text)))


def expand_home(uri: str) -> str:
    """Expand `~` in sqlite:///~/FILE; return any other URI as it is."""
    scheme, slashes, path = uri.partition(":///")
    return scheme + slashes + os.path.expanduser(path) if scheme.startswith("sqlite") else uri


def split_range(value: object) -> object:
    """Split `20-24` into two numbers; return any other value as it is."""
    match = re.fullmatch(r"(\d{1,12})-(\d{1,12})", value, re.ASCII) if isinstance(value, str) else None
    return match.groups() if match else value


Argument = bool | int | float | str | None
"""An argument of a function that makes a model."""


Absent = read_as(None, "none", *UNSET)
OrNone = Annotated[T | None, Absent]
"""A value that may be `auto` or `none`: the plan then chooses it, or the feature is off."""

Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(gt=0, le=100)]
Pixels = Annotated[int, Field(ge=8, le=2048)]
Count = Annotated[int, Field(ge=1)]

DurationField = Annotated[
    Duration,
    BeforeValidator(Duration.parse),
    PlainSerializer(str),
    WithJsonSchema({"allowed": "a duration such as '10 epochs', '500 steps' or '5 %'"}),
]
Interval = Annotated[
    DurationField,
    AfterValidator(_positive),  # 0 is ambiguous: never, or always
    WithJsonSchema({"allowed": "a duration above 0 such as '10 epochs', '500 steps' or '5 %'"}),
]
"""A duration after which something is repeated."""

Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f]+$")]
"""A string without control characters: a NUL in a path raises ValueError in any function that uses
the path, and a line break would split an error message."""

Place = Annotated[Text, AfterValidator(_normalise_path)]
"""A path, or a keyword or URI in its place. The shell does not expand `~` after `=`."""

Arguments = Annotated[
    dict[str, Argument | list[Argument]],
    BeforeValidator(lambda given: addon("ops.keys").parse_arguments(given)),
    WithJsonSchema(
        {"allowed": "'NAME: VALUE' pairs: numbers, true | false | none, words, and lists of them"}
    ),
]

Columns = Annotated[
    dict[str, Text | list[Text]],
    AfterValidator(lambda given: addon("ops.keys").check_columns(given)),
    WithJsonSchema({"allowed": "a name for path, image, label, split or group; for label also a list"}),
]

ClassWeights = Annotated[
    Literal["none", "balanced", "sqrt"] | dict[str, Annotated[float, Field(gt=0, le=1e6)]],
    WithJsonSchema({"allowed": "none | balanced | sqrt | FILE"}),
]


def _allowed(words: str, **bounds: Any) -> Any:
    return Field(**bounds, json_schema_extra={"allowed": words})


_MODEL_NAME = (
    "NAME or NAME@ALIAS (letters, digits, _ . -; MLflow keeps the aliases latest and v1, v2, … for itself)"
)
ModelName = Annotated[
    str,
    _allowed(_MODEL_NAME, pattern=r"^[\w.-]+(@[\w.-]+)?$"),
    AfterValidator(lambda name: addon("mlflow.uri").check_model_name(name)),
]
ExperimentName = Annotated[Text, _allowed("up to 500 characters", max_length=500)]
RunName = Annotated[str, _allowed("a name of letters, digits, blanks and _ . -", pattern=r"^[\w. -]+$")]
