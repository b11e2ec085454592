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
    broker: Any = SimpleNamespace(groups=groups, sessions=sessions, settings=settings, shared=None)
    client: Any = SimpleNamespace(
        broker=broker, version=5, hash="hash", client_id="client", expiry=60, epoch=2, record=record("mine", True)
    )
    member = Membership(cast(Client, client), TEXT, WANTED)
    monkeypatch.setattr(Membership, "begin", lambda self: groups.calls.append(("begin",)))
    await member.enter()
    assert groups.calls == expected
