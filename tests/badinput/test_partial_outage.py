# SPDX-License-Identifier: Apache-2.0
"""One gateway loses its connection to NATS while the others, and NATS itself, go on."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import GatewayFactory
from tests.harness import raw
from tests.harness.bystanders import Bystanders, Paho
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.proxy import Proxy
from tests.harness.raw import Raw, connect, publish
from tests.harness.waiting import eventually

RECOVERY = 40.0

CUT = 2.0  # seconds


@pytest.fixture
def proxy(nats_server: NatsServer) -> Iterator[Proxy]:
    with Proxy(nats_server.port) as found:
        yield found


@pytest.fixture
def behind(proxy: Proxy, gateway_factory: GatewayFactory) -> Gateway:
    """A gateway whose connection to NATS can be cut."""
    return gateway_factory(proxy.url)


@pytest.fixture
def beside(nats_server: NatsServer, gateway_factory: GatewayFactory) -> Iterator[Gateway]:
    """A gateway that is never cut off; its bystanders notice nothing."""
    gateway = gateway_factory(nats_server)
    with Bystanders(gateway.port) as bystanders:
        yield gateway
        bystanders.check()
    assert "connection to NATS is lost" not in gateway.log


class Stream:
    """Numbered messages at QoS 1 and 2, from a client of one gateway, until told to stop."""

    def __init__(self, port: int, name: str) -> None:
        self.client = Paho(port, f"stream-{name}")
        self.name = name
        self.sent: dict[int, list[bytes]] = {1: [], 2: []}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for number in itertools.count():
            if self._end.wait(0.005):
                return
            qos = 1 + number % 2
            self.sent[qos].append(b"%d" % number)
            self.client.publish(f"{self.name}/{qos}", b"%d" % number, qos)

    def finish(self) -> None:
        """Stop, and wait until everything is acknowledged."""
        self._end.set()
        self._thread.join(10)
        total = len(self.sent[1]) + len(self.sent[2])
        eventually(lambda: len(self.client.acknowledged) == total, RECOVERY, what="acknowledgements")
        assert self.client.disconnections == []
        self.client.close()

    def check(self, subscriber: Paho) -> None:
        """Everything has come, in order, at QoS 2 once."""
        for qos, sent in self.sent.items():
            topic = f"{self.name}/{qos}"

            def complete(topic: str = topic, sent: list[bytes] = sent) -> bool:
                missing = set(sent) - set(subscriber.payloads(topic))
                assert not missing, f"{len(missing)} of {len(sent)} missing: {sorted(map(int, missing))[:20]}"
                return True

            eventually(complete, RECOVERY, what=f"QoS {qos} of {self.name} at {subscriber.client_id}")
            got = subscriber.payloads(topic)
            once = list(dict.fromkeys(got))
            assert once == sent, f"order at {subscriber.client_id}"
            if qos == 2:
                assert once == got, f"repeated at {subscriber.client_id}"


def cut(proxy: Proxy, gateway: Gateway) -> None:
    count = gateway.log.count("connection to NATS is lost")
    proxy.cut()
    eventually(lambda: gateway.log.count("connection to NATS is lost") > count)
    end = time.monotonic() + CUT
    eventually(lambda: time.monotonic() > end)


def twice(proxy: Proxy, gateway: Gateway) -> None:
    """Lost again as soon as it is back, also in the middle of the repair."""
    for _ in range(4):
        count = gateway.log.count("connected to NATS again")
        proxy.cut()
        proxy.restore()
        eventually(lambda c=count: gateway.log.count("connected to NATS again") > c, RECOVERY)  # type: ignore[misc]


def stall(proxy: Proxy, gateway: Gateway) -> None:
    """Nothing arrives for a while, and nobody is told."""
    proxy.stall()
    end = time.monotonic() + 7.0  # longer than a request waits for its reply
    eventually(lambda: time.monotonic() > end)


@pytest.mark.slow
@pytest.mark.parametrize("how", [cut, twice, stall])
def test_what_a_gateway_missed_is_repaired(
    proxy: Proxy, behind: Gateway, beside: Gateway, how: Callable[[Proxy, Gateway], None]
) -> None:
    name = how.__name__
    with (
        Paho(behind.port, f"regular-{name}") as regular,
        Paho(behind.port, f"all-{name}") as everything,
        Paho(behind.port, f"durable-{name}", clean=False) as durable,
        Paho(behind.port, f"wild-{name}", clean=False) as wild,
        Paho(beside.port, f"beside-{name}", clean=False) as other,
    ):
        for subscriber in (regular, durable, other):
            subscriber.subscribe(f"from-beside-{name}/+", 2)
            subscriber.subscribe(f"from-behind-{name}/#", 2)
        everything.subscribe("#", 2)
        wild.subscribe("+/+", 2)
        streams = [Stream(beside.port, f"from-beside-{name}"), Stream(behind.port, f"from-behind-{name}")]
        eventually(lambda: len(regular.received) > 50)
        how(proxy, behind)
        proxy.restore()
        seen = len(regular.received)
        eventually(lambda: len(regular.received) > seen + 50, RECOVERY)
        for stream in streams:
            stream.finish()
        for subscriber in (regular, everything, durable, wild, other):
            for stream in streams:
                stream.check(subscriber)
            assert subscriber.disconnections == []
    for client_id in (f"durable-{name}", f"wild-{name}"):
        Raw.connected(behind.port, client_id).close()


@pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])
@pytest.mark.parametrize("anew", [True, False], ids=["clean", "resumed"])
def test_takeover_while_the_owner_is_cut_off(
    proxy: Proxy, behind: Gateway, beside: Gateway, clean: bool, anew: bool
) -> None:
    """The former owner learns of it when it is back, drops its client, and touches nothing of the session."""
    client_id = f"moved-{clean}-{anew}"
    topic = f"moved/{clean}/{anew}"
    with (
        Raw(behind.port, patience=RECOVERY) as former,
        Raw(beside.port, patience=RECOVERY) as owner,
        Raw.connected(beside.port) as publisher,
        Paho(beside.port) as witness,
    ):
        witness.subscribe("moved/will", 1)
        former.send(connect(client_id, flags=0x0C | (2 if clean else 0), tail=("moved/will", client_id)))
        assert former.expect(raw.CONNACK).body == b"\0\0"
        assert former.subscribe((topic, 2)) == [2]
        cut(proxy, behind)
        owner.send(connect(client_id, clean=anew))
        present = not clean and not anew
        assert owner.expect(raw.CONNACK).body == bytes((present, 0))
        if not present:
            assert owner.subscribe((topic, 2)) == [2]
        publisher.send(publish(topic, b"during", qos=1))
        publisher.expect(raw.PUBACK)
        one = owner.expect(raw.PUBLISH)
        assert one.payload == b"during"
        assert former.ping() == []
        former.send(publish(topic, b"from the former owner", qos=1, id=9))
        proxy.restore()
        assert {found.kind for found in former.expect_closed()} <= {raw.PUBACK, raw.PUBLISH}
        eventually(lambda: witness.payloads("moved/will") == [client_id.encode()])
        owner.send(raw.ack(raw.PUBACK, one.id))
        found = owner.ping()
        assert [one.payload for one in found if one.kind == raw.PUBLISH] in ([], [b"from the former owner"])
        publisher.send(publish(topic, b"after", qos=2, id=2))
        publisher.expect(raw.PUBREC)
        publisher.send(raw.ack(raw.PUBREL, 2))
        publisher.expect(raw.PUBCOMP)
        while (message := owner.expect(raw.PUBLISH)).payload == b"from the former owner":
            pass
        assert (message.payload, message.qos) == (b"after", 2)
        assert owner.subscribe((topic + "/more", 1), id=3) == [1]
    Raw.connected(beside.port, client_id).close()


def test_a_new_gateway_connection_is_made_and_no_other(proxy: Proxy, behind: Gateway, nats_server: NatsServer) -> None:
    """Three connections per gateway, after any number of cuts."""
    with Bystanders(behind.port) as bystanders:
        for number in range(5):
            proxy.cut()
            eventually(lambda n=number: behind.log.count("connection to NATS is lost") > n)  # type: ignore[misc]
            proxy.restore()
            eventually(lambda n=number: behind.log.count("connected to NATS again") > n, RECOVERY)  # type: ignore[misc]
        bystanders.check(lossy=True, timeout=RECOVERY)
    eventually(lambda: proxy.open == 3)
