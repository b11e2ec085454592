# SPDX-License-Identifier: Apache-2.0
"""Answers of a gateway that are too large for NATS."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from mqtt_nats.control import clients as controlclients
from mqtt_nats.control.selection import Total
from mqtt_nats.control.server import Control
from mqtt_nats.messages.identity import Identity
from mqtt_nats.sessions.services import Registry


def serving(clients: dict[str, Any]) -> Any:
    """An account with these clients."""
    registry: Registry[Any] = Registry()
    registry.clients.update(clients)
    return SimpleNamespace(registry=registry)


@pytest.mark.parametrize(("size", "refused"), [(1000, False), (1001, True)])
def test_an_answer_that_nats_would_end_the_connection_over_is_not_sent(size: int, refused: bool) -> None:
    link = SimpleNamespace(max_payload=1000, out=[], kick=lambda: None)
    services = SimpleNamespace(nats=SimpleNamespace(link=link), identity=Identity("g"))
    account = SimpleNamespace(services=services)
    control: Any = SimpleNamespace(account=account)
    Control.tell(control, b"reply", b"x" * size)
    head, body, end = link.out[0].split(b"\r\n")
    assert head == b"PUB reply %d" % len(body)
    assert not end
    if refused:
        found = orjson.loads(body)
        assert (found["id"], found["more"], found["items"]) == ("g", False, [])
        assert "1001 bytes" in found["error"]
    else:
        assert body == b"x" * size


@pytest.mark.parametrize("stopped", [True, False])
async def test_clients_are_left_in_peace_when_nobody_wants_it_any_more(
    monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """It is stopped, or nobody renews it; while somebody does, it goes on."""
    monkeypatch.setattr(controlclients, "HEARD", 0.01)
    monkeypatch.setattr(controlclients, "PATIENCE", 0.1)
    names = [f"c{number}" for number in range(100)]
    ended: list[str] = []

    def client(name: str) -> Any:
        end = lambda error: ended.append(name)  # noqa: E731
        return SimpleNamespace(client_id=name, alive=True, end=end, filters={}, shares=None)

    control: Any = SimpleNamespace(account=serving({name: client(name) for name in names}), kicks={})
    question = {"everybody": True, "over": 5.0, "kick": "this"}
    kicking = asyncio.ensure_future(anext_all(controlclients._kick(control, question)))
    for _ in range(15):
        await asyncio.sleep(0.02)
        assert [item async for item in controlclients._kicking(control, {"kick": "this"})] == [{"known": True}]
    assert not kicking.done()
    if stopped:
        assert await anext_all(controlclients._kicking(control, {"kick": "this", "stop": True}))
    await asyncio.wait_for(kicking, 2)
    assert 4 <= len(ended) < 50
    assert control.kicks == {}


async def anext_all(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def test_who_has_clients_kicked_slowly_hears_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controlclients, "HEARD", 0.01)
    clients = {
        name: SimpleNamespace(client_id=name, alive=True, end=lambda error: None, filters={}, shares=None)
        for name in ("one", "two")
    }
    control: Any = SimpleNamespace(account=serving(clients), kicks={})
    question = {"clients": ["one", "two"], "over": 1.0}
    said = [item async for item in controlclients._kick(control, question)]
    assert [item for item in said if not isinstance(item, Total)] == ["one", "two"]
    between = said[said.index("one") : said.index("two")]
    assert between.count(Total(2)) >= 3
