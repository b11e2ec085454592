# SPDX-License-Identifier: Apache-2.0
"""Messages for some sessions only (`carried_messages`), by which `migrate sessions` carries over what waits for them.

Others have had them at the old broker: whoever else has a subscription does not get them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import nats
import pytest

from tests.conftest import GatewayFactory
from tests.harness import raw5
from tests.harness.cluster import Cluster
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.proxy import Proxy
from tests.harness.raw5 import EXPIRY, SESSION_EXPIRY, USER, Raw5, prop

pytestmark = pytest.mark.processes

KEPT = prop(SESSION_EXPIRY, 600)
FOR, QOS = "Nmqtt-For", "Nmqtt-Pub"


@pytest.fixture(params=["consumers", "records"])
def positions(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def carrying(nats_server: NatsServer, gateway_factory: GatewayFactory, positions: str) -> Gateway:
    """A gateway whose clients may publish such messages."""
    return gateway_factory(nats_server, "--carried-messages", "--session-positions", positions)


def carry(gateway: Gateway, topic: str, payload: bytes, qos: int, *clients: str, more: bytes = b"") -> int:
    """Publish a message for the sessions of these clients; the reason code."""
    names = [prop(USER, (FOR, one)) for one in clients]
    with Raw5.open(gateway.port, "carrier") as client:
        parts = [prop(USER, ("a", "b")), *names, prop(USER, (QOS, str(qos))), more]
        client.send(raw5.publish(topic, payload, *parts, qos=1, id=1))
        return client.answer(raw5.PUBACK, 1).reason


def left(port: int, client_id: str, topic_filter: str, qos: int = 2) -> None:
    """A durable session whose client is away."""
    with Raw5.open(port, client_id, KEPT) as client:
        assert client.subscribed((topic_filter, qos)) == (qos,)


@pytest.mark.parametrize("qos", [1, 2])
async def test_only_these_sessions_get_it(
    carrying: Gateway, nats_server: NatsServer, gateway_factory: GatewayFactory, positions: str, qos: int
) -> None:
    """Not others that are away or connected, durable or not, in a group, at another gateway; and no NATS client."""
    other = gateway_factory(nats_server, "--session-positions", positions)
    topic = f"home/{positions}/{qos}"
    for client_id in ("lamp", "bell 100%/x", "away"):
        left(carrying.port, client_id, topic)
    service = await nats.connect(nats_server.url)
    heard = await service.subscribe("home.>")
    await service.flush()
    with ExitStack() as stack:
        clients = []
        for port in (carrying.port, other.port):
            wanted: list[tuple[tuple[bytes, ...], str]] = [((), topic), ((KEPT,), "home/#")]
            for parts, topic_filter in [*wanted, ((), f"$share/c{port}/{topic}"), ((KEPT,), f"$share/g{port}/home/#")]:
                client = stack.enter_context(Raw5.open(port, f"{port} {parts} {topic_filter}", *parts))
                assert client.subscribed((topic_filter, 2)) == (2,)
                clients.append(client)
        assert carry(carrying, topic, b"before", qos, "lamp", "bell 100%/x", more=prop(EXPIRY, 1000)) == 0
        assert carry(carrying, topic, b"only lamp", qos, "lamp") == 0
        with Raw5.open(other.port, "publisher") as client:
            client.deliver(topic, b"after", qos=qos)
        for client in clients:
            assert client.receive_message().payload == b"after"
            client.quiet()
    assert (await heard.next_msg(10)).data == b"after"
    await service.close()
    for port, client_id, payloads in (
        (carrying.port, "lamp", [b"before", b"only lamp", b"after"]),
        (other.port, "bell 100%/x", [b"before", b"after"]),
        (other.port, "away", [b"after"]),
    ):
        with Raw5.open(port, client_id, KEPT, clean=False) as client:
            found = [client.receive_message() for _ in payloads]
            assert [(one.payload, one.qos) for one in found] == [(one, qos) for one in payloads]
            for one in found[:-1]:
                assert one.get(USER) == ("a", "b")
            client.quiet()


@pytest.fixture
def cluster(nats_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(tmp_path_factory.mktemp("cluster"), backend=nats_backend)
    try:
        found.start()
        yield found
    finally:
        for server in found.servers:
            server.discard()


@pytest.mark.long
def test_three_servers(cluster: Cluster, gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory(cluster.url, "--carried-messages")
    for client_id in ("lamp", "away"):
        left(gateway.port, client_id, "home/#")
    assert carry(gateway, "home/a", b"carried", 2, "lamp") == 0
    with Raw5.open(gateway.port, "publisher") as client:
        client.deliver("home/a", b"after", qos=2)
    for client_id, wanted in (("lamp", [b"carried", b"after"]), ("away", [b"after"])):
        with Raw5.open(gateway.port, client_id, KEPT, clean=False) as client:
            assert [client.receive_message().payload for _ in wanted] == wanted
            client.quiet()


def test_others_may_not(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """At a listener without the setting these are user properties, and everybody gets the message."""
    gateway = gateway_factory(nats_server)
    with Raw5.open(gateway.port, "watcher") as watcher:
        assert watcher.connack.get(USER) is None
        assert watcher.subscribed(("seen/#", 1)) == (1,)
        assert carry(gateway, "seen/a", b"x", 1, "nobody") == 0
        found = watcher.receive_message()
        assert [value for identity, value in found.properties if identity == USER] == [
            ("a", "b"),
            (FOR, "nobody"),
            (QOS, "1"),
        ]


def test_rules_and_mistakes(
    nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A message that its publisher may not publish is refused; one that is not as it has to be ends the connection."""
    rules = tmp_path_factory.mktemp("rules") / "acl.toml"
    rules.write_text('[[rules]]\neffect = "allow"\ntopics = "home/#"\n', encoding="utf-8")
    gateway = gateway_factory(nats_server, "--carried-messages", "--acl-file", str(rules))
    assert carry(gateway, "secret/a", b"x", 1, "lamp") == 0x87
    assert carry(gateway, "home/a", b"x", 1, "lamp") == 0
    wanted = prop(USER, (FOR, "lamp"))
    for parts, qos, flags in (
        ([wanted], 1, 0),
        ([wanted, prop(USER, (QOS, "3"))], 1, 0),
        ([wanted, prop(USER, (QOS, "1"))], 0, 0),
        ([wanted, prop(USER, (QOS, "1"))], 2, 0),
        ([wanted, prop(USER, (QOS, "1"))], 1, 1),
    ):
        with Raw5.open(gateway.port, "carrier") as client:
            client.send(raw5.publish("home/a", b"x", *parts, qos=qos, flags=flags, id=1))
            (found,) = client.expect_closed()
            assert raw5.answer(found).reason == 0x82


def test_a_clean_session_reads_none_after_an_outage(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """It reads from the stream what it has missed meanwhile."""
    proxy = Proxy(nats_server.port)
    try:
        gateway, elsewhere = gateway_factory(proxy.url), gateway_factory(nats_server, "--carried-messages")
        with Raw5.open(gateway.port, "clean") as client:
            assert client.subscribed(("home/outage", 1)) == (1,)
            proxy.cut()
            assert carry(elsewhere, "home/outage", b"carried", 1, "lamp") == 0
            with Raw5.open(elsewhere.port, "publisher") as other:
                other.deliver("home/outage", b"missed", qos=1)
            proxy.restore()
            assert client.receive_message().payload == b"missed"
            client.quiet()
    finally:
        proxy.close()
