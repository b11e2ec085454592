# SPDX-License-Identifier: Apache-2.0
"""What a gateway was to store when it lost NATS, and its clients have gone on elsewhere since."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from mqtt_nats.codec import Ack, Suback, Subscribe, Subscription, Will
from mqtt_streams.hashing import name_hash, registered_as
from mqtt_streams.shared import group_hash
from tests.chaos.points.proxy import Action, NatsProxy, Trap
from tests.harness.gateway import Gateway
from tests.harness.rawclient import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.integration.conftest import Connector5, Stored, answers, until

ASSIGNED = "$MQTT.shared.assigned."
OPTIONS: dict[str, Any] = {"session_expiry_interval": 300}


async def lose(proxy: NatsProxy, late: Gateway) -> None:
    """Take NATS from a gateway."""
    proxy.lose()
    await aeventually(lambda: "connection to NATS is lost" in late.log)


async def find_again(proxy: NatsProxy, late: Gateway, name: str) -> None:
    """Give NATS back, and wait until the gateway has done what it had begun."""
    proxy.away = False
    await aeventually(lambda: "connected to NATS again" in late.log)
    await answers(late, name)


async def retained(stored: Stored, name: str, payload: bytes) -> None:
    """A topic has this retained message."""
    assert await stored.count("$MQTT_rmsgs", f"$MQTT.rmsgs.{name}"), "there is none"
    message = await stored.js.get_last_msg("$MQTT_rmsgs", f"$MQTT.rmsgs.{name}")
    assert message.data == payload


@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("payload", [b"old", b""], ids=["set", "removed"])
@pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])
async def test_a_later_retained_message_stays(
    connect5: Connector5,
    name: str,
    stored: Stored,
    gateway: Gateway,
    late: Gateway,
    proxy: NatsProxy,
    qos: int,
    payload: bytes,
    clean: bool,
) -> None:
    """The client, which got no PUBACK, has published again on another gateway, and then something else."""
    options = {} if clean else OPTIONS
    client = await connect5(name, to=late, clean=clean, **options)
    stays = await connect5(f"{name}-stays", to=late)
    await lose(proxy, late)
    client.publish5(name, payload, qos, retain=True, packet_id=1 if qos else 0)
    stays.publish5(f"{name}-stays", b"first", 1, retain=True, packet_id=1)
    await client.quiet()
    if not clean:
        client.drop()
    client = await connect5(name, clean=clean, **options)
    await client.deliver(name, payload, 1, retain=True)
    await client.deliver(name, b"new", 1, retain=True)
    await find_again(proxy, late, f"{name}-probe")
    stays.publish5(f"{name}-stays", b"second", 1, retain=True, packet_id=2)
    await stays.expect_ack(PUBACK, 1, 2)
    await retained(stored, f"{name}-stays", b"second")
    await aeventually(lambda: "does not store its retained message" in late.log)
    await answers(late, f"{name}-probe")
    await retained(stored, name, b"new")


async def test_what_a_gateway_reads_late_is_not_retained(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """NATS is there again, and it is not known yet that the client has moved."""
    client = await connect5(name, to=late, clean=False, **OPTIONS)
    stays = await connect5(f"{name}-stays", to=late, clean=False, **OPTIONS)
    await lose(proxy, late)
    moved = await connect5(name, clean=False, **OPTIONS)
    await moved.deliver(name, b"new", 1, retain=True)
    traps = [proxy.set("answer", "$JS.API.STREAM.MSG.GET.$MQTT_sess", Action.DROP) for _ in range(2)]
    proxy.away = False
    for trap in traps:
        await asyncio.wait_for(trap.sprung.wait(), 20)
    client.publish5(name, b"old", 0, retain=True)
    stays.publish5(f"{name}-stays", b"there", 1, retain=True, packet_id=1)
    await stays.expect_ack(PUBACK, 1)
    await aeventually(lambda: "does not store its retained message" in late.log)
    await answers(late, f"{name}-probe")
    await retained(stored, name, b"new")
    await retained(stored, f"{name}-stays", b"there")


async def test_who_has_left_in_good_order_has_retained_something(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """A client that publishes once and goes away, while NATS is not there."""
    client = await connect5(name, to=late)
    await lose(proxy, late)
    client.publish5(name, b"once", 0, retain=True)
    await client.disconnect5()
    await find_again(proxy, late, f"{name}-probe")

    async def there() -> None:
        assert await stored.count("$MQTT_rmsgs", f"$MQTT.rmsgs.{name}")

    await until(there)
    await retained(stored, name, b"once")


@pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])
async def test_a_will_comes_behind_what_its_client_has_retained(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy, clean: bool
) -> None:
    """A client says that it is there, and its will that it is not."""
    options = {} if clean else OPTIONS
    client = await connect5(name, to=late, clean=clean, will=Will(name, b"gone", 1, True), **options)
    await lose(proxy, late)
    client.publish5(name, b"there", 1, retain=True, packet_id=1)
    await client.quiet()
    client.drop()
    await find_again(proxy, late, f"{name}-probe")

    async def gone() -> None:
        await retained(stored, name, b"gone")

    await until(gone)


async def test_the_order_of_what_several_clients_have_retained(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """Before and after NATS was there again."""
    clients = [await connect5(f"{name}-{number}", to=late) for number in range(8)]
    await lose(proxy, late)
    for number, client in enumerate([*clients, clients[0]]):
        client.publish5(f"{name}/before", b"%d" % number, 1, retain=True)
        client.publish5(f"{name}/after", b"%d" % number, 1, retain=True)
        await client.quiet()
    trap = proxy.set("answer", "$JS.API.STREAM.MSG.GET.$MQTT_sess", Action.DROP)
    proxy.away = False
    await trap.sprung.wait()
    await clients[5].deliver(f"{name}/after", b"last", 0, retain=True)
    for number, client in enumerate(clients):
        await client.expect_ack(PUBACK, *range(1, 5 if not number else 3))
    await clients[5].deliver(f"{name}/done", b"", 1)
    found = [await stored.js.get_last_msg("$MQTT_rmsgs", f"$MQTT.rmsgs.{name}.{one}") for one in ("before", "after")]
    assert [one.data for one in found] == [b"8", b"last"]


async def test_a_session_whose_record_is_being_written(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """It is stored, and nobody has heard of it: the session has not moved for that."""
    client = await connect5(name, to=late, clean=False, **OPTIONS)
    trap = proxy.set("answer", f"$MQTT.sess.{name_hash(name)}", Action.DROP)
    client.send(Subscribe(7, (Subscription(f"{name}/x", 1),)))
    await asyncio.wait_for(trap.sprung.wait(), 10)
    await lose(proxy, late)
    client.publish5(name, b"x", 1, retain=True, packet_id=1)
    await client.quiet()
    await find_again(proxy, late, f"{name}-probe")
    packets = [await client.packet() for _ in range(2)]
    assert {type(one) for one in packets} == {Suback, Ack}
    await retained(stored, name, b"x")


async def shared_by(
    connect5: Connector5, name: str, late: Gateway, proxy: NatsProxy, stage: str, action: Action
) -> tuple[RawClient5, Trap]:
    """A member of a group on the late gateway, with a message that is just being made the member's."""
    first = await connect5(f"{name}-first", to=late, clean=False, **OPTIONS)
    await first.subscribe(f"$share/group/{name}", qos=2)
    publisher = await connect5(f"{name}-publisher")
    trap = proxy.set(stage, ASSIGNED, action)
    await publisher.deliver(name, b"1", 2)
    await trap.sprung.wait()
    return first, trap


async def second_member(connect5: Connector5, name: str) -> RawClient5:
    """Another member of the group, on another gateway."""
    second = await connect5(f"{name}-second", clean=False, **OPTIONS)
    await second.subscribe(f"$share/group/{name}", qos=2)
    return second


async def has_it_whole(second: RawClient5, stored: Stored) -> None:
    """The second member is given the message, and completes it."""
    (one,) = await second.messages(1, timeout=60)
    await second.complete(one)
    await nobodys(stored)


async def nobodys(stored: Stored) -> None:
    """No message belongs to a member."""

    async def none() -> None:
        assert not await stored.count("$MQTT_shared", f"{ASSIGNED}>")

    await until(none)


@pytest.mark.slow
async def test_a_member_whose_gateway_stands_still_keeps_its_message(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """It is stored that it is the member's, and the group offers it to another one before the gateway hears of that."""
    first, trap = await shared_by(connect5, name, late, proxy, "answer", Action.HOLD)
    os.kill(late.pid, signal.SIGSTOP)
    try:
        trap.release()
        second = await second_member(connect5, name)
        group = await stored.consumers("$MQTT_msgs", "share_")

        async def acknowledged() -> None:  # by the second one, which finds that it is the first one's
            infos = [await stored.js.consumer_info("$MQTT_msgs", one) for one in group]
            assert not any(one.num_ack_pending or one.num_pending for one in infos)

        await until(acknowledged, 60)
    finally:
        os.kill(late.pid, signal.SIGCONT)
    await first.complete(await first.message(name, b"1", timeout=60))
    await second.quiet()
    await nobodys(stored)  # else it is left to the next connection, since the gateway is about to end


@pytest.mark.slow
async def test_a_message_of_a_group_that_another_member_had_meanwhile(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """A member's gateway was to note that it is the member's; the group has given it to the other one since."""
    first, _ = await shared_by(connect5, name, late, proxy, "up", Action.DROP)
    await lose(proxy, late)
    await has_it_whole(await second_member(connect5, name), stored)
    await find_again(proxy, late, f"{name}-probe")
    await nobodys(stored)
    await first.quiet()


@pytest.mark.slow
async def test_an_assignment_that_comes_after_the_message_was_somebody_elses(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """A gateway stands still before it has sent it; meanwhile another member has the message whole."""
    first, trap = await shared_by(connect5, name, late, proxy, "up", Action.HOLD)
    os.kill(late.pid, signal.SIGSTOP)
    try:
        await has_it_whole(await second_member(connect5, name), stored)
    finally:
        os.kill(late.pid, signal.SIGCONT)
    trap.release()
    await answers(late, f"{name}-probe")
    await nobodys(stored)
    await first.quiet()


@pytest.mark.parametrize("how", ["held up", "NATS is lost"])
async def test_a_message_of_a_group_becomes_a_members_that_has_moved(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy, how: str
) -> None:
    """Its next connection has looked by then for what is its own: the gateway of the former one tells the other."""
    lost = how == "NATS is lost"
    first, trap = await shared_by(connect5, name, late, proxy, "up", Action.DROP if lost else Action.HOLD)
    if lost:
        await lose(proxy, late)
        first.drop()
    moved = await connect5(f"{name}-first", clean=False, **OPTIONS)
    assert moved.session_present
    await moved.subscribe(f"{name}/else", qos=0)  # after all that belongs to the resume
    proxy.away = False
    trap.release()
    await moved.complete(await moved.message(name, b"1", timeout=30, qos=2, dup=False))
    await nobodys(stored)
    await moved.quiet()


@pytest.mark.parametrize("qos2_state", ["sent", "received", "settled"])
@pytest.mark.parametrize("told", [True, False])
async def test_a_late_assignment_has_the_packet_identifier_of_another_message(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, told: bool, qos2_state: str
) -> None:
    """The next connection has not known the identifier, and uses it: the late message comes under another one, once.

    ``settled``: the assignment of the other message is removed already, and its PUBREL is owed.
    """
    client_id = f"{name}-first"
    client = await connect5(client_id, clean=False, **OPTIONS)
    await client.subscribe(f"$share/group/{name}", qos=2)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver(name, b"1", 2)
    await client.complete(await client.message(name, b"1"))
    await nobodys(stored)
    await stored.settled(client_id)  # else its PUBREL is sent once more, and first
    number = await stored.last_sequence()
    await publisher.deliver(name, b"2", 2)
    second = await client.message(name, b"2", qos=2, dup=False)
    assert second.packet_id is not None
    if qos2_state != "sent":
        client.ack(PUBREC, second.packet_id)
        await client.expect_ack(PUBREL, second.packet_id)
    if qos2_state == "settled":
        await nobodys(stored)
    group = group_hash("group", name)
    ack = f"$JS.ACK.$MQTT_msgs.share_{group}.1.{number}.1.{time.time_ns()}.0"
    block = {"Nmqtt-PacketId": f"{second.packet_id}", "Nmqtt-Seq": f"{number}", "Nmqtt-Arrived": f"{time.time_ns()}"}
    block |= {"Nmqtt-Epoch": "1", "Nmqtt-Share": f"$share/group/{name}", "Nmqtt-Ack": ack}
    late = await stored.js.publish(f"{ASSIGNED}{name_hash(client_id)}.{group}-{number}", b"", headers=block)
    if told:
        body = f"{late.seq} {registered_as(client_id, name_hash(client_id))}"
        await stored.nats.publish("$MQTT.gateways.assigned", body.encode())
    else:  # the gateway of the former connection is gone
        client.drop()
        client = await connect5(client_id, clean=False, **OPTIONS)
        if qos2_state != "sent":
            await client.expect_ack(PUBREL, second.packet_id)
    payloads = [b"1"] if told or qos2_state != "sent" else [b"1", b"2"]
    found = {one.payload: one for one in await client.messages(len(payloads), timeout=30)}
    assert sorted(found) == payloads
    assert found[b"1"].packet_id != second.packet_id
    assert not found[b"1"].dup
    if b"2" in found:
        assert (found[b"2"].packet_id, found[b"2"].dup) == (second.packet_id, True)
    if qos2_state != "sent":
        client.ack(PUBCOMP, second.packet_id)
    else:
        await client.complete(found.get(b"2", second))
    await client.complete(found[b"1"])
    await nobodys(stored)
    await client.quiet()


async def test_a_message_of_a_group_that_a_member_has_found_is_not_sent_twice(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, late: Gateway, proxy: NatsProxy
) -> None:
    """It was made the member's before that moved, and its former gateway hears of it afterwards."""
    _, trap = await shared_by(connect5, name, late, proxy, "answer", Action.HOLD)
    moved = await connect5(f"{name}-first", clean=False, **OPTIONS)
    one = await moved.message(name, b"1", qos=2, dup=True)
    told = proxy.set("up", "$MQTT.gateways.assigned", Action.HOLD)
    trap.release()
    await asyncio.wait_for(told.sprung.wait(), 10)
    told.release()
    await answers(late, f"{name}-probe")
    await moved.complete(one)
    await nobodys(stored)
    await moved.subscribe(f"{name}/else", qos=0)
    await moved.quiet()


async def test_an_assignment_that_nobody_waits_for_any_more(
    connect5: Connector5, name: str, stored: Stored, gateway: Gateway, second_gateway: Gateway
) -> None:
    """The network has held it back until the gateway that sent it had given the message to the group again."""
    first = await connect5(f"{name}-first", clean=False, **OPTIONS)
    await first.subscribe(f"$share/group/{name}", qos=2)
    publisher = await connect5(f"{name}-publisher")
    await publisher.deliver(name, b"1", 2)
    (one,) = await first.messages(1)
    assert one.packet_id is not None
    await first.complete(one)
    await nobodys(stored)
    await stored.settled(f"{name}-first")  # else its PUBREL is sent once more, and first
    first.drop()
    number = await stored.last_sequence()
    ack = f"$JS.ACK.$MQTT_msgs.share_{group_hash('group', name)}.1.{number}.1.{time.time_ns()}.0"
    subject = f"{ASSIGNED}{name_hash(f'{name}-first')}.{number}"
    for seconds, sent in ((16, 0), (1, 1)):  # as it would be stored so many seconds after the message had come
        arrived = str(int((time.time() - seconds) * 1e9))
        block = {"Nmqtt-PacketId": "7", "Nmqtt-Seq": f"{number}", "Nmqtt-Arrived": arrived}
        block |= {"Nmqtt-Share": "x", "Nmqtt-Ack": ack}
        await stored.js.publish(subject, b"", headers=block)
        again = await connect5(f"{name}-first", clean=False, to=second_gateway, **OPTIONS)
        for _ in range(sent):
            await again.complete(await again.message(name, b"1", qos=2, dup=True, packet_id=7))
        await again.quiet()
        await nobodys(stored)
        again.drop()


@pytest.mark.parametrize("delay", [0, 100], ids=["clean session", "delayed, goes on"])
async def test_a_will_that_is_none_any_more(
    connect5: Connector5, name: str, stored: Stored, late: Gateway, proxy: NatsProxy, delay: int
) -> None:
    """The client has gone on elsewhere, and has left in good order, before its gateway has NATS back."""
    options = OPTIONS if delay else {}
    properties: Any = {"will_delay_interval": delay} if delay else None
    will = Will(f"{name}/will", b"x", 1, False, properties)
    await connect5(name, to=late, clean=not delay, will=will, **options)
    await lose(proxy, late)
    moved = await connect5(name, clean=not delay, **options)
    await moved.disconnect5(**({"session_expiry_interval": 0} if delay else {}))

    async def gone() -> None:
        assert not await stored.count("$MQTT_sess", f"$MQTT.sess.{name_hash(name)}")

    await until(gone)
    before = await stored.count("$MQTT_msgs", f"$MQTT.msgs.{name}.will")
    await find_again(proxy, late, f"{name}-probe")
    await aeventually(lambda: _let_go(late, name))
    await answers(late, f"{name}-second")
    assert await stored.count("$MQTT_msgs", f"$MQTT.msgs.{name}.will") == before


def _let_go(late: Gateway, name: str) -> bool:
    """The gateway has heard that a client's session is not its any more."""
    return any(f"'{name}'" in line and "session" in line for line in late.log.splitlines())
