# SPDX-License-Identifier: Apache-2.0
"""The claim of a session: which record is written, whose connection ends, and what follows from a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from mqtt_nats.backbone.retry import TimedPermit
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.client.client import Client
from mqtt_nats.codec import Connect, MqttError, ReasonCode
from mqtt_nats.delivery.receiver import DeliveryServices, SharedFeed
from mqtt_nats.hooks.registry import Hooks
from mqtt_nats.lifecycle.claim import announce_claim, claim_session
from mqtt_nats.lifecycle.lease import Lease
from mqtt_nats.lifecycle.will import Wills
from mqtt_nats.sessions.quotas import Quotas
from mqtt_nats.sessions.services import Services
from mqtt_nats.sessions.session import Session
from mqtt_nats.sessions.takeover import Claims
from mqtt_nats.transport.connection import Connection
from mqtt_streams.api import ApiError
from mqtt_streams.hashing import name_hash
from mqtt_streams.sessions import PREFIX, SessionRecord
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeClient, FakeQuotas, FakeServices, as_client, v5_of

pytestmark = pytest.mark.sources

KEY = name_hash("client")


@stands_for(Quotas)
class FakeClaimQuotas(FakeQuotas):
    """Stands for `Quotas`: notes which sessions it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.fake_admitted: list[str] = []
        self.fake_claimed: list[str] = []

    async def admit(self, claim: object, key: str, quota: str, who: str, crowded: Callable[[], None]) -> None:
        self.fake_admitted.append(who)

    def note_claim(self, record: SessionRecord) -> None:
        self.fake_claimed.append(record.client_id)


@stands_for(Services)
class FakeClaimServices(FakeServices):
    """Stands for `Services`, with hooks and quotas."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks = Hooks(lambda work, name: None)
        self.quotas: FakeClaimQuotas = FakeClaimQuotas()
        self.fake_claims = Claims(self.nats, self.streams.sessions, "", self.identity.id)
        self.fake_claims.second_keys = False


@stands_for(Wills)
class FakeWills:
    """Stands for `Wills`: the claims."""

    def __init__(self, services: FakeClaimServices) -> None:
        self.claims = services.fake_claims


@stands_for(Lease)
class FakeLease:
    """Stands for `Lease`: one that lasts, or is renewed when a client asks."""

    def __init__(self, services: FakeServices, *, lasts: bool, full: bool = False) -> None:
        self._services = services
        self._lasts = lasts
        self.full = full
        self.fake_asked_before: list[str] | None = None
        """Requests to JetStream before the client asked."""

    def lasts(self) -> bool:
        return self._lasts

    async def confirmed(self, client: Session) -> None:
        self.fake_asked_before = self._services.fake_inbox.asked.copy()


@stands_for(Connection)
class FakeClaimConnection:
    """Stands for `Connection`: an address, and whether the client has closed it."""

    def __init__(self) -> None:
        self.host = "192.0.2.1"
        self.number = 1
        self.hung_up = False
        self.silence = 0.0


@stands_for(DeliveryServices)
class FakeClaimDelivery:
    """Stands for `DeliveryServices`, without a shared reader."""

    def __init__(self) -> None:
        self.feed = SharedFeed()


@stands_for(Client)
class FakeClaimant(FakeClient):
    """Stands for `Client`: an anonymous one whose session does not expire, and is not claimed yet."""

    def __init__(self, services: FakeClaimServices) -> None:
        known = dict(services.registry.clients)
        super().__init__(services)
        services.registry.clients = known
        self.record = None
        self.expiry = None
        self.user: str | None = None
        self.foreign = 0
        self.unserved = self.ended_by_client = False
        self.connection = FakeClaimConnection()
        self.delivery = FakeClaimDelivery()
        self.fake_begun: list[tuple[int, bool]] = []
        """Arguments of each call of `begin_durable`: `former` and `continued`."""

    def begin_durable(self, record: SessionRecord, former: int, *, continued: bool) -> None:
        self.record, self.durable = record, True
        self.fake_begun.append((former, continued))

    def begin_regular(self, record: SessionRecord) -> None:
        self.record, self.durable = record, False

    def give_up(self) -> None:
        self.taken = True


async def claim(
    client: FakeClaimant, *, clean: bool = False, lasts: bool = True, full: bool = False
) -> tuple[bool, FakeLease]:
    """Announce and claim the session for a CONNECT without a will; returns Session Present and the lease."""
    services = cast(FakeClaimServices, client.services)
    lease = FakeLease(services, lasts=lasts, full=full)
    connect = Connect(5, "client", clean, 60)
    await announce_claim(as_client(client), connect, services.fake_claims, cast(Lease, lease))
    wills, place = cast(Wills, FakeWills(services)), TimedPermit(asyncio.Semaphore())
    return await claim_session(as_client(client), connect, wills, cast(Lease, lease), place), lease


async def test_a_new_session() -> None:
    services = FakeClaimServices()
    client = FakeClaimant(services)
    present, lease = await claim(client)
    assert (present, client.epoch, client.fake_begun) == (False, 1, [(0, False)])
    assert services.registry.clients == {"client": client}
    assert (services.quotas.fake_admitted, services.quotas.fake_claimed) == (["anonymous clients of 192.0.2.1"], [])
    found = await services.streams.sessions.load(KEY, "client")
    assert found is not None
    assert (found[1], v5_of(client).owner, lease.fake_asked_before) == (1, services.identity.id, None)


@pytest.mark.parametrize("clean", [False, True])
async def test_a_session_that_is_resumed_or_begun_anew(clean: bool) -> None:
    services = FakeClaimServices()
    former, client = FakeClaimant(services), FakeClaimant(services)
    await claim(former)
    present, _ = await claim(client, clean=clean)
    assert (present, client.epoch >= 2, client.fake_begun) == (not clean, True, [(0, not clean)])
    assert (v5_of(client).former, v5_of(client).draining) == (1, [])
    assert (former.fake_ended, client.fake_ended) == (["taken over"], [])
    assert services.quotas.fake_claimed == ["client"], "it needs no room in its quota"


async def test_a_session_that_ends_with_its_connection_is_written_without_a_look() -> None:
    services = FakeClaimServices()
    client = FakeClaimant(services)
    client.expiry = 0
    present, _ = await claim(client, clean=True)
    assert (present, client.durable, client.epoch, services.quotas.fake_admitted) == (False, False, 1, [])
    assert services.fake_inbox.asked[0].startswith(PREFIX)


async def test_another_connection_claims_it_at_the_same_time() -> None:
    """The record is read again, and the next attempt follows that record."""
    services = FakeClaimServices()
    inbox = services.fake_inbox
    await claim(FakeClaimant(services))
    others = [inbox.messages["$MQTT_sess"][-1].payload]

    def claims(subject: str) -> None:
        if others and subject.startswith(PREFIX):
            inbox.put(subject, others.pop())

    inbox.before = claims
    client = FakeClaimant(services)
    present, _ = await claim(client)
    assert (present, client.epoch, v5_of(client).former) == (True, 3, 2)


async def test_nothing_is_claimed_before_the_lease_lasts() -> None:
    services = FakeClaimServices()
    _, lease = await claim(FakeClaimant(services), lasts=False)
    assert lease.fake_asked_before == []


@pytest.mark.parametrize("lasts", [True, False])
async def test_a_clean_session_without_room_for_its_record(lasts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the lease is not renewed for want of room. The epoch is older than each record of the session."""
    begun: list[FakeClaimant] = []
    monkeypatch.setattr("mqtt_nats.lifecycle.claim.begin_unrecorded", begun.append)
    services = FakeClaimServices()
    former = FakeClaimant(services)
    former.expiry = 0
    await claim(former, clean=True)

    def refuse(subject: str) -> None:
        if subject.startswith("$MQTT.sess."):
            raise ApiError(503, 10023, "insufficient resources")

    services.fake_inbox.before = refuse
    client = FakeClaimant(services)
    client.expiry = 0
    present, lease = await claim(client, clean=True, lasts=lasts, full=not lasts)
    assert (present, client.epoch, lease.fake_asked_before) == (False, 1, None)
    assert [one.client_id for one in begun] == [client.client_id]
    assert services.registry.clients == {"client": client}
    assert former.fake_ended == ["taken over"]
    assert await services.streams.sessions.load(KEY, "client") is None
    assert b'"seq":2' in b"".join(services.fake_link.out)


async def test_a_durable_session_waits_for_the_lease_that_has_no_room() -> None:
    services = FakeClaimServices()
    _, lease = await claim(FakeClaimant(services), lasts=False, full=True)
    assert lease.fake_asked_before == []


async def test_a_client_that_may_have_its_session_elsewhere_claims_nothing() -> None:
    services = FakeClaimServices()
    services.identity.id = "another0"
    await claim(FakeClaimant(services))
    services.identity.id = "gateway0"
    client = FakeClaimant(services)
    client.connection.hung_up, client.connection.silence = True, natstime.now()
    with pytest.raises(MqttError):
        await claim(client)
    assert (client.epoch, len(services.fake_inbox.messages["$MQTT_sess"])) == (0, 1)


async def test_a_claim_that_was_overtaken_is_given_up() -> None:
    """Its outcome is looked at in the background: the session may be without a deadline."""
    services = FakeClaimServices()
    client = FakeClaimant(services)
    client.foreign = 99
    with pytest.raises(MqttError) as raised:
        await claim(client)
    assert (raised.value.reason, client.taken) == (ReasonCode.SESSION_TAKEN_OVER, True)
    (task,) = services.tasks.fake_spawned
    assert task.get_name() == "claim of client"
    task.cancel()
