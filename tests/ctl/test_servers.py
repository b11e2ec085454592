# SPDX-License-Identifier: Apache-2.0
"""The nats-servers of a cluster, from their answers and from one advisory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.backbone.link import NatsConnection
from mqtt_nats.ctl.servers import ADVISORY, servers
from mqtt_streams.api import RequestTimeout
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeInbox, FakeLink, as_inbox

PATIENCE = 0.3


@stands_for(NatsConnection)
class FakeServerLink(FakeLink):
    """Stands for `NatsConnection`: connected to the server `one` of a cluster."""

    def __init__(self) -> None:
        super().__init__()
        self.server: dict[str, Any] = {
            "server_id": "ID1",
            "server_name": "one",
            "version": "2.12.0",
            "cluster": "core",
            "jetstream": True,
        }
        self.fake_replies: list[dict[str, Any]] = []

    async def fence(self, timeout: float = 5.0) -> None:
        """The server knows all subscriptions."""

    def kick(self) -> None:
        """Answer each request that was sent to all servers."""
        for frame in self.out:
            reply = frame.split(b" ")[2]
            for one in self.fake_replies:
                self.fake_bring(reply, orjson.dumps(one))
        self.out.clear()


@stands_for(RequestInbox)
class FakeServerInbox(FakeInbox):
    """Stands for `RequestInbox`: the leader of the meta group answers, and says so in an advisory."""

    def __init__(self) -> None:
        super().__init__()
        self.link = FakeServerLink()
        self.fake_leader: Callable[[], str | None] = lambda: "two"

    def _api(self, tokens: list[str], body: dict[str, Any]) -> dict[str, Any]:
        assert tokens == ["INFO"]
        leader = self.fake_leader()
        for subject, server in (("$JS.API.STREAM.INFO.other", "three"), ("$JS.API.INFO", leader)):
            if server is not None:
                self.link.fake_bring(ADVISORY, orjson.dumps({"subject": subject, "server": server}))
        return {}


def reply(number: int, name: str, total: int | None) -> dict[str, Any]:
    server = {"id": f"ID{number}", "name": name, "ver": "2.12.1", "cluster": "core", "jetstream": True}
    return {"server": server} | ({} if total is None else {"data": {"total": total}})


@pytest.fixture
def inbox() -> FakeServerInbox:
    return FakeServerInbox()


async def found(inbox: FakeServerInbox) -> dict[str, dict[str, Any]]:
    rows = await servers(as_inbox(inbox), PATIENCE)
    assert [one["name"] for one in rows] == sorted(one["name"] for one in rows)
    return {one["name"]: one for one in rows}


async def test_each_server_that_answers_is_there_once(inbox: FakeServerInbox) -> None:
    inbox.link.fake_replies = [reply(3, "three", 7), reply(1, "one", 5), reply(2, "two", None)]
    rows = await found(inbox)
    assert {name: row["connections"] for name, row in rows.items()} == {"one": 5, "three": 7, "two": 0}
    assert [name for name, row in rows.items() if row["connected"]] == ["one"]
    assert [name for name, row in rows.items() if row["leader"]] == ["two"]
    assert rows["one"]["version"] == "2.12.1"  # as the server says now, not when it was connected to


async def test_without_the_permission_to_ask_all_servers_the_own_one_is_there(inbox: FakeServerInbox) -> None:
    assert await found(inbox) == {
        "one": {
            "name": "one",
            "version": "2.12.0",
            "cluster": "core",
            "jetstream": True,
            "connections": None,
            "leader": False,
            "connected": True,
        }
    }


async def test_the_leader_is_asked_again_when_its_advisory_is_lost(inbox: FakeServerInbox) -> None:
    answers = [None, "one"]
    inbox.fake_leader = lambda: answers.pop(0)
    assert (await found(inbox))["one"]["leader"]
    assert answers == []


@pytest.mark.parametrize("silent", [False, True])
async def test_without_a_leader_nobody_leads_and_nothing_stays_subscribed(inbox: FakeServerInbox, silent: bool) -> None:
    inbox.fake_leader = lambda: None
    if silent:

        def before(subject: str) -> None:
            raise RequestTimeout

        inbox.before = before
    inbox.link.fake_replies = [reply(2, "two", 1)]
    assert not any(row["leader"] for row in (await found(inbox)).values())
    assert inbox.link.handlers == {}
