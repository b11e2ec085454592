# SPDX-License-Identifier: Apache-2.0
"""A gateway that is behind stores a QoS 2 publish when its client has gone on elsewhere, and sent it again there."""

import time

import pytest

from mqtt_streams.hashing import name_hash
from mqtt_streams.qos2 import held_block, held_subject
from tests.harness.gateway import Gateway
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import aeventually
from tests.integration.conftest import Stored, stored

__all__ = ["stored"]

pytestmark = pytest.mark.anyio

KEPT = prop(SESSION_EXPIRY, 600)


async def test_it_is_not_taken_for_another_message(gateway: Gateway, stored: Stored) -> None:
    """Not for the next one with its packet identifier, which would be answered and never published."""
    name = f"late{time.time_ns()}"
    topic = f"{name}/x"
    with Raw5.open(gateway.port, name, KEPT):
        pass
    former = (await stored.js.get_last_msg("$MQTT_sess", f"$MQTT.sess.{name_hash(name)}")).seq
    assert former
    with Raw5.open(gateway.port, f"{name}-observer") as observer:
        observer.subscribed((topic, 2))
        with Raw5.open(gateway.port, name, KEPT, clean=False) as client:
            client.deliver(topic, b"first", qos=2)
            observer.receive_message(b"first")
            block = held_block(f"{name}.x".encode(), 4, former, b"0" * 32)
            lines = dict(line.split(":", 1) for line in block.decode().split("\r\n")[1:] if line)
            subject = held_subject(name, 1)
            await stored.js.publish(subject, b"first", headers=lines)

            async def gone() -> bool:
                return not await stored.count("$MQTT_qos2in", subject)

            assert not await gone()
            await aeventually(gone, 30)
        with Raw5.open(gateway.port, name, KEPT, clean=False) as client:
            client.deliver(topic, b"second", qos=2)
            observer.receive_message(b"second")
            observer.quiet()
