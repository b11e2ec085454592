# SPDX-License-Identifier: Apache-2.0
"""A member of a shared subscription whose session moves while it joins."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mqtt_nats.broker.client import Client
from mqtt_nats.broker.membership import Membership
from mqtt_streams.sessions import V5, PoisonedRecord, SessionRecord, SharedSubscription

TEXT = "$share/group/topic"
WANTED = SharedSubscription(1, False, None, 1)


class Inbox:
    """Where answers of JetStream arrive."""

    prefix = b"_INBOX.x."

    def __init__(self) -> None:
        self.count = 0

    def token(self) -> bytes:
        self.count += 1
        return b"%d" % self.count


class Groups:
    """Notes what is asked of the store of groups."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    async def join(self, *_: object) -> int:
        return 7

    async def ensure_consumer(self, *_: object) -> None:
        pass

    async def leave(self, _group: str, _client_hash: str, note: int) -> None:
        self.calls.append(("leave", note))


class Sessions:
    """Has one record, or none that can be read."""

    def __init__(self, record: SessionRecord | None, sequence: int = 3, poisoned: bool = False) -> None:
        self.record = record
        self.sequence = sequence
        self.poisoned = poisoned

    async def load(self, *_: object) -> tuple[SessionRecord, int] | None:
        if self.poisoned:
            raise PoisonedRecord("no JSON")
        return None if self.record is None else (self.record, self.sequence)


def record(nonce: str, shared: bool) -> SessionRecord:
    return SessionRecord("client", v5=V5(nonce=nonce, shared={TEXT: WANTED} if shared else {}))


CASES: dict[str, tuple[Sessions, list[tuple[object, ...]]]] = {
    "its own": (Sessions(record("mine", True), 2), [("begin",)]),
    "its own, written and not yet confirmed": (Sessions(record("mine", True)), [("begin",)]),
    "its own, being written": (Sessions(record("before", True), 2), [("begin",)]),
    "continued by another connection": (Sessions(record("other", True)), []),
    "begun anew by another connection": (Sessions(record("other", False)), [("leave", 7)]),
    "ended": (Sessions(None), [("leave", 7)]),
    "of nats-server's listener": (Sessions(SessionRecord("client")), [("leave", 7)]),
    "cannot be read": (Sessions(None, poisoned=True), [("leave", 7)]),
}


@pytest.mark.parametrize("case", CASES)
async def test_joining(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left behind would keep the group's consumer for ever."""
    sessions, expected = CASES[case]
    groups = Groups()
    settings = SimpleNamespace(max_topic_levels=128)
    broker: Any = SimpleNamespace(groups=groups, sessions=sessions, settings=settings, shared=None, inbox=Inbox())
    client: Any = SimpleNamespace(
        broker=broker, version=5, hash="hash", client_id="client", expiry=60, epoch=2, record=record("mine", True)
    )
    member = Membership(cast(Client, client), TEXT, WANTED)
    monkeypatch.setattr(Membership, "begin", lambda self: groups.calls.append(("begin",)))
    await member.enter()
    assert groups.calls == expected


@pytest.mark.parametrize("standing", [False, True])
async def test_what_comes_while_the_gateway_finds_out_what_it_has_missed(
    standing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been given to another member meanwhile: it goes back."""
    taken: list[int] = []
    out: list[bytes] = []
    broker: Any = SimpleNamespace(
        settings=SimpleNamespace(max_topic_levels=128),
        shared=None,
        standing=standing,
        link=SimpleNamespace(out=out, kick=lambda: None),
        stored_message=lambda *_: None,
        inbox=SimpleNamespace(api_prefix="$JS.API", prefix=b"_INBOX.x.", token=lambda: b"1"),
        clock=SimpleNamespace(now=1.0),
    )
    client: Any = SimpleNamespace(broker=broker, version=5, alive=True, durable_side=None)
    client.outlet = SimpleNamespace(clogged=False)
    client.regular_side = SimpleNamespace(room=1)
    member = Membership(cast(Client, client), TEXT, WANTED)
    member.inbox = b"1"
    monkeypatch.setattr(Membership, "_take", lambda self, message, number, qos, reply: taken.append(number))
    reply = b"$JS.ACK.$MQTT_msgs.share_x.1.5.5.1700000000000000000.0"
    member._arrived(b"$MQTT.msgs.topic", reply, b"NATS/1.0\r\nNmqtt-Pub:1\r\n\r\n", b"x")
    assert taken == ([] if standing else [5])
    assert (b"PUB %b 4\r\n-NAK\r\n" % reply in out) is standing


def test_an_address_is_never_that_of_another_member_before() -> None:
    """What a member asked for before it left would arrive at a client that may be allowed something else."""
    settings = SimpleNamespace(max_topic_levels=128)
    client: Any = SimpleNamespace(broker=SimpleNamespace(settings=settings, shared=None, inbox=Inbox()), version=5)
    addresses = [Membership(cast(Client, client), TEXT, WANTED).address for _ in range(100)]
    assert len(set(addresses)) == 100
