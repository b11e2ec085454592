# SPDX-License-Identifier: Apache-2.0
"""The file of rules: TOML, checked. Each error is one line that names the key to change."""

import posixpath
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal, Self

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    field_validator,
    model_validator,
)

from pyspark_mqtt_nats import values
from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.publishing.encoding import EXPIRY_MOST
from pyspark_mqtt_nats.rules import templates

TABLE_FORMATS: Final = {".csv": "csv", ".json": "json", ".parquet": "parquet"}
"""Extension of a table's file -> format of Spark."""

VIEWS: Final = ("messages", "retained", "sessions")
"""Names that a table must not have."""

FILE_MOST: Final = 1 << 20
"""Bytes of a file of rules."""


def _span(value: object) -> object:
    return values.span(value) if isinstance(value, str) else value


def _filters(value: object) -> object:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ValueError("expected a list of topic filters")
    for item in value:
        values.check_filter(item)
    return tuple(value)


def _name(value: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", value) is None:
        raise ValueError("expected at most 64 letters, digits, _, . and -, a letter or a digit first")
    return value


def _function(value: str) -> str:
    module, _, name = value.partition(":")
    if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ValueError("expected module:function")
    return value


def _decoders(value: dict[str, Any]) -> dict[str, Any]:
    values.decoders(orjson.dumps(value).decode())
    return value


def _topic_template(value: str) -> str:
    for plain, _ in templates.parse(value):
        if "+" in plain or "#" in plain:
            raise ValueError("expected a topic to publish on, without + and #")
    return value


Text = Annotated[StrictStr, Field(min_length=1)]
Template = Annotated[Text, AfterValidator(templates.check)]
Topic = Annotated[Text, AfterValidator(values.mqtt_topic)]
TopicTemplate = Annotated[Text, AfterValidator(_topic_template)]
Seconds = Annotated[StrictInt, BeforeValidator(_span), Field(gt=0)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Hysteresis(_Model):
    """Rows of a key only where `value` has come above `high`, or below `low`, since the row before."""

    key: tuple[Text, ...] = Field(min_length=1)
    value: Text
    high: float
    low: float
    order: Text = "timestamp"

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if not self.low < self.high:
            raise ValueError("low must be less than high")
        return self


class Silence(_Model):
    """A row for each key of which nothing has come for `after` seconds, and one when something comes again."""

    key: tuple[Text, ...] = Field(min_length=1)
    after: Seconds
    order: Text = "timestamp"


class Rule(_Model):
    """A rule: what is read, a query, and how its results are published. `every`: seconds from batch to batch."""

    name: Annotated[Text, AfterValidator(_name)]
    query: Text
    topic: TopicTemplate
    topics: Annotated[tuple[str, ...], BeforeValidator(_filters)] = ("#",)
    payload: Template | None = None
    qos: StrictInt = Field(default=1, ge=0, le=2)
    retain: StrictBool = False
    content_type: Template | None = None
    response_topic: TopicTemplate | None = None
    message_expiry: StrictInt | None = Field(default=None, ge=0, le=EXPIRY_MOST)
    user_properties: dict[str, Template] = Field(default_factory=dict)
    mode: Literal["append", "complete"] = "append"
    every: Seconds = 1
    checkpoint: Text | None = None
    dead_letter: Topic | None = None
    function: Annotated[Text, AfterValidator(_function)] | None = None
    hysteresis: Hysteresis | None = None
    silence: Silence | None = None

    @model_validator(mode="after")
    def _one_function(self) -> Self:
        given = [name for name in ("function", "hysteresis", "silence") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other")
        return self


class Table(_Model):
    """A static table: a file that is read when a rule starts."""

    path: Text
    format: Text | None = None
    options: dict[str, StrictStr] = Field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Format of Spark."""
        return self.format or TABLE_FORMATS[Path(self.path).suffix]

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.format is None and Path(self.path).suffix not in TABLE_FORMATS:
            raise ValueError(f"give a format for {self.path}; {', '.join(TABLE_FORMATS)} need none")
        return self


class Shared(_Model):
    """Settings of all rules of a file. `checkpoint`: directory with one for each rule. `duplicate_window`: seconds."""

    checkpoint: Text
    dead_letter: Topic | None = None
    duplicate_window: Seconds | None = None
    decoders: Annotated[dict[str, Any], AfterValidator(_decoders)] = Field(default_factory=dict)
    tables: dict[str, Table] = Field(default_factory=dict)

    @field_validator("tables")
    @classmethod
    def _tables(cls, given: dict[str, Table]) -> dict[str, Table]:
        for name in given:
            if name.lower() in VIEWS or not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"{name}: expected a name of letters, digits and _ that is not {', '.join(VIEWS)}")
        return given


class _File(Shared):
    rules: tuple[Rule, ...] = Field(min_length=1)

    @field_validator("rules")
    @classmethod
    def _names(cls, given: tuple[Rule, ...]) -> tuple[Rule, ...]:
        names = [rule.name for rule in given]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two rules have the name {twice}")
        return given


@dataclass(frozen=True)
class Definitions:
    """A file of rules as it was read. Two are equal when no rule has to be started again.

    `directory`: of the file; relative paths begin there. `versions`: time and size of each table's local file.
    """

    directory: Path
    shared: Shared
    rules: Mapping[str, Rule]
    versions: Mapping[str, tuple[int, int]]

    def place(self, path: str) -> str:
        """Return a path of the file as Spark takes it."""
        return path if "://" in path else str(self.directory / path)

    def same(self, other: "Definitions", name: str) -> bool:
        """Whether a rule of this name is the same in another file, with all that it uses."""
        return (self.shared, self.versions, self.rules.get(name)) == (
            other.shared,
            other.versions,
            other.rules.get(name),
        )

    def checkpoint(self, rule: Rule) -> str:
        """Return the directory of a rule's checkpoint."""
        return self.place(rule.checkpoint or f"{self.shared.checkpoint.rstrip('/')}/{rule.name}")


def load(path: Path) -> Definitions:
    """Read a file of rules; raises JobError, one line that names the file and the key."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_MOST + 1)
        if len(content) > FILE_MOST:
            raise JobError(f"{path}: a file of rules has at most {FILE_MOST:,} bytes")
        found = tomllib.loads(content.decode())
    except OSError as error:
        raise JobError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise JobError(f"{path}: not TOML: {' '.join(str(error).split())}") from None
    try:
        file_ = _File.model_validate(found)
    except ValidationError as error:
        raise JobError(f"{path}: {_first(error, found)}") from None
    shared = Shared.model_validate({name: getattr(file_, name) for name in Shared.model_fields})
    made = Definitions(path.absolute().parent, shared, {rule.name: rule for rule in file_.rules}, {})
    if (twice := _shared_checkpoint(made)) is not None:
        raise JobError(f"{path}: rules[{twice[1]}].checkpoint: it is that of rule {twice[0]}, or one is in the other")
    versions = {name: _version(Path(made.place(table.path))) for name, table in shared.tables.items()}
    return Definitions(made.directory, shared, made.rules, versions)


def _shared_checkpoint(made: Definitions) -> tuple[str, str] | None:
    """Return two rules of which one would write into the checkpoint of the other, None without such rules."""
    places = sorted(
        (PurePosixPath(posixpath.normpath(made.checkpoint(rule))).parts, name) for name, rule in made.rules.items()
    )
    for (above, one), (below, other) in pairwise(places):  # whatever is below a directory comes right behind it
        if below[: len(above)] == above:
            return one, other
    return None


def _version(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return found.st_mtime_ns, found.st_size


def _first(error: ValidationError, given: Any) -> str:
    """Return the first error with its key: `rules[hot].qos`, the name of a rule in brackets."""
    first = error.errors()[0]
    key = ""
    for part in first["loc"]:
        given = given[part] if _has(given, part) else None
        if isinstance(part, int):
            name = given.get("name") if isinstance(given, dict) else None
            key += f"[{name if isinstance(name, str) else part}]"
        else:
            key += f".{part}" if key else part
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        text = "there is no such key"
    elif first["type"] == "missing":
        text = "it is missing"
    return f"{key}: {text}" if key else text


def _has(given: Any, part: int | str) -> bool:
    return (isinstance(given, dict) and part in given) or (
        isinstance(given, list) and isinstance(part, int) and part < len(given)
    )
