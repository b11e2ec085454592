# SPDX-License-Identifier: Apache-2.0
"""Which messages at QoS 2 wait until the client has given their packet identifier up."""

import pytest

from mqtt_nats.protocol.inflight import Delivery, SubscriptionState
from mqtt_nats.protocol.suspect_identifiers import SuspectIdentifiers

SPACE = 10


def delivery(sequence: int, *, dup: bool = False, identifier: int = 0) -> Delivery:
    """A message at QoS 2, under its own identifier unless it has another one."""
    source = SubscriptionState(2, 1)
    return Delivery(source, sequence, identifier or sequence % SPACE + 1, 2, b"", b"r", dup)


@pytest.mark.parametrize(
    ("sequence", "dup", "suspect"),
    [
        (5, False, True),  # it has the identifier of the message that is gone, or is that message
        (15, False, True),
        (25, False, True),
        (6, False, False),
        (16, False, False),
        (5, True, False),  # the client may know the message itself by its identifier
        (15, True, True),  # ten messages earlier was the one that is gone
        (4, False, False),
    ],
)
def test_a_message_that_is_gone_has_left_its_identifier(sequence: int, dup: bool, suspect: bool) -> None:
    identifiers = SuspectIdentifiers(SPACE)
    identifiers.add(5, 5)
    assert identifiers.has(delivery(sequence, dup=dup), False) is suspect


def test_an_allocated_identifier_is_the_messages_own_when_it_has_dup() -> None:
    identifiers = SuspectIdentifiers(SPACE)
    identifiers.add(1, 9)
    again = delivery(17, dup=True, identifier=3)
    assert (identifiers.has(again, True), identifiers.has(again, False)) == (False, True)


def test_the_client_is_asked_once_and_gives_the_identifier_up() -> None:
    identifiers = SuspectIdentifiers(SPACE)
    identifiers.add(5, 5)
    assert (identifiers.ask(6), identifiers.ask(6), identifiers.asked) == (True, False, {6})
    assert identifiers.has(delivery(15), False), "it has not answered"
    identifiers.answered(6)
    assert (identifiers.has(delivery(15), False), identifiers.asked) == (False, set())


def test_an_answer_to_no_question_clears_nothing() -> None:
    identifiers = SuspectIdentifiers(SPACE)
    identifiers.add(5, 5)
    identifiers.answered(6)
    assert identifiers.has(delivery(15), False)
    identifiers.clear(6)
    assert not identifiers.has(delivery(15), False)


def test_behind_a_replaced_stream_every_identifier_is_suspect() -> None:
    identifiers = SuspectIdentifiers(SPACE)
    identifiers.replaced(20)
    found = [
        identifiers.has(delivery(sequence, dup=dup), False) for sequence, dup in [(20, False), (21, False), (21, True)]
    ]
    assert found == [False, True, False]
    identifiers.ask(2)
    identifiers.answered(2)
    assert (identifiers.has(delivery(21), False), identifiers.has(delivery(22), False)) == (False, True)
