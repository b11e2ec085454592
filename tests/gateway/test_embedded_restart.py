# SPDX-License-Identifier: Apache-2.0
"""The embedded nats-server is killed under a gateway: it is started again, and clients stay connected."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.conftest import GatewayFactory
from tests.harness import raw
from tests.harness.gateway import Gateway
from tests.harness.raw import Raw, ack, publish
from tests.harness.waiting import eventually

RUNS_AGAIN = "the embedded nats-server runs again"


def kill_server(gateway: Gateway) -> None:
    (server,) = [one for one in psutil.Process(gateway.pid).children() if one.name() == "nats-server"]
    server.kill()


def has_restarted(gateway: Gateway, times: int) -> bool:
    return gateway.log.count(RUNS_AGAIN) == times


@pytest.fixture
def embedded(gateway_factory: GatewayFactory, tmp_path: Path) -> Gateway:
    return gateway_factory("", "--embedded", "--embedded-port", "0", "--data", str(tmp_path / "data"))


def store(client: Raw, payload: bytes, qos: int, id: int) -> None:
    """Publish and wait for the last acknowledgement."""
    client.send(publish("t", payload, qos=qos, id=id))
    client.expect(raw.PUBACK if qos == 1 else raw.PUBREC)
    if qos == 2:
        client.send(ack(raw.PUBREL, id))
        client.expect(raw.PUBCOMP)


def received(client: Raw, qos: int, number: int) -> list[bytes]:
    """Payloads of so many messages, each acknowledged as its QoS asks for."""
    found, complete = [], 0
    while complete < number:
        one = client.receive()
        assert one is not None
        if one.kind == raw.PUBREL:
            client.send(ack(raw.PUBCOMP, one.id))
            complete += 1
            continue
        assert (one.kind, one.qos) == (raw.PUBLISH, qos)
        found.append(one.payload)
        client.send(ack(raw.PUBACK if qos == 1 else raw.PUBREC, one.id))
        complete += qos == 1
    return found


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("clean", [True, False])
def test_clients_stay_and_what_they_publish_meanwhile_arrives(embedded: Gateway, qos: int, clean: bool) -> None:
    with (
        Raw.connected(embedded.port, "subscriber", clean=clean) as subscriber,
        Raw.connected(embedded.port, "publisher") as publisher,
    ):
        assert subscriber.subscribe(("t", qos)) == [qos]
        store(publisher, b"before", qos, 1)
        kill_server(embedded)
        eventually(lambda: "the connection to NATS is lost" in embedded.log)
        store(publisher, b"meanwhile", qos, 2)
        store(publisher, b"after", qos, 3)
        assert received(subscriber, qos, 3) == [b"before", b"meanwhile", b"after"]
    assert embedded.log.count("was ended by signal 9") == 1
    assert embedded.log.count(RUNS_AGAIN) == 1
    assert embedded.term() == 0


@pytest.mark.long
def test_after_too_many_restarts_clients_are_told_and_the_gateway_ends(embedded: Gateway) -> None:
    with Raw.connected(embedded.port, "client", clean=False) as client:
        assert client.subscribe(("t", 1)) == [1]
        for number in range(1, 6):
            kill_server(embedded)
            eventually(partial(has_restarted, embedded, number))
        kill_server(embedded)
        assert client.receive() is None
    assert embedded.wait() == 1
    assert "mqtt-nats: the embedded nats-server was ended by signal 9" in embedded.log
    assert "it was restarted 5 times within 60 s" in embedded.log.splitlines()[-1]
    assert "never awaited" not in embedded.log
