# SPDX-License-Identifier: Apache-2.0
"""Packet identifiers that are allocated to messages whose own one is in use, from the first one to the last."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mqtt_nats.codec import ack_bytes
from mqtt_nats.protocol import allocated_identifiers, durable_sender
from mqtt_nats.protocol.durable_sender import DurableSender
from mqtt_nats.protocol.inflight import SubscriptionState
from tests.protocol.recorder import PUBACK, PUBCOMP, PUBREC, PUBREL, Recorder, session, source

pytestmark = pytest.mark.sources
"""Compiled code does not see constants that a test replaces."""

SPACE = 10
OTHER = (7 + SPACE + SPACE // 2) % SPACE + 1
"""What the message of sequence 17 gets while that of 7 has identifier 8."""


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have few identifiers, so that they are used again at once."""
    monkeypatch.setattr(durable_sender, "ID_SPACE", SPACE)
    monkeypatch.setattr(durable_sender, "LATE_AFTER_MESSAGES", SPACE // 2)


def allocated(qos: int = 1) -> tuple[DurableSender, Recorder, SubscriptionState]:
    """A session whose client keeps message 7, and to which 17 was sent under another identifier."""
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 7, 1, b"r7", None, qos)
    machine.arrived(one, 17, 1, b"r17", None, qos)
    machine.allocation_stored(OTHER)
    assert ports.take() == [
        ("publish", 7, qos, False),
        ("allocate", 17, OTHER),
        ("publish", 17, qos, False),
    ]
    return machine, ports, one


def empty(machine: DurableSender) -> bool:
    """Whether no identifier is allocated, and none is kept for a confirmation."""
    return not (
        machine.identifiers.allocated
        or machine.identifiers.used
        or machine.identifiers.stored
        or machine.identifiers.unconfirmed
    )


def test_an_acknowledged_message_gives_its_identifier_back() -> None:
    """Once a position is stored in which it is not pending, then once one without the identifier is."""
    machine, ports, _ = allocated()
    machine.acknowledged(PUBACK, [OTHER])
    assert ports.take() == [("confirm", b"r17", OTHER)]
    machine.confirmed(OTHER)
    assert ports.take() == [("end allocation", 17, OTHER)]
    assert machine.identifiers.used == {OTHER: 17}
    machine.allocation_removed(OTHER)
    assert empty(machine)


def test_a_released_message_gives_its_identifier_back() -> None:
    machine, ports, _ = allocated(2)
    machine.acknowledged(PUBREC, [OTHER])
    machine.pubrel_stored(OTHER)
    assert ports.take() == [
        ("store", OTHER, 17),
        ("send", ack_bytes(PUBREL, OTHER)),
        ("confirm", b"r17", OTHER),
    ]
    machine.pubrel_delivered(OTHER, 17, b"record")
    machine.confirmed(OTHER)
    machine.acknowledged(PUBCOMP, [OTHER])
    assert ports.take() == [("end allocation", 17, OTHER), ("ack", b"record")]
    machine.allocation_removed(OTHER)
    assert empty(machine)


def test_a_refused_message_gives_its_identifier_back() -> None:
    machine, ports, _ = allocated(2)
    machine.acknowledged(PUBREC, [OTHER], failed=True)
    machine.confirmed(OTHER)
    machine.allocation_removed(OTHER)
    assert ports.take() == [("confirm", b"r17", OTHER), ("end allocation", 17, OTHER)]
    assert empty(machine)


def test_a_message_that_the_client_must_not_get_gives_its_identifier_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has expired while its identifier was stored."""
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 7, 1, b"r7", None, 1)
    machine.arrived(one, 17, 1, b"r17", None, 1)
    ports.take()
    monkeypatch.setattr(ports, "publish", lambda delivery, dup: False)
    machine.allocation_stored(OTHER)
    assert ports.take() == [("ack", b"r17"), ("end allocation", 17, OTHER)]
    machine.allocation_removed(OTHER)
    assert empty(machine)


def test_an_ended_subscription_gives_the_identifiers_of_its_unsent_messages_back() -> None:
    """The answer that the identifier is stored comes later."""
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 7, 1, b"r7", None, 1)
    machine.arrived(one, 17, 1, b"r17", None, 1)
    ports.take()
    machine.drain(one)
    assert ports.take() == [("ack", b"r17"), ("end allocation", 17, OTHER)]
    machine.allocation_stored(OTHER)
    assert ports.take() == []
    machine.allocation_removed(OTHER)
    assert empty(machine)


def test_a_message_that_was_given_up_comes_again_under_the_same_identifier() -> None:
    """Its client has not read; the identifier was stored meanwhile."""
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 7, 1, b"r7", None, 1)
    machine.arrived(one, 17, 1, b"r17", None, 1)
    machine.stop_sending()
    machine.allocation_stored(OTHER)
    machine.arrived(one, 17, 2, b"again", None, 1)
    ports.take()
    machine.go_on()
    assert ports.take() == [("publish", 17, 1, False)]
    assert machine.inflight[OTHER].sequence == 17


def test_a_message_that_was_given_up_and_is_gone_gives_its_identifier_back() -> None:
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 7, 1, b"r7", None, 1)
    machine.arrived(one, 17, 1, b"r17", None, 1)
    machine.stop_sending()
    machine.allocation_stored(OTHER)
    ports.take()
    machine.go_on()
    assert ports.take() == [("end allocation", 17, OTHER)]
    machine.allocation_removed(OTHER)
    assert empty(machine)


@pytest.mark.parametrize("qos", [1, 2])
def test_a_later_connection_sends_the_message_under_its_identifier(qos: int) -> None:
    """[MQTT-4.4.0-1] Also when the older message that had the identifier of its own is complete by now."""
    one = source()
    machine, ports = session(one, started=False)
    machine.restore_identifiers({17: OTHER})
    machine.arrived(one, 17, 2, b"r17", None, qos)
    machine.start()
    assert ports.take() == [("publish", 17, qos, True)]
    assert machine.inflight[OTHER].sequence == 17


def test_a_later_connection_completes_a_release() -> None:
    """The position has its PUBREL as owed, and the identifier as allocated."""
    one = source()
    machine, ports = session(one, started=False)
    machine.restore_identifiers({17: OTHER})
    machine.owe(OTHER, 17)
    machine.keep_identifier(OTHER, b"%b")
    machine.arrived(one, 17, 2, b"r17", None, 2)
    machine.start()
    assert ports.take() == [("confirm", b"r17", OTHER), ("send", ack_bytes(PUBREL, OTHER))]
    machine.confirmed(OTHER)
    machine.acknowledged(PUBCOMP, [OTHER])
    assert ports.take() == [("ack", b"%b")]
    machine.free_packet_id(OTHER)
    assert ports.take() == [("end allocation", 17, OTHER)]
    machine.allocation_removed(OTHER)
    assert empty(machine)


def test_a_message_that_does_not_come_again_gives_its_identifier_back() -> None:
    """The client may know it: before another message at QoS 2 has the identifier, PUBREL asks for it."""
    one = source()
    machine, ports = session(one, started=False)
    machine.restore_identifiers({17: OTHER})
    machine.start()
    assert ports.take() == [("end allocation", 17, OTHER)]
    machine.allocation_removed(OTHER)
    assert empty(machine)
    machine.arrived(one, 20 + OTHER - 1, 1, b"next", None, 2)
    assert ports.take() == [("send", ack_bytes(PUBREL, OTHER))]
    machine.acknowledged(PUBCOMP, [OTHER])
    machine.pump()
    assert ports.take() == [("publish", 20 + OTHER - 1, 2, False)]


def test_an_allocated_identifier_is_not_given_to_another_message() -> None:
    """Not even before it is stored."""
    one = source()
    machine, ports = session(one, limit=20)
    machine.arrived(one, 7, 1, b"r7", None, 1)
    machine.arrived(one, 17, 1, b"r17", None, 1)
    assert not machine.sent_at_once(one, 20 + OTHER - 1, 1, b"next")
    machine.arrived(one, 20 + OTHER - 1, 1, b"next", None, 1)
    ports.take()
    machine.allocation_stored(OTHER)
    (sent, again) = ports.take()
    assert sent == ("publish", 17, 1, False)
    assert again[:2] == ("allocate", 20 + OTHER - 1)
    assert again[2] not in (8, OTHER)


def lapped(machine: DurableSender, one: SubscriptionState, ports: Recorder) -> None:
    machine.arrived(one, 7, 1, b"r7", None, 1)
    for sequence in range(8, 17):
        machine.arrived(one, sequence, 1, b"r%d" % sequence, None, 1)
        machine.acknowledged(PUBACK, [machine.identifier_of(sequence)])
    ports.take()


def test_an_identifier_whose_message_was_acknowledged_late_waits_for_the_confirmation() -> None:
    """A crash before it would bring message 7 again, while the client has another one under its identifier."""
    one = source()
    machine, ports = session(one)
    lapped(machine, one, ports)
    machine.acknowledged(PUBACK, [8])
    assert ports.take() == [("confirm", b"r7", 8)]
    assert not machine.sent_at_once(one, 17, 2, b"r17")
    machine.arrived(one, 17, 1, b"r17", None, 2)
    assert ports.take() == [("allocate", 17, OTHER)]
    machine.confirmed(8)
    assert machine.identifiers.used == {OTHER: 17}


def test_an_identifier_is_free_when_the_late_acknowledgement_is_confirmed() -> None:
    one = source()
    machine, ports = session(one)
    lapped(machine, one, ports)
    machine.acknowledged(PUBACK, [8])
    machine.confirmed(8)
    assert empty(machine)
    assert machine.sent_at_once(one, 17, 2, b"r17")


def test_an_identifier_whose_message_had_dup_waits_for_the_confirmation() -> None:
    """It was sent in an earlier connection: how many others were sent since is not known."""
    one = source()
    machine, ports = session(one, started=False)
    machine.arrived(one, 7, 2, b"r7", None, 1)
    machine.start()
    machine.acknowledged(PUBACK, [8])
    assert ports.take() == [("publish", 7, 1, True), ("confirm", b"r7", 8)]
    assert not machine.sent_at_once(one, 17, 2, b"r17")


def test_an_allocation_stays_until_the_acknowledgement_is_confirmed() -> None:
    machine, ports, _ = allocated()
    machine.acknowledged(PUBACK, [OTHER])
    ports.take()
    assert machine.forget_absent() == []
    machine.confirmed(OTHER)
    assert ports.take() == [("end allocation", 17, OTHER)]


def test_an_early_acknowledgement_is_not_confirmed() -> None:
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 7, 1, b"r7", None, 1)
    machine.arrived(one, 8, 1, b"r8", None, 1)
    machine.acknowledged(PUBACK, [8])
    assert ports.take()[2:] == [("ack", b"r7")]


def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocated_identifiers, "ALLOCATED_MOST", 0)


def exhausted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_sender, "ID_SPACE", 1)


@pytest.mark.parametrize("limits", [bounded, exhausted])
def test_a_message_waits_when_no_identifier_may_be_allocated(
    monkeypatch: pytest.MonkeyPatch, limits: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """That is reported once for each message; it has its own identifier when that is free."""
    limits(monkeypatch)
    one = source()
    machine, ports = session(one)
    machine.arrived(one, 7, 1, b"r7", None, 1)
    machine.arrived(one, 7 + SPACE, 1, b"r17", None, 1)
    machine.pump()
    assert ports.take() == [("publish", 7, 1, False), ("no identifier",)]
    machine.acknowledged(PUBACK, [machine.identifier_of(7)])
    machine.confirmed(machine.identifier_of(7))
    assert ports.take()[-1] == ("publish", 7 + SPACE, 1, False)
    assert empty(machine)


@pytest.mark.parametrize("qos", [1, 2])
def test_the_identifier_of_a_message_that_comes_again_is_not_allocated(qos: int) -> None:
    """The client may know that message by it: at QoS 2 it would take the other one for a repetition."""
    one = source()
    machine, ports = session(one, started=False)
    machine.restore_identifiers({17: 3})
    for sequence in (2, 7, 17):  # the identifier of 2 is that of 17, and that of 7 is half of the identifiers away
        machine.arrived(one, sequence, 2, b"r%d" % sequence, None, qos)
    machine.start()
    assert [entry for entry in ports.take() if entry[0] == "allocate"] == [("allocate", 2, 9)]
