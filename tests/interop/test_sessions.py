# SPDX-License-Identifier: Apache-2.0
"""Sessions that move between the two listeners: resume with queued messages, and takeover."""

import time
from collections.abc import Callable

import orjson
import pytest
from click.testing import CliRunner
from nats.aio.client import Client as NatsClient

from mqtt_nats.cli import command
from mqtt_streams.hashing import name_hash
from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually
from tests.interop.support import BOTH_WAYS, Message, Pahos, unique

PATIENCE = 10.0
"""Seconds until paho's thread has noticed that its connection was closed."""


@BOTH_WAYS
@pytest.mark.parametrize("qos", [1, 2])
def test_queued_messages_wait_on_the_other_side(
    paho: Pahos, let_go: Callable[[str], None], settle: Callable[[str], None], here: str, there: str, qos: int
) -> None:
    topic, client_id = unique("queue/"), unique("sub")
    publishers = [paho(side, unique("pub")) for side in (here, there)]
    subscriber = paho(here, client_id, clean=False)
    subscriber.subscribe(topic, qos)
    subscriber.subscribe(f"{topic}/deep/#", qos)
    publishers[0].publish(topic, b"live", qos)
    subscriber.expect(Message(topic, b"live", qos, False))
    for side in (there, here, there):
        settle(client_id)
        subscriber.close()
        let_go(client_id)
        for number in range(40):
            publishers[number % 2].publish(topic, b"%d" % number, qos)
        subscriber = paho(side, client_id, clean=False)
        assert subscriber.session_present
        subscriber.expect(*(Message(topic, b"%d" % number, qos, False) for number in range(40)))
        publishers[0].publish(f"{topic}/deep", b"live", qos)
        subscriber.expect(Message(f"{topic}/deep", b"live", qos, False))
        subscriber.fence()
        assert subscriber.messages == []


@BOTH_WAYS
def test_subscriptions_change_on_either_side(paho: Pahos, let_go: Callable[[str], None], here: str, there: str) -> None:
    client_id = unique("sub")
    kept, dropped, added = unique("kept/"), unique("dropped/"), unique("added/")
    subscriber = paho(here, client_id, clean=False)
    for topic in (kept, dropped):
        subscriber.subscribe(topic, 1)
    subscriber.close()
    subscriber = paho(there, client_id, clean=False)
    subscriber.unsubscribe(dropped)
    subscriber.subscribe(added, 2)
    subscriber.close()
    let_go(client_id)
    publisher = paho(here, unique("pub"))
    for topic in (kept, dropped, added):
        publisher.publish(topic, b"x", 2)
    subscriber = paho(here, client_id, clean=False)
    wanted = [Message(added, b"x", 2, False), Message(kept, b"x", 1, False)]
    eventually(lambda: sorted(subscriber.messages) == wanted)  # from two subscriptions, in any order
    subscriber.fence()
    assert sorted(subscriber.messages) == wanted


@BOTH_WAYS
def test_a_clean_start_on_the_other_side_ends_the_session(paho: Pahos, here: str, there: str) -> None:
    topic, client_id = unique("clean/"), unique("sub")
    subscriber = paho(here, client_id, clean=False)
    subscriber.subscribe(topic, 1)
    subscriber.close()
    publisher = paho(here, unique("pub"))
    publisher.publish(topic, b"lost", 1)
    subscriber = paho(there, client_id)
    assert not subscriber.session_present
    subscriber.close()
    for side in (here, there):
        subscriber = paho(side, client_id, clean=False)
        assert not subscriber.session_present
        publisher.publish(topic, b"lost", 1)
        subscriber.fence()
        assert subscriber.messages == []
        subscriber.close()
        paho(side, client_id).close()


@BOTH_WAYS
@pytest.mark.parametrize("clean", [True, False], ids=["clean", "durable"])
def test_takeover(paho: Pahos, show: Callable[[str], None], here: str, there: str, clean: bool) -> None:
    topic, client_id = unique("take/"), unique("sub")
    publisher = paho(here, unique("pub"))
    old = paho(here, client_id, clean=clean)
    old.subscribe(topic, 2)
    new = paho(there, client_id, clean=clean)
    assert old.closed.wait(PATIENCE), "the former connection was not closed"
    assert new.session_present is not clean
    if clean:
        new.subscribe(topic, 2)
    publisher.publish(topic, b"x", 2)
    new.expect(Message(topic, b"x", 2, False))
    new.fence()
    assert new.messages == old.messages == []

    if there == "gateway" and not clean:  # its dormant consumer follows the position of the connected client
        show(client_id)
    # nats-server holds a client that comes back within a second, and then closes it without an answer.
    back = paho(here, client_id, clean=clean, connects=3)
    assert new.closed.wait(PATIENCE), "the former connection was not closed"
    assert back.session_present is not clean
    if clean:
        back.subscribe(topic, 2)
    publisher.publish(topic, b"y", 2)
    if not clean and there == "gateway":  # the session was not at rest: nats-server begins where its consumer lay
        eventually(lambda: Message(topic, b"y", 2, False) in back.messages)
        assert set(back.messages[:-1]) <= {Message(topic, b"x", 2, False)}
    else:
        back.expect(Message(topic, b"y", 2, False))
    assert old.messages == new.messages == []


def test_takeover_by_the_gateway_under_traffic_loses_nothing(paho: Pahos) -> None:
    topic, client_id = unique("busy/"), unique("sub")
    publisher = paho("nats-server", unique("pub"))
    clients = [paho("nats-server", client_id, clean=False)]
    clients[0].subscribe(topic, 1)
    for number in range(300):
        publisher.publish(topic, b"%d" % number, 1)
        if number == 150:
            clients.append(paho("gateway", client_id, clean=False))
    deadline = time.monotonic() + 30
    wanted = {b"%d" % number for number in range(300)}
    while {one.payload for client in clients for one in client.messages} != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    seen = [int(one.payload) for client in clients for one in client.messages]
    firsts = list(dict.fromkeys(seen))
    assert firsts == sorted(firsts)


async def test_a_record_that_nats_server_has_written_is_a_plain_311_session(
    paho: Pahos, nats_client: NatsClient
) -> None:
    topic, client_id = unique("v5/"), unique("sub")
    stream = nats_client.jetstream()

    async def record() -> dict[str, object]:
        stored = await stream.get_last_msg("$MQTT_sess", f"$MQTT.sess.{name_hash(client_id)}")
        assert stored.data is not None
        found: dict[str, object] = orjson.loads(stored.data)
        return found

    subscriber = paho("gateway", client_id, clean=False)
    subscriber.subscribe(topic, 2)
    written = await record()
    assert "v5" in written
    subscriber.close()

    subscriber = paho("nats-server", client_id, clean=False)
    rewritten = await record()
    assert "v5" not in rewritten
    assert rewritten["subs"] == written["subs"]
    subscriber.close()

    publisher = paho("nats-server", unique("pub"))
    publisher.publish(topic, b"queued", 2)
    subscriber = paho("gateway", client_id, clean=False)
    assert subscriber.session_present
    subscriber.expect(Message(topic, b"queued", 2, False))
    again = await record()
    assert again["subs"] == written["subs"]
    assert isinstance(written["v5"], dict)
    assert isinstance(again["v5"], dict)
    assert ("listener" in written["v5"], again["v5"]["listener"]) == (False, True)


def test_a_session_that_the_listener_serves_is_not_cleaned(paho: Pahos, nats: NatsServer) -> None:
    """No gateway knows that its client is connected."""
    client_id = unique("served")
    subscriber = paho("nats-server", client_id, clean=False)
    subscriber.subscribe(unique("served/"), 1)
    done = CliRunner().invoke(command, ["ctl", "--nats", nats.url, "sessions", "clean", client_id, "--json"])
    found = orjson.loads(done.stdout)
    assert found["sessions"] == []
    assert "nats-server's own listener" in found["kept"][0]["why"]
