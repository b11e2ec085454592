# SPDX-License-Identifier: Apache-2.0
"""What a service that is asked over HTTP is told, and what its answers mean."""

import json
from typing import Any

import orjson
import pytest

from mqtt_nats.access.acl import Identity
from mqtt_nats.access.answers import question, verdict
from mqtt_nats.access.authenticator import IGNORE, Allow, Denied, Ignore
from mqtt_nats.codec import ReasonCode
from tests.access.test_chain import credentials

ANN = credentials("ann", b"pencil")


def answer(values: Any, status: int = 200) -> Allow | Ignore | Denied:
    return verdict(status, values if isinstance(values, bytes) else json.dumps(values).encode(), ANN)


def test_the_question() -> None:
    body = question(ANN)
    assert body is not None
    assert orjson.loads(body) == {
        "client_id": "c1",
        "username": "ann",
        "password": "pencil",
        "address": "192.0.2.1",
    }
    assert question(credentials("ann", b"\xff")) is None
    assert b'"password":null' in (question(credentials("ann")) or b"")


def test_the_tenant() -> None:
    assert answer({"result": "allow", "tenant": "acme"}) == Allow("ann", tenant="acme")
    for wrong in ("", 5, ["acme"]):
        assert isinstance(answer({"result": "allow", "tenant": wrong}), Denied)


def test_what_lets_in() -> None:
    assert answer({"result": "allow"}) == Allow("ann")
    assert answer({"result": "allow", "user": "bob", "groups": ["a"], "expires": 5}) == Allow(
        "bob", frozenset("a"), expires=5
    )
    assert answer({"result": "ignore"}) is IGNORE


def test_rules() -> None:
    found = answer({"result": "allow", "acl": [{"effect": "allow", "access": "publish", "topics": "own/%u/#"}]})
    assert isinstance(found, Allow)
    assert found.rules is not None
    permissions = found.rules.permissions(Identity("ann", "c1"))
    assert permissions.may_publish("own/ann/x", 0, False)
    assert not permissions.may_publish("own/bob/x", 0, False)
    assert not permissions.subscribe("own/ann/x", 0)
    found = answer({"result": "allow", "acl": []})
    assert isinstance(found, Allow)
    assert found.rules is not None  # none at all: nothing is permitted
    assert not found.rules.permissions(Identity("ann", "c1")).subscribe("x", 0)


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({"result": "deny"}, 200),
        ({"result": "allow"}, 201),
        ({"result": "allow"}, 204),
        ({"result": "allow"}, 302),
        ({"result": "allow"}, 401),
        ({"result": "allow"}, 500),
        ({}, 200),
        ([], 200),
        (None, 200),
        (True, 200),
        ("allow", 200),
        (b"", 200),
        (b"allow", 200),
        (b'{"result": "allow"', 200),
        (b"\xff", 200),
        (b'{"result": "deny", "result": "allow"}', 200),
        (b'{"result": "allow", "result": "deny"}', 200),
        (b'{"result": "allow", "user": "ann", "us\\u0065r": "root"}', 200),
        (b'{"result": "allow", "acl": [{"effect": "deny", "effect": "allow", "topics": "a"}]}', 200),
        (b'{"result": "allow", "acl": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 200),
        (b'{"result": "allow", "expires": 1e999}', 200),
        (b'{"result": "allow", "expires": NaN}', 200),
        ({"result": True}, 200),
        ({"result": "Allow"}, 200),
        ({"result": "allow", "ACL": []}, 200),
        ({"result": "allow", "user": ""}, 200),
        ({"result": "allow", "user": 1}, 200),
        ({"result": "allow", "user": "a\nb"}, 200),
        ({"result": "allow", "groups": "staff"}, 200),
        ({"result": "allow", "groups": [1]}, 200),
        ({"result": "allow", "expires": "soon"}, 200),
        ({"result": "allow", "acl": {}}, 200),
        ({"result": "allow", "acl": "allow"}, 200),
        ({"result": "allow", "acl": [{"effect": "allow"}]}, 200),
        ({"result": "allow", "acl": [{"effect": "allow", "topics": "a/#/b"}]}, 200),
        ({"result": "allow", "acl": [{"effect": "allow", "topics": "a", "user": "bob"}]}, 200),
        ({"result": "allow", "acl": [{"effect": "allow", "topics": "a"}] * 1001}, 200),
    ],
)
def test_whatever_is_not_as_it_has_to_be_denies(values: Any, status: int) -> None:
    found = answer(values, status)
    assert isinstance(found, Denied)
    assert "\n" not in found.why
    assert "pencil" not in found.why
    assert (found.reason is ReasonCode.BAD_USER_NAME_OR_PASSWORD) == (values == {"result": "deny"})
