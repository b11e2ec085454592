# SPDX-License-Identifier: Apache-2.0
"""Answers of a gateway that are too large for NATS."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from mqtt_nats.codec import MqttError
from mqtt_nats.control import clients as controlclients
from mqtt_nats.control import server as controlserver
from mqtt_nats.control.selection import Total
from mqtt_nats.control.server import Control
from mqtt_streams.api import NoResponders
from tests.control.fakes import FakeControl, as_control
from tests.harness.generators import all_closed
from tests.harness.waiting import aeventually
from tests.sessions.fakes import FakeClient


@pytest.mark.parametrize(("size", "refused"), [(1000, False), (1001, True)])
def test_an_answer_that_nats_would_end_the_connection_over_is_not_sent(size: int, refused: bool) -> None:
    control = FakeControl()
    link = control.account.services.fake_link
    link.max_payload = 1000
    Control.tell(as_control(control), b"reply", b"x" * size)
    head, body, end = link.out[0].split(b"\r\n")
    assert head == b"PUB reply %d" % len(body)
    assert not end
    if refused:
        found = orjson.loads(body)
        assert (found["id"], found["more"], found["items"]) == ("gateway0", False, [])
        assert "1001 bytes" in found["error"]
    else:
        assert body == b"x" * size


async def test_an_answer_that_nats_server_does_not_take_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would have gone on with is closed at once."""
    fake = FakeControl()
    FakeClient(fake.account.services)

    async def stuck(timeout: float = 5.0) -> None:
        raise TimeoutError

    monkeypatch.setattr(fake.account.services.nats.link, "fence", stuck, raising=False)
    monkeypatch.setattr(fake, "_page", lambda *about: None, raising=False)
    with all_closed():
        await Control._respond(as_control(fake), b"reply", "kick", {"everybody": True})
    assert fake.kicks == {}


@pytest.mark.parametrize(
    ("failure", "text"), [(MqttError("no room\n for it"), "no room for it"), (NoResponders(), "NoResponders")]
)
async def test_what_has_failed_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, text: str
) -> None:
    """The name of the error, where it says nothing."""
    found: list[str] = []

    async def failing(control: Control, question: object) -> AsyncIterator[Any]:
        yield 1
        raise failure

    def page(reply: bytes, items: object, more: bool, total: object, error: str) -> None:
        found.append(error)

    fake = FakeControl()
    monkeypatch.setattr(controlserver, "ANSWERS", {"it": failing})
    monkeypatch.setattr(fake, "_page", page, raising=False)
    await Control._respond(as_control(fake), b"reply", "it", {})
    assert found == [text]


@pytest.mark.parametrize("stopped", [True, False])
async def test_clients_are_left_in_peace_when_nobody_wants_it_any_more(
    monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    """It is stopped, or nobody renews it; while somebody does, it goes on."""
    monkeypatch.setattr(controlclients, "PROGRESS_REPORT_S", 0.01)
    monkeypatch.setattr(controlclients, "KICK_RENEWAL_TIMEOUT", 1.0)
    fake = FakeControl()
    clients = [FakeClient(fake.account.services, f"c{number}") for number in range(100)]
    control = as_control(fake)
    question = {"everybody": True, "over": 20.0, "kick": "this"}
    kicking = asyncio.ensure_future(anext_all(controlclients._kick(control, question)))
    await aeventually(lambda: "this" in fake.kicks)
    begun = time.monotonic()
    while time.monotonic() - begun < 1.3 or ended(clients) < 4:
        await asyncio.sleep(0.02)
        assert [item async for item in controlclients._kicking(control, {"kick": "this"})] == [{"known": True}]
    assert not kicking.done()
    if stopped:
        assert await anext_all(controlclients._kicking(control, {"kick": "this", "stop": True}))
    await asyncio.wait_for(kicking, 10)
    assert 4 <= ended(clients) < 50
    assert control.kicks == {}


def ended(clients: list[FakeClient]) -> int:
    """How many have been disconnected."""
    return len([one for one in clients if one.fake_ended])


async def anext_all(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def test_who_has_clients_kicked_slowly_hears_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controlclients, "PROGRESS_REPORT_S", 0.01)
    control = FakeControl()
    for name in ("one", "two"):
        FakeClient(control.account.services, name)
    question = {"clients": ["one", "two"], "over": 2.0}
    said = [item async for item in controlclients._kick(as_control(control), question)]
    assert [item for item in said if not isinstance(item, Total)] == ["one", "two"]
    between = said[said.index("one") : said.index("two")]
    assert between.count(Total(2)) >= 3
