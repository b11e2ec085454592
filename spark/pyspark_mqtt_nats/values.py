# SPDX-License-Identifier: Apache-2.0
"""Values of options from their texts. Each function raises ValueError; its text does not name the option."""

import json
import math
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqtt_streams.stored import rfc3339
from mqtt_streams.subjects import filter_to_subjects
from pyspark_mqtt_nats.nats.access import Credentials, Server, check_seed, parse_credentials, parse_server

if TYPE_CHECKING:
    from pyspark_mqtt_nats.decoders.option import Decoder

_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE: Final = re.compile(r"([0-9]{1,18})\s*(?:([kmgt])(?:i?b)?|b)?")
_TIME: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?\s*(Z|z|[+-]\d\d:?\d\d)?)?", re.ASCII
)
_SEED: Final = re.compile(r"S[A-Z2-7]{57}")
_MAX_FILE: Final = 1 << 20
"""Largest file of keys or certificates: system bundles are about 0.25 MiB."""


def text(value: str) -> str:
    """Return a text that is not empty."""
    if not value:
        raise ValueError("it is empty")
    return value


def whole(least: int, most: int = (1 << 63) - 1) -> Callable[[str], int]:
    """Return a function for whole numbers between `least` and `most`."""

    def parse(value: str) -> int:
        value = value.strip()
        if not (value.isascii() and value.removeprefix("-").isdecimal() and len(value) <= 20):
            raise ValueError("expected a whole number")
        if not least <= int(value) <= most:
            raise ValueError(f"expected {least} or more" if int(value) < least else f"expected {most} or less")
        return int(value)

    return parse


def size(value: str) -> int:
    """Return a number of bytes; the text may end in k, m or g as in Spark (64m), or in KiB, MiB, GiB."""
    match = _SIZE.fullmatch(value.strip().lower())
    if match is None or not int(match[1]):
        raise ValueError("expected a number of bytes, such as 67108864 or 64m")
    return int(match[1]) * _UNITS[match[2] or ""]


def seconds(value: str) -> float:
    """Return a time span in seconds, from `10` or `10s`."""
    try:
        found = float(value.strip().removesuffix("s"))
    except ValueError:
        raise ValueError("expected a number of seconds, such as 10") from None
    if not math.isfinite(found) or not 0 < found <= 86_400:
        raise ValueError("expected more than 0 and at most 86400 seconds")
    return found


def span(value: str) -> int:
    """Return the seconds of a time span such as `10 minutes`."""
    match = re.fullmatch(r"([0-9]{1,9})\s*(s|min|h|d|w|seconds?|minutes?|hours?|days?|weeks?)", value.strip().lower())
    if match is None or not int(match[1]):
        expected = "expected a time span such as '30 seconds', '10 minutes', '1 hour' or '1 day'"
        raise ValueError(f"{expected}, not {value[:40]!r}")
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}[match[2][0]]


def flag(value: str) -> bool:
    """Return the value of `true` or `false`."""
    return one_of("true", "false")(value) == "true"


def one_of(*choices: str) -> Callable[[str], str]:
    """Return a function for one of a few words, in any case."""

    def parse(value: str) -> str:
        found = value.strip().lower()
        if found not in choices:
            raise ValueError(f"expected {' or '.join(choices)}")
        return found

    return parse


_MILLISECONDS_2000: Final = 946_684_800_000
"""The first millisecond of the year 2000, since 1970."""


def timestamp(value: str) -> int:
    """Return nanoseconds since 1970, from an ISO 8601 time (in UTC without a zone) or from milliseconds since 1970.

    Milliseconds of the last century are refused, 0 apart: they are seconds of today.
    """
    value = value.strip()
    match = _TIME.fullmatch(value)
    milliseconds = int(value) if match is None and value.isascii() and value.isdigit() else 0
    if 0 < milliseconds < _MILLISECONDS_2000:
        raise ValueError("milliseconds since 1970 before the year 2000; for seconds since 1970 append 000")
    try:
        if match is None:
            found = whole(0)(value) * 1_000_000
        else:
            day, minute, second, fraction, zone = match.groups()
            moment = datetime.fromisoformat(f"{day}T{minute or '00:00'}:{second or '00'}{zone or 'Z'}".upper())
            found = int(moment.timestamp()) * 1_000_000_000 + int((fraction or "").ljust(9, "0"))
        rfc3339(found)  # as JetStream has to be asked
    except (ValueError, OverflowError):
        raise ValueError(
            "expected a time such as 2026-01-31T12:00:00Z or 2026-01-31 12:00:00+01:00, or milliseconds since 1970"
        ) from None
    return found


def servers(value: str) -> tuple[Server, ...]:
    """Return the servers of URLs that are separated by commas."""
    found = tuple(parse_server(url) for url in value.split(",") if url.strip())
    if not found:
        raise ValueError("expected URLs such as nats://127.0.0.1:4222, separated by commas")
    return found


def filters(value: str) -> tuple[str, ...]:
    """Return topic filters, from a JSON list or separated by commas or line ends; a repeated one comes once."""
    stripped = value.strip()
    if stripped.startswith("["):
        found = _json(stripped)
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            raise ValueError('expected a JSON list of texts, such as ["site/+/temp", "a,b/#"]')
    else:
        found = [item.strip() for item in re.split(r"[,\n]", value) if item.strip()]
    if not found:
        raise ValueError("expected MQTT topic filters such as site/+/temp, separated by commas")
    for item in found:
        check_filter(item)
    return tuple(dict.fromkeys(found))


def check_filter(item: str) -> None:
    """Raise ValueError for an illegal topic filter, and for one that can match no stored message."""
    if item.partition("/")[0] == "$share":
        raise ValueError(f"{item!r}: leave out $share and the group")
    if "\0" in item:
        raise ValueError(f"{item!r}: it has a NUL")
    try:
        filter_to_subjects(item)
    except ValueError as error:
        raise ValueError(f"{item!r}: {error}") from None


def decoders(value: str) -> tuple["Decoder", ...]:
    """Return the decoders of a JSON object, topic filter -> how its payloads are read; see `decoders.option`."""
    found = _json(value)
    if found == {}:
        return ()
    from pyspark_mqtt_nats.decoders.option import parse_decoders  # needs pyspark, which a job has yet to look for

    for item in found if isinstance(found, dict) else ():
        check_filter(item)
    return parse_decoders(found)


def stream(value: str) -> str:
    """Return the name of a stream."""
    if not value or any(char in value for char in " .*>/\\\t\r\n\0"):
        raise ValueError("expected the name of a stream, which has no space . * > / or \\")
    return value


def prefix(value: str) -> str:
    """Return the beginning of subjects, with a dot at its end; may be empty."""
    value = value.rstrip(".")
    if value:
        _tokens(value)
        value += "."
    return value


def tokens(value: str) -> str:
    """Return a subject without wildcards."""
    _tokens(text(value.rstrip(".")))
    return value.rstrip(".")


def token(value: str) -> str:
    """Return one token of a subject."""
    _tokens(text(value))
    if "." in value:
        raise ValueError("expected a name without dots")
    return value


def _tokens(value: str) -> None:
    if any(not part or part in ("*", ">") for part in value.split(".")) or re.search(r"[\s\0]", value):
        raise ValueError("expected a NATS subject without wildcards and spaces")


def mqtt_topic(value: str) -> str:
    """Return a topic name."""
    if "+" in value or "#" in value:
        raise ValueError("expected a topic to publish on, without + and #")
    check_filter(text(value))
    return value


def credentials(value: str) -> Credentials:
    """Return the JWT and the seed of a credentials file, from the name of the file or its text."""
    return parse_credentials(_text_or_file(value))


def seed(value: str) -> str:
    """Return a user's nkey seed, from the seed or the name of a file with it; the file may have comments."""
    bare = value.strip()
    if _SEED.fullmatch(bare):
        return check_seed(bare)
    # What is no seed may be one with a slip: it is not repeated.
    found = [line for line in _file(value, "the file").split() if _SEED.fullmatch(line)]
    if len(found) != 1:
        raise ValueError("the file has no seed of an nkey")
    return check_seed(found[0])


def names_file(value: str) -> bool:
    """Whether a value that can be a text or the name of a file is the name."""
    return "-----BEGIN" not in value and not _SEED.fullmatch(value.strip())


def pem(kind: str) -> Callable[[str], str]:
    """Return a function for PEM text with a `kind` (CERTIFICATE, PRIVATE KEY): a file's name or its text."""

    def parse(value: str) -> str:
        found = _text_or_file(value)
        if not re.search(rf"-----BEGIN [A-Z ]*{kind}-----", found):
            raise ValueError(f"it has no {kind} in PEM format")
        return found

    return parse


def _text_or_file(value: str) -> str:
    return value if "-----BEGIN" in value else _file(value, f"the file {value[:200]!r}")


def _file(name: str, shown: str) -> str:
    """Return the text of a file; errors call the file `shown`."""
    try:
        with Path(name).expanduser().open("rb") as file:
            data = file.read(_MAX_FILE + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f"{shown} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > _MAX_FILE:
        raise ValueError(f"{shown} is larger than 1 MiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{shown} is not text") from None


def _json(value: str) -> Any:
    try:
        return json.loads(value, object_pairs_hook=_members)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("not JSON of a depth that means something") from None


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object; raises ValueError for a name that is there twice."""
    found: dict[str, Any] = {}
    for name, item in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} is there twice")
        found[name] = item
    return found
