# SPDX-License-Identifier: Apache-2.0
"""Requests to all gateways: those before the start, those that are heard, and those that were missed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import orjson
import pytest

from mqtt_nats.backbone.connect import Phase
from mqtt_nats.gateway.desired_state import SUBJECTS, Fleet
from mqtt_nats.gateway.fleet_pause import FleetPause
from mqtt_nats.plugins.manager import Plugins
from mqtt_streams.api import RequestTimeout
from mqtt_streams.fleet import FleetStore, Wish, wish_subject
from mqtt_streams.gateway_subjects import RELOAD
from tests.conftest import Logged
from tests.harness.doubles import stands_for
from tests.harness.waiting import aeventually
from tests.sessions.fakes import FakeServices, as_services

MARK = "mark "
"""Beginning of the names of plugins by which a test sees that earlier requests are carried out."""


@stands_for(Plugins)
class FakePlugins:
    """Stands for `Plugins`: which ones are loaded, and the orders in their order."""

    def __init__(self, *loaded: str) -> None:
        self.fake_loaded = set(loaded)
        self.fake_orders: list[str] = []
        self.fake_wanted: Mapping[str, bool] | None = None

    async def start(self, wanted: Mapping[str, bool]) -> None:
        self.fake_wanted = wanted

    def has(self, name: str) -> bool:
        return name in self.fake_loaded

    async def fulfil(self, name: str, loaded: bool) -> None:
        if loaded == self.has(name):
            return
        if not name.startswith(MARK):
            self.fake_orders.append(f"{'load' if loaded else 'unload'} {name}")
        if loaded:
            self.fake_loaded.add(name)
        else:
            self.fake_loaded.discard(name)


class Gateway:
    """The desired state in one gateway."""

    def __init__(self, *loaded: str) -> None:
        self.services = FakeServices()
        self.plugins = FakePlugins(*loaded)
        self.reloads = self.marks = 0
        self.problems: list[str] = []
        self.pauses = 0
        self.pause = FleetPause(self.begin_pause)
        self.fleet = Fleet(as_services(self.services), cast("Plugins", self.plugins), self.reload, self.pause)

    def begin_pause(self) -> None:
        self.pauses += 1

    def reload(self) -> list[str]:
        self.reloads += 1
        return self.problems

    @property
    def store(self) -> FleetStore:
        return FleetStore(self.services.fake_inbox)

    def hear(self, wish: Wish) -> None:
        """A request arrives, before it is in the stream or while it cannot be read there."""
        body = {"kind": wish.kind, "id": wish.identity, "name": wish.name, "loaded": wish.loaded}
        self.bring(SUBJECTS, wish_subject(wish).encode(), orjson.dumps(body))

    def bring(self, pattern: bytes, subject: bytes, payload: bytes, reply: bytes = b"") -> None:
        (sid,) = (sid for sid, one in self.services.fake_link.fake_subjects.items() if one == pattern)
        self.services.fake_link.handlers[sid](subject, reply, b"", payload)

    def answers(self) -> list[Any]:
        frames = [one.split(b"\r\n") for one in self.services.fake_link.out]
        self.services.fake_link.out.clear()
        return [orjson.loads(body) for _, body, _ in frames]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.fleet.follow_wishes())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def settle(self) -> None:
        """Wait until the requests that are stored and heard are carried out: behind them another one is."""
        self.marks += 1
        name = f"{MARK}{self.marks}"
        self.hear(Wish("plugin", name, name, True))
        await aeventually(lambda: self.plugins.has(name))


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


async def test_plugins_are_loaded_as_earlier_requests_want(gateway: Gateway) -> None:
    await gateway.store.put(Wish("plugin", "1", "wanted", True))
    await gateway.store.put(Wish("plugin", "2", "unwanted", False))
    await gateway.store.put(Wish("reload", "3"))
    await gateway.fleet.begin()
    assert gateway.plugins.fake_wanted == {"wanted": True, "unwanted": False}
    async with gateway.running():
        await gateway.settle()
    assert gateway.plugins.fake_orders == []
    assert gateway.reloads == 0  # a gateway that has just started has read its files


async def test_a_gateway_starts_without_an_answer_and_carries_the_requests_out_later(
    gateway: Gateway, logged: Logged
) -> None:
    await gateway.store.put(Wish("plugin", "1", "wanted", True))

    def silent(subject: str) -> None:
        raise RequestTimeout

    gateway.services.fake_inbox.before = silent
    await gateway.fleet.begin()
    assert gateway.plugins.fake_wanted == {}
    assert any("cannot be read yet" in line for line in logged.messages)
    gateway.services.fake_inbox.before = lambda subject: None
    async with gateway.running():
        await gateway.settle()
    assert gateway.plugins.fake_orders == ["load wanted"]


async def test_a_request_is_carried_out_once(gateway: Gateway) -> None:
    """It is heard, and then it is in the stream for good."""
    wish = Wish("plugin", "1", "one", True)
    async with gateway.running():
        gateway.hear(wish)
        await gateway.settle()
        await gateway.store.put(wish)
        gateway.plugins.fake_loaded.clear()  # it has failed since
        await gateway.settle()
    assert gateway.plugins.fake_orders == ["load one"]


async def test_a_heard_request_goes_before_the_stored_one_of_the_same_plugin(gateway: Gateway) -> None:
    await gateway.store.put(Wish("plugin", "old", "one", True))
    async with gateway.running():
        gateway.hear(Wish("plugin", "new", "one", False))
        await gateway.settle()
    assert not gateway.plugins.has("one")


async def test_a_request_that_changes_nothing_gives_no_order(gateway: Gateway) -> None:
    gateway.plugins.fake_loaded.add("one")
    async with gateway.running():
        gateway.hear(Wish("plugin", "1", "one", True))
        gateway.hear(Wish("plugin", "2", "other", False))
        await gateway.settle()
    assert gateway.plugins.fake_orders == []


async def test_requests_that_were_missed_are_read_after_a_reconnect(gateway: Gateway) -> None:
    async with gateway.running():
        await gateway.settle()
        await gateway.store.put(Wish("plugin", "1", "missed", True))
        gateway.services.nats.reconnect.renew(Phase.REQUESTS)
        await aeventually(lambda: gateway.plugins.has("missed"))


async def test_without_jetstream_a_heard_request_is_carried_out(gateway: Gateway) -> None:
    def silent(subject: str) -> None:
        raise RequestTimeout

    gateway.services.fake_inbox.before = silent
    async with gateway.running():
        gateway.hear(Wish("plugin", "1", "one", True))
        await aeventually(lambda: gateway.plugins.has("one"))


async def test_what_is_no_request_is_ignored(gateway: Gateway) -> None:
    for payload in (b"", b"[]", b"{}", b'{"kind": "other", "id": "1"}', b'{"kind": "plugin", "id": "1", "loaded": 1}'):
        gateway.bring(SUBJECTS, SUBJECTS, payload)
    async with gateway.running():
        await gateway.settle()
    assert gateway.plugins.fake_orders == []


# -- reload, with an answer -------------------------------------------------------------------------------


def ask(gateway: Gateway, question: object, reply: bytes = b"_INBOX.me") -> list[Any]:
    gateway.bring(RELOAD, RELOAD, question if isinstance(question, bytes) else orjson.dumps(question), reply)
    return gateway.answers()


async def test_the_answer_to_a_reload_has_the_problems_of_the_files(gateway: Gateway) -> None:
    gateway.problems = ["acl.toml: line 3"]
    question = {"id": "1", "gateway": ""}
    assert ask(gateway, question) == [{"id": "gateway0", "problems": ["acl.toml: line 3"]}]
    gateway.problems = []
    assert ask(gateway, question) == [{"id": "gateway0", "problems": ["acl.toml: line 3"]}]  # the same request
    assert ask(gateway, {"id": "2", "gateway": "gateway0"}) == [{"id": "gateway0", "problems": []}]
    assert gateway.reloads == 2


async def test_a_reload_for_another_gateway_or_without_a_reply_subject_has_no_answer(gateway: Gateway) -> None:
    assert ask(gateway, {"id": "1", "gateway": "gateway1"}) == []
    assert gateway.reloads == 0
    assert ask(gateway, {"id": "2", "gateway": ""}, b"") == []
    assert gateway.reloads == 1


@pytest.mark.parametrize("question", [b"", b"{", [], {"id": "1"}, {"id": 1, "gateway": ""}, {"gateway": ""}])
async def test_a_reload_that_cannot_be_read_is_ignored(gateway: Gateway, question: object) -> None:
    assert ask(gateway, question) == []
    assert gateway.reloads == 0


async def test_a_request_that_was_asked_directly_is_not_carried_out_again_from_the_stream(gateway: Gateway) -> None:
    ask(gateway, {"id": "1", "gateway": ""})
    async with gateway.running():
        gateway.hear(Wish("reload", "1"))
        await gateway.settle()
    assert gateway.reloads == 1
    async with gateway.running():
        gateway.hear(Wish("reload", "2"))
        await gateway.settle()
    assert gateway.reloads == 2
