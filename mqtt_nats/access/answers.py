# SPDX-License-Identifier: Apache-2.0
"""Requests to an HTTP authentication service, and its answers."""

from __future__ import annotations

import json
from typing import Any, Final, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mqtt_nats.access.acl_file import own_rules
from mqtt_nats.access.authenticator import IGNORE, Allow, Credentials, Denied, Ignore
from mqtt_nats.codec import ReasonCode

# Most bytes of an answer.
ANSWER_MOST: Final = 256 * 1024


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    result: Literal["allow", "deny", "ignore"]
    user: str | None = Field(default=None, min_length=1)
    groups: list[str] = []
    acl: list[Any] | None = None
    expires: float | None = Field(default=None, allow_inf_nan=False)
    tenant: str | None = Field(default=None, min_length=1)


def question(credentials: Credentials) -> bytes | None:
    """Return the body of the request; None for a password that is not UTF-8, which JSON cannot carry."""
    try:
        password = None if credentials.password is None else credentials.password.decode()
    except UnicodeDecodeError:
        return None
    return orjson.dumps(
        {
            "client_id": credentials.client_id,
            "username": credentials.username,
            "password": password,
            "address": credentials.connection.host,
        }
    )


def check_keys(body: bytes) -> None:
    """Check that no object of a JSON text has a key twice, which two parsers could read differently.

    Raises:
        ValueError: an object has a key twice, or the text is not JSON.
    """
    try:
        json.loads(body, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it has too many levels") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found


def verdict(status: int, body: bytes, credentials: Credentials) -> Allow | Ignore | Denied:
    """Return the verdict of an answer. Any deviation from the format denies the client."""
    if status != 200:
        return Denied(f"the service answers with status {status}")
    try:
        check_keys(body)
    except ValueError as error:
        why = "it is not JSON" if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else str(error)
        return Denied(f"the answer of the service is wrong: {why}")
    try:
        found = _Answer.model_validate_json(body)
        rules = None if found.acl is None else own_rules(found.acl)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors(include_input=False)[0]["loc"]) or "it"
        return Denied(f"the answer of the service is wrong: {where}")
    except ValueError as error:
        return Denied(f"the answer of the service is wrong: acl: {error}")
    if found.result == "ignore":
        return IGNORE
    if found.result == "deny":
        return Denied("the service refuses the credentials", ReasonCode.BAD_USER_NAME_OR_PASSWORD)
    user = found.user or credentials.username or None
    if user is not None and not user.isprintable():
        return Denied("the name of the user has control characters")
    return Allow(user, frozenset(found.groups), rules, found.expires, tenant=found.tenant)
