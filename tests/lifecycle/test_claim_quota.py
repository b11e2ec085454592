# SPDX-License-Identifier: Apache-2.0
"""The place in its quota that a claim of a new session holds: one at a time, and none when the claim has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from mqtt_nats.backbone.acked_publisher import AckedPublisher
from mqtt_nats.base import server_clock as natstime
from mqtt_nats.base.networks import household
from mqtt_nats.client.client import Client
from mqtt_nats.codec import MqttError, NotAuthorized, QuotaExceeded, ReasonCode
from mqtt_nats.config.settings import Settings
from mqtt_nats.lifecycle import claim as module
from mqtt_nats.sessions.quotas import Quotas
from mqtt_nats.sessions.services import Services
from mqtt_streams.api import RequestTimeout
from mqtt_streams.hashing import name_hash, second_key
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.quotas import QuotaStore, note_subject, quota_of
from mqtt_streams.sessions import PREFIX, V5, SessionRecord
from tests.harness.doubles import stands_for
from tests.harness.waiting import aeventually
from tests.lifecycle.test_claim_session import FakeClaimant, FakeClaimQuotas, FakeClaimServices, claim
from tests.sessions.fakes import FakeSettings

pytestmark = pytest.mark.sources

KEY = name_hash("client")
RECORD = f"{PREFIX}{KEY}"
QUOTA = quota_of("", household("192.0.2.1"))
NOTE = b"HPUB %b " % note_subject(QUOTA, KEY).encode()
ROOM = 3
"""Most sessions of the address."""

CONSUMER = subscription_consumer(KEY, "a", name_nuid="n1", deliver_nuid="n2", max_ack_pending=10, start_seq=1)


@stands_for(Settings)
class FakeClaimSettings(FakeSettings):
    """Stands for `Settings`: what becomes of a client whose session belongs to another user."""

    session_of_other_user = "separate"


@stands_for(Services)
class FakeCountingServices(FakeClaimServices):
    """Stands for `Services`, with quotas that count."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: FakeClaimSettings = FakeClaimSettings()
        store = cast(AckedPublisher, self.fake_store)
        notes = QuotaStore(self.fake_inbox)
        self.fake_quotas = Quotas(Settings(max_sessions=ROOM), notes, self.streams.sessions, store, lambda limit: None)
        self.quotas = cast(FakeClaimQuotas, self.fake_quotas)

    async def fake_room(self) -> int:
        """How many more sessions of the address may begin."""
        claims = [object() for _ in range(ROOM)]
        found = 0
        for number, one in enumerate(claims):
            try:
                await self.fake_quotas.admit(one, name_hash(f"other {number}"), QUOTA, "")
            except QuotaExceeded:
                break
            found += 1
        for one in claims:
            self.fake_quotas.give_back(one)
        return found

    def fake_at_store(self, *happens: Callable[[], object]) -> None:
        """Have something happen just before each of the first writes of the record at the first key."""
        left = list(happens)

        def before(subject: str) -> None:
            if subject == RECORD and left:
                left.pop(0)()

        self.fake_inbox.before = before

    def fake_put_record(self, v5: V5, *, consumer: bool = False, owner: str = "another0") -> None:
        """Store the record of another connection."""
        cons = {"a": CONSUMER} if consumer else {}
        inbox, record = self.fake_inbox, SessionRecord("client", owner, cons=cons, v5=v5, key=KEY)
        inbox.messages["$MQTT_sess"] = [one for one in inbox.messages["$MQTT_sess"] if one.subject != RECORD]
        inbox.put(RECORD, record.encode())


@stands_for(Client)
class FakeMovingClaimant(FakeClaimant):
    """Stands for `Client`, whose session may get its second key."""

    def keep_at(self, key: str) -> None:
        self.hash = key


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outcome of a claim is known soon."""
    monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.001)
    monkeypatch.setattr(module, "RECORD_STORED_MOST_S", 0.01)


def of_bob() -> V5:
    return V5(user="bob", quota=quota_of("bob", ""))


def silent() -> None:
    raise RequestTimeout("nobody answers")


async def test_a_new_session_counts_once() -> None:
    services = FakeCountingServices()
    await claim(FakeClaimant(services))
    assert [target for target, *_ in services.fake_store.fake_put] == [NOTE]
    assert await services.fake_room() == ROOM - 1


async def test_a_session_that_gets_its_second_key() -> None:
    """Another user's client takes the first key while the claim is under way."""
    services = FakeCountingServices()
    services.fake_at_store(lambda: services.fake_put_record(of_bob()))
    client = FakeMovingClaimant(services)
    await claim(client)
    assert client.hash == second_key("client", "")
    assert await services.fake_room() == ROOM - 1


async def test_consumers_that_a_claim_at_the_first_key_has_found() -> None:
    """They are not this gateway's when the session turns out to have its second key."""
    services = FakeCountingServices()
    services.fake_put_record(V5(user="", quota=QUOTA), consumer=True)
    services.fake_at_store(lambda: services.fake_put_record(of_bob()))
    client = FakeMovingClaimant(services)
    await claim(client)
    assert client.hash == second_key("client", "")
    assert services.fake_quotas.consumers == 0


async def test_a_session_that_another_connection_begins_meanwhile() -> None:
    services = FakeCountingServices()
    services.fake_at_store(lambda: services.fake_put_record(V5(user="", quota=QUOTA)))
    present, _ = await claim(FakeClaimant(services))
    assert present
    assert await services.fake_room() == ROOM


async def test_a_claim_that_is_refused_after_a_conflict() -> None:
    services = FakeCountingServices()
    services.settings.session_of_other_user = "refuse"
    services.fake_at_store(lambda: services.fake_put_record(of_bob()))
    with pytest.raises(NotAuthorized):
        await claim(FakeClaimant(services))
    assert await services.fake_room() == ROOM


async def test_a_claim_that_cannot_look_after_a_conflict() -> None:
    services = FakeCountingServices()

    def conflict() -> None:
        services.fake_put_record(of_bob())
        services.fake_inbox.before = lambda subject: silent()

    services.fake_at_store(conflict)
    with pytest.raises(RequestTimeout):
        await claim(FakeClaimant(services))
    services.fake_at_store()
    assert await services.fake_room() == ROOM


async def test_a_claim_that_fails_beside_a_later_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has given up the first connection, and lives with a session that counts for nobody."""
    services = FakeCountingServices()
    first, later = FakeClaimant(services), FakeClaimant(services)
    go_on, admit = asyncio.Event(), services.fake_quotas.admit

    async def held(claim: object, key: str, quota: str, who: str, crowded: Callable[[], None]) -> None:
        await go_on.wait()
        await admit(claim, key, quota, who, crowded)

    with monkeypatch.context() as patched:
        patched.setattr(services.fake_quotas, "admit", held)
        waiting = asyncio.create_task(claim(first))
        await aeventually(lambda: bool(services.fake_inbox.asked))
        later.expiry = 0
        await claim(later, clean=True)
        first.connection.hung_up, first.connection.silence = True, natstime.now()
        go_on.set()
        with pytest.raises(MqttError):
            await waiting
    assert (services.registry.clients, later.fake_ended) == ({"client": later}, [])
    assert await services.fake_room() == ROOM


@pytest.mark.parametrize("closed", [True, False], ids=["ended", "being ended"])
async def test_a_connection_that_has_ended_takes_nothing_over(closed: bool) -> None:
    """Nobody is served by it; the client's other connection may be alive."""
    services = FakeCountingServices()
    living, ended = FakeClaimant(services), FakeClaimant(services)
    living.expiry = 0
    await claim(living, clean=True)

    def ends(subject: str) -> None:
        ended.alive = not closed
        ended.why = MqttError("no answer in time", ReasonCode.SERVER_UNAVAILABLE)

    services.fake_inbox.before = ends
    with pytest.raises(MqttError):
        await claim(ended)
    assert (services.registry.clients, living.fake_ended, ended.epoch) == ({"client": living}, [], 0)
    assert await services.fake_room() == ROOM


async def test_a_claim_that_may_be_stored_counts_until_that_is_known() -> None:
    services = FakeCountingServices()
    services.fake_at_store(silent, silent)
    with pytest.raises(RequestTimeout):
        await claim(FakeClaimant(services))
    assert await services.fake_room() == ROOM - 1
    await services.tasks.fake_settle()
    assert await services.fake_room() == ROOM
    assert services.fake_store.fake_put == []


async def test_a_claim_that_was_stored_although_its_client_was_refused() -> None:
    """It goes on to count, and has a note."""
    services = FakeCountingServices()
    client = FakeClaimant(services)

    def stored(subject: str) -> None:
        if subject == RECORD:
            services.fake_inbox.before = lambda subject: silent()
            silent()

    services.fake_inbox.after = stored
    with pytest.raises(RequestTimeout):
        await claim(client)
    services.fake_at_store()
    await services.tasks.fake_settle()
    assert client.epoch
    assert NOTE in [target for target, *_ in services.fake_store.fake_put]
    assert await services.fake_room() == ROOM - 1


async def test_a_claim_that_is_cancelled() -> None:
    """Its write has been sent, and may be stored."""
    services = FakeCountingServices()
    assert await services.fake_room() == ROOM
    task = asyncio.create_task(claim(FakeClaimant(services)))

    def cancel(subject: str) -> None:
        task.cancel()  # the next wait is the one for the store

    services.fake_inbox.before = cancel
    with pytest.raises(asyncio.CancelledError):
        await task
    services.fake_at_store()
    assert RECORD in services.fake_inbox.asked
    (look,) = services.tasks.fake_spawned
    assert look.get_name() == "claim of client"
    assert await services.fake_room() == ROOM - 1
    await services.tasks.fake_settle()
    assert await services.fake_room() == ROOM
