# SPDX-License-Identifier: Apache-2.0
"""Log records: text and JSON, with the ids of what they are about."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

import pytest

from mqtt_nats.base.logs import GATEWAY, Json, Text, about
from tests.conftest import GatewayFactory
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.harness.waiting import aeventually


class Lamp:
    def __str__(self) -> str:
        return "client 'lamp'"

    def log_fields(self) -> dict[str, Any]:
        return {"client": "lamp", "connection": 7}


def record(message: str, *arguments: object, **fields: Any) -> logging.LogRecord:
    log = logging.getLogger("mqtt_nats.test")
    extra = about(**fields) if fields else None
    return log.makeRecord(log.name, logging.WARNING, "", 1, message, arguments, None, extra=extra)


@pytest.fixture(autouse=True)
def of_a_gateway() -> Any:
    token = GATEWAY.set(lambda: "aaaaaaaa")
    yield
    GATEWAY.reset(token)


def test_json() -> None:
    found = json.loads(Json(2).format(record("%s reads %d again", Lamp(), 3)))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found.pop("time"))
    assert found == {
        "level": "warning",
        "logger": "mqtt_nats.test",
        "message": "client 'lamp' reads 3 again",
        "worker": 2,
        "gateway": "aaaaaaaa",
        "client": "lamp",
        "connection": 7,
    }


def test_json_without_a_client_and_with_an_exception() -> None:
    one = record("it %s", "failed", client="door", message_id="0f")
    try:
        raise ValueError("no\nway")
    except ValueError:
        one.exc_info = sys.exc_info()
    line = Json().format(one)
    assert "\n" not in line
    found = json.loads(line)
    assert (found["client"], found["message_id"], found["message"]) == ("door", "0f", "it failed")
    assert "ValueError: no\nway" in found["exception"]
    assert "worker" not in found


def test_text() -> None:
    line = Text().format(record("%s reads again", Lamp()))
    assert line.endswith("WARNING mqtt_nats.test: client 'lamp' reads again [gateway=aaaaaaaa connection=7]")
    assert " mqtt_nats.test [3]: " in Text(3).format(record("hello"))


def test_text_without_ids() -> None:
    GATEWAY.set(None)
    assert Text().format(record("hello")).endswith(" WARNING mqtt_nats.test: hello")


async def test_a_gateway_that_logs_json(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory(nats_server, "--log-format", "json", "--log-level", "debug")
    async with await RawClient.connect(gateway.port, "talkative") as client:
        client.write(b"\x20\x02\x00\x00")  # CONNACK is not a client's to send
        await client.expect_closed()

    def lines() -> list[dict[str, Any]]:
        found = [line for line in gateway.log.splitlines() if line.startswith("{")]
        return [json.loads(line) for line in found]

    def told() -> list[dict[str, Any]]:
        return [one for one in lines() if one.get("cause")]

    (found,) = await aeventually(told)
    assert (found["client"], found["level"]) == ("talkative", "info")
    assert (found["cause"], found["reason_code"]) == ("protocol error", "0x82")
    assert isinstance(found["connection"], int)
    assert re.fullmatch(r"\w{8}", found["gateway"])
    assert "client 'talkative' from 127.0.0.1:" in found["message"]
    assert {one["gateway"] for one in lines() if "gateway" in one} == {found["gateway"]}
