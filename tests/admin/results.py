# SPDX-License-Identifier: Apache-2.0
"""Holds what verbs answer against the schemas that the OpenAPI document has for it."""

from __future__ import annotations

from typing import Any

from openapi_schema_validator import OAS31Validator

from mqtt_nats.admin.results import RESULTS, result_schema


def check_result(arguments: tuple[str, ...], result: Any) -> None:
    """See that what a command line has printed as JSON has exactly the fields of its schema.

    Args:
        arguments: of ``mqtt-nats ctl``.
    """
    names = [".".join(arguments[:2]), arguments[0], f"{arguments[0]}.list"]
    name = next(one for one in names if one in RESULTS)
    OAS31Validator(_closed(result_schema(name, "#/$defs/{model}"))).validate(result)


def _closed(schema: Any) -> Any:
    """The same schema without other fields."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(one) for key, one in schema.items()}
    return found | {"additionalProperties": False} if isinstance(found.get("properties"), dict) else found
