# SPDX-License-Identifier: Apache-2.0
"""MQTT 3.1 (protocol name MQIsdp, level 3): served as 3.1.1, with what is different."""

import secrets
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import GatewayFactory
from tests.harness import raw
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw, connect, field, packet, publish, subscribe, unsubscribe


def old(port: int, client_id: str, *, clean: bool = True) -> tuple[Raw, raw.Received]:
    """A connection of MQTT 3.1, and its CONNACK."""
    client = Raw(port)
    client.send(connect(client_id, clean=clean, name=b"MQIsdp", level=3))
    return client, client.expect(raw.CONNACK)


@pytest.mark.parametrize("client_id", ["a", "x" * 24, f"{'long-' * 40}"])
def test_a_session_without_the_flag_session_present(gateway: Gateway, client_id: str) -> None:
    """Its CONNACK has no such flag; the session is there all the same. Client ids may have more than 23 characters."""
    client_id += secrets.token_hex(4)
    topic = f"old/{client_id[-8:]}"
    first, answer = old(gateway.port, client_id, clean=False)
    assert answer.body == b"\0\0"
    assert first.subscribe((topic, 2)) == [2]
    first.close()
    with Raw.connected(gateway.port) as other:
        for qos in (1, 2):
            other.send(publish(topic, b"%d" % qos, qos=qos))
            if qos == 2:
                other.expect(raw.PUBACK)
                other.expect(raw.PUBREC)
                other.send(raw.ack(raw.PUBREL, 1))
                other.expect(raw.PUBCOMP)
    again, answer = old(gateway.port, client_id, clean=False)
    with again:
        assert answer.body == b"\0\0"
        assert [again.expect(raw.PUBLISH).payload for _ in range(2)] == [b"1", b"2"]
    old(gateway.port, client_id)[0].close()


def test_what_is_sent_again_has_dup(gateway: Gateway) -> None:
    """SUBSCRIBE, UNSUBSCRIBE and PUBREL; 3.1.1 closes the connection for that."""
    client, answer = old(gateway.port, f"old-{secrets.token_hex(4)}")
    with client:
        assert answer.body == b"\0\0"
        topic = f"old/{secrets.token_hex(4)}"
        for _ in range(2):
            client.send(b"\x8a" + subscribe((topic, 2))[1:])
            assert client.expect(raw.SUBACK).body == b"\0\1\2"
        client.send(publish(topic, b"x", qos=2, id=9))
        client.expect(raw.PUBREC)
        for wanted in ([raw.PUBLISH, raw.PUBCOMP], [raw.PUBCOMP]):
            client.send(b"\x6a\x02\x00\x09")
            assert sorted(one.kind for _ in wanted if (one := client.receive()) is not None) == wanted
        client.send(b"\xaa" + unsubscribe(topic)[1:])
        assert client.expect(raw.UNSUBACK).id == 1
    for data in (b"\x8a" + subscribe((topic, 2))[1:], b"\xaa" + unsubscribe(topic)[1:], b"\x6a\x02\x00\x09"):
        with Raw.connected(gateway.port) as new:
            new.send(data)
            assert new.expect_closed() == []


def test_an_empty_client_id(gateway: Gateway) -> None:
    for clean in (True, False):
        client, answer = old(gateway.port, "", clean=clean)
        with client:
            assert answer.body == b"\0\2"
            assert client.receive() is None


def test_names_that_are_missing(gateway: Gateway) -> None:
    """Their flags may be set all the same: the remaining length counts."""
    with Raw(gateway.port) as client:
        client.send(packet(0x10, field("MQIsdp") + b"\x03\xc2\x00\x3c" + field(f"old-{secrets.token_hex(4)}")))
        assert client.expect(raw.CONNACK).body == b"\0\0"
        assert client.ping() == []


def test_a_subscription_that_is_refused(
    nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """SUBACK cannot say that: it has the QoS that was asked for, and nothing comes."""
    acl = tmp_path / "acl.toml"
    acl.write_text('[[rules]]\neffect = "allow"\ntopics = "good/#"\n')
    gateway = gateway_factory(nats_server, env={"MQTT_NATS_ACL_FILE": str(acl)})
    client, _ = old(gateway.port, "old")
    with client, Raw.connected(gateway.port) as other:
        assert client.subscribe(("bad/x", 1), ("good/x", 2), ("$JS/x", 0)) == [1, 2, 0]
        assert other.subscribe(("bad/x", 1), ("good/x", 2)) == [128, 2]
        other.send(publish("bad/x", b"bad") + publish("good/x", b"good"))
        assert client.expect(raw.PUBLISH).payload == b"good"
    assert "denied: subscription of 'bad/x' at QoS 1; client 'old'" in gateway.log


@pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="mosquitto's clients are not installed")
@pytest.mark.parametrize("qos", ["0", "1", "2"])
def test_mosquitto_clients(gateway: Gateway, qos: str) -> None:
    topic = f"old/{secrets.token_hex(4)}"
    tail = ["-h", "127.0.0.1", "-p", str(gateway.port), "-V", "mqttv31", "-t", topic, "-q", qos]
    subprocess.run(["mosquitto_pub", *tail, "-m", "hello", "-r", "-i", f"pub-{topic}"], check=True, timeout=30)
    heard = subprocess.run(
        ["mosquitto_sub", *tail, "-C", "1", "-i", f"sub-{topic}"],
        check=True,
        timeout=30,
        capture_output=True,
        text=True,
    )
    assert heard.stdout == "hello\n"
