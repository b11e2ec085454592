# SPDX-License-Identifier: Apache-2.0
"""A session that is resumed in a stream that was created anew or restored: which of its positions still count."""

from __future__ import annotations

import pytest

from mqtt_nats.delivery.position_recovery import continue_in_stream, end_suspicion
from mqtt_nats.protocol.durable_sender import ID_SPACE, DurableSender
from mqtt_streams.sessions import V5, Draining, SharedSubscription
from tests.sessions.fakes import FakeClient, FakeServices, FakeSide, as_client, as_side, v5_of


def resumed(v5: V5, floor: int = 20) -> tuple[FakeClient, FakeSide]:
    services = FakeServices()
    services.stream.floor = floor
    client = FakeClient(services, v5=v5)
    assert client.record is not None
    client.record.subs = {"a": 2}
    side = FakeSide(client)
    continue_in_stream(as_client(client), as_side(side))
    return client, side


def test_a_session_in_the_same_stream() -> None:
    client, side = resumed(V5(generation="present", start={"a": 99}))
    assert (v5_of(client).start, side.replaced, side.kept) == ({"a": 99}, None, False)


def test_a_session_that_has_never_counted() -> None:
    client, side = resumed(V5())
    assert (v5_of(client).generation, v5_of(client).fresh, side.replaced, side.kept) == ("present", 0, None, True)


def test_a_session_of_the_stream_before() -> None:
    """Nothing of it counts beyond what the backup has; identifiers are asked for before they are used again."""
    v5 = V5(
        generation="former",
        start={"low": 5, "high": 99},
        was={"a": (2, 99), "b": (1, 10)},
        draining=[Draining("name", "$MQTT.msgs.a", 2, 99, 50)],
        shared={"$share/g/t": SharedSubscription(1, False, None, 99)},
    )
    client, side = resumed(v5)
    v5 = v5_of(client)
    assert (side.replaced, side.kept, v5.fresh, v5.generation) == (20, True, 21, "present")
    assert v5.start == {"low": 5, "high": 21}
    assert v5.was == {"a": (2, 20), "b": (1, 10)}
    assert v5.draining == [Draining("name", "$MQTT.msgs.a", 2, 20, 21)]
    assert v5.shared["$share/g/t"].start == 21


def test_nothing_is_left_of_a_stream_without_a_backup() -> None:
    v5 = V5(generation="former", was={"a": (2, 99)}, draining=[Draining("name", "$MQTT.msgs.a", 2, 99, 50)])
    client, _ = resumed(v5, floor=0)
    assert v5_of(client).was == {}
    assert v5_of(client).draining == [Draining("name", "$MQTT.msgs.a", 0, 0, 1)]


@pytest.mark.sources
@pytest.mark.parametrize(("fresh", "floors"), [(0, []), (21, [20])])
def test_identifiers_of_the_stream_before_are_in_doubt(
    monkeypatch: pytest.MonkeyPatch, fresh: int, floors: list[int]
) -> None:
    """Also at a later resume, until all of them were used in the present stream."""
    found: list[int] = []
    monkeypatch.setattr(DurableSender, "replaced", lambda machine, floor: found.append(floor))
    resumed(V5(generation="present", fresh=fresh))
    assert found == floors


@pytest.mark.parametrize(("last", "fresh"), [(20 + ID_SPACE, 21), (21 + ID_SPACE, 0)])
def test_the_suspicion_ends_when_all_identifiers_were_used(last: int, fresh: int) -> None:
    v5 = V5(fresh=21)
    end_suspicion(v5, last)
    assert v5.fresh == fresh
