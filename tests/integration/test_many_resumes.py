# SPDX-License-Identifier: Apache-2.0
"""Many sessions that are resumed at the same time: each is resumed in its turn, after CONNACK."""

from __future__ import annotations

from mqtt_nats.delivery.receiver import RESUMED_AT_ONCE
from mqtt_nats.sessions.session import State
from tests.base.support import no_places, running
from tests.harness import raw
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.waiting import eventually


def test_connack_and_pings_do_not_wait_for_the_resume(nats_server: NatsServer) -> None:
    """[MQTT-3.12.4-1] (3.1.1, 5.0): other sessions are being resumed, and this one has a missed message."""
    with running(nats_server.url) as inside:
        (port,) = inside.ports
        with Raw.connected(port, "device", clean=False) as device:
            assert device.subscribe(("resumed/+", 1)) == [1]
        with Raw.connected(port) as writer:
            writer.send(raw.publish("resumed/a", b"missed", qos=1))
            writer.expect(raw.PUBACK)
        assert inside.gateway.account is not None
        places = inside.gateway.account.delivery.resumes
        with Raw(port) as device:
            with no_places(inside, places, RESUMED_AT_ONCE):
                device.send(raw.connect("device", flags=0))
                assert device.expect(raw.CONNACK).body == b"\1\0"
                device.ping()
                assert inside.client("device").state is State.RESUMING
            assert device.expect(raw.PUBLISH).payload == b"missed"
        assert not inside.call(places.locked)


def test_a_client_that_leaves_before_its_resume_waits_no_more(nats_server: NatsServer) -> None:
    """Its session is not resumed for nobody, before those of other clients."""
    with running(nats_server.url) as inside:
        (port,) = inside.ports
        with Raw.connected(port, "leaver", clean=False) as device:
            assert device.subscribe(("left/+", 1)) == [1]
        account = inside.gateway.account
        assert account is not None
        eventually(lambda: not account.registry.connections)
        with no_places(inside, account.delivery.resumes, RESUMED_AT_ONCE):
            with Raw(port) as device:
                device.send(raw.connect("leaver", flags=0))
                assert device.expect(raw.CONNACK).body == b"\1\0"
            eventually(lambda: not account.registry.connections)
        with Raw(port) as device:
            device.send(raw.connect("leaver", flags=0))
            assert device.expect(raw.CONNACK).body == b"\1\0"
            device.send(raw.publish("left/a", b"still there", qos=1))
            device.expect(raw.PUBACK)
            assert device.expect(raw.PUBLISH).payload == b"still there"
