# SPDX-License-Identifier: Apache-2.0
"""Where settings come from: the TOML file, and what may be shown of them."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mqtt_nats.errors import StartupError


def without_userinfo(url: str) -> str:
    """A URL without what stands before its ``@``."""
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.rpartition("@")[2]


def read_file(path: Path, known: Iterable[str]) -> dict[str, Any]:
    """What a file says.

    Raises:
        StartupError: it cannot be read, or has a setting that is not one of ``known``.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartupError(f"the configuration file {path} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"the configuration file {path} is not valid TOML: {error}") from None
    names = list(known)
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "docs/configuration.md lists the settings"
            raise StartupError(f"unknown setting {key!r} in {path}: {hint}")
    return values


def is_json(text: str | None) -> bool:
    """Whether a variable has JSON, or nothing."""
    try:
        json.loads(text or "[]")
    except ValueError:
        return False
    return True
