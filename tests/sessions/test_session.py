# SPDX-License-Identifier: Apache-2.0
"""The notes of a session about its client, its owner and its connection."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from mqtt_nats.backbone.acked_publisher import AckedPublisher
from mqtt_nats.base.bucket import MemoryBudget
from mqtt_nats.config.settings import Settings
from mqtt_nats.messages.ids import MessageIds
from mqtt_nats.pubsub.data_path import Path
from mqtt_nats.sessions.services import Registry, Services
from mqtt_nats.sessions.session import Session, State
from mqtt_nats.transport.connection import Connection
from mqtt_nats.transport.turns import Clock
from mqtt_streams.hashing import name_hash, subject_token
from mqtt_streams.wills import StoredWill
from tests.harness.doubles import stands_for
from tests.pubsub.support import Bench
from tests.sessions.fakes import FakeLink, PlainSession, as_link
from tests.transport.slow_handlers import LIMITS

pytestmark = pytest.mark.sources


@stands_for(Services)
class FakePathServices:
    """Stands for `Services`: the message path, and the clients."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.registry: Registry[PlainSession] = Registry()


def made() -> Session:
    """A session of a client that has just connected."""
    bench = Bench()
    link = as_link(FakeLink())
    store = AckedPublisher(link, lambda full: None)
    ids, budget = MessageIds(1), MemoryBudget(1024, 1024)
    path = Path(link, store, bench.table, bench.fanout, bench.round, [0] * 3, [0] * 3, ids, budget)
    connection = Connection(LIMITS, bench.round, Settings(), Clock(0.0), lambda _: None)
    return PlainSession(connection, cast(Services, FakePathServices(path)))


async def test_a_new_session() -> None:
    session = made()
    assert (session.state, session.alive, session.durable) == (State.NEW, True, False)
    assert (session.epoch, session.foreign, session.taken, session.expiry) == (0, 0, False, 0)
    assert (session.record, session.shares, session.will, session.greeted) == (None, None, None, False)
    session.state = State.ENDED
    assert not session.alive


async def test_a_client_id_of_its_own_hash_and_one_of_another_key() -> None:
    session = made()
    session.name("client")
    assert (session.hash, session.token) == (name_hash("client"), subject_token("client"))
    session.keep_at("second")
    assert (session.hash, session.token) == ("second", "=second")


async def test_publishes_name_the_client_whose_own_messages_it_does_not_get() -> None:
    session = made()
    session.name("a client")
    session.name_in_publishes()
    assert (session.sender_header, session.marked) == (b"Nmqtt-Client:a%20client\r\n", False)
    session.mark()
    assert (session.sender_header, session.marked) == (b"Nmqtt-Client:a%20client\r\n", True)


async def test_claims_of_this_connection_and_of_others() -> None:
    session = made()
    session.claim(7)
    for sequence in (9, 8):  # answers may come in any order
        session.hear_claim(sequence)
    assert (session.epoch, session.foreign) == (7, 9)
    session.give_up()
    assert session.taken


async def test_the_connection() -> None:
    session = made()
    session.greet()
    session.hear_disconnect()
    session.expire_after(None)
    assert (session.greeted, session.sent_disconnect, session.expiry) == (True, True, None)


async def test_credentials_that_expire() -> None:
    session = made()
    timer = asyncio.get_running_loop().call_later(60, lambda: None)
    session.end_by(timer)
    assert session.expires is timer
    timer.cancel()


async def test_a_will_is_taken_once() -> None:
    session = made()
    will = StoredWill("gateway", "hash", 1, 7, 0, 1, False, "a", b"", b"")
    session.keep_will(will)
    assert session.take_will() is will
    assert session.take_will() is None


async def test_shared_subscriptions_are_made_once() -> None:
    session = made()
    shares = session.make_shares()
    assert session.make_shares() is shares is session.shares
    assert session.services.registry.sharing == {session}
