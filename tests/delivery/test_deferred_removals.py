# SPDX-License-Identifier: Apache-2.0
"""When records of what is complete may go."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from mqtt_nats.backbone.pending_stores import STALE, IgnoredStore, PendingStore
from mqtt_nats.delivery import deferred_removals as lingering
from mqtt_nats.delivery.deferred_removals import DeferredRemovals
from mqtt_nats.protocol.ack_tokens import assigned
from mqtt_nats.sessions.services import Services
from mqtt_streams.api import JetStream, RequestTimeout
from mqtt_streams.consumers import ConsumerInfo
from mqtt_streams.stored import StoredMessage
from tests.harness.doubles import Timers, stands_for
from tests.harness.waiting import aeventually
from tests.sessions.fakes import FakeServices, as_services


class Bench:
    """Records of one session, a clock, and what has gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timers = Timers(monkeypatch)
        self.pass_to = self.timers.pass_to
        monkeypatch.setattr(lingering, "REMOVAL_DELAY_S", 10.0)
        monkeypatch.setattr(lingering, "AFTER_RELINK_S", 100.0)
        self.services = services = FakeServices()
        self.link, self.gone = services.fake_link, services.fake_dropped
        self.kept = DeferredRemovals(as_services(services))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_nothing_goes_while_a_server_may_send_again_what_it_forgot(bench: Bench) -> None:
    """NATS is away, then it is back for a moment, then for long enough."""
    bench.kept.add(b"=1", IgnoredStore())
    bench.link.online = False
    bench.pass_to(50)
    bench.link.online, bench.services.nats.relinked = True, 50.0
    bench.kept.add(b"&reply", IgnoredStore())
    bench.pass_to(149)
    assert not bench.gone
    assert not bench.link.out
    bench.pass_to(161)
    assert bench.gone == [b"1"]
    assert bench.link.out == [b"PUB reply 0\r\n\r\n"]
    bench.kept.add(b"=2", IgnoredStore())
    bench.pass_to(172)
    assert bench.gone == [b"1", b"2"]


def test_records_outlive_their_connection(bench: Bench) -> None:
    """A nats-server that is killed forgets acknowledgements, and the gateway may be killed with it."""
    bench.kept.add(b"=1", IgnoredStore())
    bench.kept.add(b"&reply", IgnoredStore())
    bench.kept.connection_ended()
    bench.pass_to(9)
    assert (bench.gone, bench.link.out) == ([], [])
    bench.pass_to(11)
    assert bench.gone == [b"1"], "the PUBREL of an assignment is owed, as its record says"
    assert bench.link.out == [b"PUB reply 0\r\n\r\n"]


@pytest.mark.parametrize("when", ["before the end", "after the end", "away"])
def test_the_next_owner_finds_what_a_server_may_send_again(bench: Bench, when: str) -> None:
    """NATS comes back before the connection ends, or afterwards, or not until then."""
    bench.kept.add(b"=1", IgnoredStore())
    bench.kept.add(b"&reply", IgnoredStore())
    bench.link.online = when != "away"
    if when == "before the end":
        bench.services.nats.relinked = 0.0
    bench.pass_to(5)
    bench.kept.connection_ended()
    if when == "after the end":
        bench.services.nats.relinked = 6.0
    bench.link.online = True
    bench.pass_to(1000)
    assert (bench.gone, bench.link.out) == ([b"1"], [])


def test_what_is_complete_after_the_end_is_left_to_the_next_owner(bench: Bench) -> None:
    """It may have read the record already."""
    bench.kept.connection_ended()
    bench.kept.add(b"&reply", IgnoredStore())
    bench.pass_to(1000)
    assert bench.link.out == []


STAMP_NS = 2_000_000_000_000_000_000
ACK = b"$JS.ACK.$MQTT_msgs.share_group.1.5.9.%d.0" % STAMP_NS


def info(delivered: int, redelivered: int = 0) -> ConsumerInfo:
    """A group's consumer that has delivered up to a sequence."""
    return ConsumerInfo({}, False, delivered, 0, 1, 0, redelivered)


def stored_at(time_ns: int) -> StoredMessage:
    """The group's message, stored at a time in nanoseconds since 1970."""
    return StoredMessage("$MQTT.msgs.a", 5, time_ns, b"", b"")


@stands_for(Services)
class FakeGroupServices(FakeServices):
    """Stands for `Services`: which assignments are removed, and for whom."""

    def __init__(self) -> None:
        super().__init__()
        self.fake_removals: list[tuple[bytes, PendingStore]] = []

    def drop_assignment(self, record: bytes, operation: PendingStore) -> None:
        self.fake_removals.append((record, operation))


class Group:
    """One session's assignments, and a group's consumer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.info: ConsumerInfo | Exception | None = info(5)
        self.found: StoredMessage | None = stored_at(STAMP_NS)
        self.services = FakeGroupServices()
        self.removals = self.services.fake_removals
        self.services.fake_store.fake_answers = True
        self.services.nats.linked = 0.0
        self.tasks = self.services.tasks.fake_spawned
        monkeypatch.setattr(lingering, "REMOVAL_DELAY_S", 0.01)
        monkeypatch.setattr(lingering, "GROUP_CONSUMER_CHECK_S", 0.01)
        monkeypatch.setattr(lingering, "AFTER_RELINK_S", 0.0)
        monkeypatch.setattr(lingering, "consumer_info", self._info)
        monkeypatch.setattr(lingering, "get_sequence", self._found)
        self.looks = 0
        self.kept = DeferredRemovals(as_services(self.services))

    @property
    def acknowledged(self) -> list[bytes]:
        """Reply subjects of the messages that were acknowledged."""
        return [subject for subject, _, _ in self.services.fake_store.fake_called]

    async def _info(self, js: JetStream, stream: str, name: str) -> ConsumerInfo | None:
        assert (stream, name) == ("$MQTT_msgs", "share_group")
        self.looks += 1
        if isinstance(self.info, Exception):
            raise self.info
        return self.info

    async def _found(self, js: JetStream, stream: str, seq: int) -> StoredMessage | None:
        assert (stream, seq) == ("$MQTT_msgs", 5)
        return self.found

    async def removed(self, *records: bytes) -> None:
        """Wait until these are the records that were removed."""
        await aeventually(lambda: [record for record, _ in self.removals] == list(records))


@pytest.fixture
async def group(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Group]:
    group = Group(monkeypatch)
    yield group
    group.kept.connection_ended()
    for task in group.tasks:
        task.cancel()
    await asyncio.gather(*group.tasks, return_exceptions=True)


async def test_what_this_connection_has_acknowledged_goes_without_a_look(group: Group) -> None:
    group.kept.add(assigned(7, ACK, 1.0), IgnoredStore())
    await group.removed(b"7")
    assert (group.looks, group.acknowledged) == (0, [])


async def test_what_another_gateway_has_assigned_is_acknowledged_first(group: Group) -> None:
    group.kept.add(assigned(7, ACK, 0.0), IgnoredStore())
    await group.removed(b"7")
    assert group.acknowledged == [ACK]


@pytest.mark.parametrize("why", ["delivered again", "delivered before", "a new connection to NATS"])
async def test_what_another_member_may_have_on_its_way_stays(
    group: Group, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Where a nats-server may have been killed, the message may be delivered again as if for the first time."""
    monkeypatch.setattr(lingering, "REDELIVERY_CLAIM_S", 0.2)
    loop = asyncio.get_running_loop()
    began = loop.time()
    ack, confirmed = ACK, 0.0
    if why == "delivered again":
        group.info = info(5, 1)
    elif why == "delivered before":
        ack = ACK.replace(b".share_group.1.", b".share_group.2.")
    else:
        group.services.nats.relinked, group.services.nats.linked, confirmed = 2.0, STAMP_NS / 1e9, 1.0
    group.kept.add(assigned(7, ack, confirmed), IgnoredStore())
    await group.removed(b"7")
    assert group.acknowledged == [ack]
    assert loop.time() > began + 0.2


async def test_what_is_yet_to_be_delivered_again_stays(group: Group) -> None:
    """The acknowledgement of a message that the consumer has not delivered has no effect."""
    group.info = info(4)
    group.kept.add(assigned(7, ACK, 0.0), IgnoredStore())
    await aeventually(lambda: group.looks > 3)
    group.info = RequestTimeout("no leader")
    looks = group.looks
    await aeventually(lambda: group.looks > looks + 3)
    assert (group.acknowledged, group.removals) == ([], [])
    group.info = info(5)
    await group.removed(b"7")
    assert group.acknowledged == [ACK]


@pytest.mark.parametrize("gone", ["consumer", "message", "stream"])
async def test_what_nobody_delivers_goes(group: Group, gone: str) -> None:
    """A message of the same sequence may be another one: it is not acknowledged."""
    if gone == "consumer":
        group.info = None
    else:
        group.found = None if gone == "message" else stored_at(STAMP_NS + 1)
    group.kept.add(assigned(7, ACK, 0.0), IgnoredStore())
    await group.removed(b"7")
    assert group.acknowledged == []


async def test_a_record_of_an_older_gateway_outlives_the_next_delivery(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not say how the message is acknowledged."""
    assert lingering.NO_SUBJECT_CLAIM_S > 45
    monkeypatch.setattr(lingering, "NO_SUBJECT_CLAIM_S", 0.2)
    loop = asyncio.get_running_loop()
    began = loop.time()
    group.kept.add(assigned(7, b"", 0.0), IgnoredStore())
    await group.removed(b"7")
    assert loop.time() > began + 0.2
    assert (group.looks, group.acknowledged) == (0, [])


async def test_a_removal_is_not_repeated_after_nats_was_away(group: Group) -> None:
    """A nats-server that was killed meanwhile has forgotten what was acknowledged."""
    group.kept.add(assigned(7, ACK, 1.0), IgnoredStore())
    await group.removed(b"7")
    (_, removal), *_ = group.removals
    assert removal.stale()
    removal.failed(STALE)
    await group.removed(b"7", b"7")
    assert group.acknowledged == [ACK]


async def test_what_is_in_doubt_goes_also_after_the_end_of_the_connection(group: Group) -> None:
    """A client whose connections are short would gather more and more of it."""
    group.info = info(4)
    group.kept.add(assigned(7, ACK, 0.0), IgnoredStore())
    await aeventually(lambda: group.looks > 1)
    group.kept.connection_ended()
    group.info = info(5)
    await group.removed(b"7")
    await aeventually(lambda: all(task.done() for task in group.tasks))
