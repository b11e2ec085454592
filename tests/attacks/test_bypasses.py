# SPDX-License-Identifier: Apache-2.0
"""Ways around what is denied, and to what is nobody's business: all are refused, and the log says so."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.base.support import PATIENCE, Inside, running
from tests.conftest import GatewayFactory
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import ALIAS, RESPONSE_TOPIC, Raw5, prop
from tests.harness.waiting import eventually

NOT_AUTHORIZED = 0x87

RULES = """
[[rules]]
effect = "deny"
topics = ["secret/#", "$SYS/#"]

[[rules]]
effect = "allow"
topics = ["#", "$own/%c/#"]
"""

INTERNAL = (
    "$MQTT/sess/#",
    "$MQTT/msgs/secret/x",
    "$MQTT/sub/#",
    "$MQTT/qos2/in/#",
    "$MQTT/rmsgs/#",
    "$MQTT/#",
    "$JS/API/#",
    "$JS/API/STREAM/DELETE/$MQTT_sess",
    "$JS/ACK/#",
    "$KV/MQTT_bans/#",
    "$KV/#",
    "$SYS/REQ/#",
    "_INBOX/#",
    "$G/#",
)
"""What is behind gateways and JetStream."""


@pytest.fixture(scope="module")
def inside(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    file: Path = tmp_path_factory.mktemp("rules") / "acl.toml"
    file.write_text(RULES, encoding="utf-8")
    with running(nats_server.url, acl_file=file) as found:
        yield found


@pytest.fixture
def port(inside: Inside) -> int:
    return inside.ports[0]


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("prefix", ["", "$share/g/"])
def test_internal_subjects(port: int, prefix: str, qos: int) -> None:
    """A rule that allows everything allows none of them; nor does one that denies something open a way round."""
    with Raw5.open(port, f"spy-{qos}", clean=False) as client:
        codes = client.subscribed(*((prefix + text, qos) for text in INTERNAL))
        assert all(code >= 0x80 for code in codes), dict(zip(INTERNAL, codes, strict=True))
        client.send(raw5.publish("x", b"", qos=1))
        client.answer(raw5.PUBACK, 1)
        client.quiet()


@pytest.mark.parametrize("topic", [text.removesuffix("/#") + "/x" for text in INTERNAL])
def test_internal_subjects_are_not_published(port: int, topic: str) -> None:
    """At QoS 1 and 2 it is said in the answer, or the connection ends; nothing is passed on."""
    with Raw5.open(port) as client:
        client.send(raw5.publish(topic, b"{}", qos=1))
        found = client.receive(PATIENCE)
        assert found is not None
        assert raw5.answer(found).reason >= 0x80
    with Raw(port, patience=PATIENCE) as stranger:
        stranger.send(raw5.connect("w", flags=0x24, tail=raw5.will(topic, b"{}")))
        assert raw5.answer(stranger.expect(raw.CONNACK)).reason >= 0x80


@pytest.mark.parametrize(
    "text",
    [
        "secret/x",
        "secret",
        "secret/#",
        "#",
        "+/x",
        "+/+",
        "+/#",
        "$share/g/secret/x",
        "$share/g/#",
    ],
)
def test_what_touches_something_denied(port: int, text: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mqtt_nats.audit")
    with Raw5.open(port, "curious") as client:
        (code,) = client.subscribed((text, 1))
        assert code == NOT_AUTHORIZED
        client.quiet()
    eventually(lambda: "denied: subscription of" in caplog.text and "'curious'" in caplog.text, PATIENCE)


def test_ways_to_publish_what_is_denied(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """An alias that a denied publish has set, a retained message, a will, a response topic."""
    caplog.set_level(logging.WARNING, "mqtt_nats.audit")
    with Raw5.open(port, "sly") as sly:
        sly.send(raw5.publish("secret/x", b"a", prop(ALIAS, 1), qos=1, id=1))
        sly.answer(raw5.PUBACK, 1, NOT_AUTHORIZED)
        sly.send(raw5.publish("", b"b", prop(ALIAS, 1), qos=1, id=2))
        sly.answer(raw5.PUBACK, 2, NOT_AUTHORIZED)
        sly.send(raw5.publish("", b"c", prop(ALIAS, 1), qos=2, id=3))
        sly.answer(raw5.PUBREC, 3, NOT_AUTHORIZED)
        sly.send(raw5.publish("secret/x", b"d", qos=1, id=4, flags=1))
        sly.answer(raw5.PUBACK, 4, NOT_AUTHORIZED)
        sly.quiet()
    for tail in (raw5.will("secret/x", b"e"), raw5.will("fine", b"f", prop(RESPONSE_TOPIC, "secret/x"))):
        with Raw(port, patience=PATIENCE) as client:
            client.send(raw5.connect("w", flags=4, tail=tail))
            assert raw5.answer(client.expect(raw.CONNACK)).reason == NOT_AUTHORIZED
    eventually(lambda: "denied: publish on 'secret/x' at QoS 2; client 'sly', anonymous" in caplog.text, PATIENCE)
    eventually(lambda: "denied: retained publish on 'secret/x'" in caplog.text, PATIENCE)


def test_an_identifier_that_is_being_released(port: int) -> None:
    """[MQTT-4.3.3-12] (5.0): the publish behind the PUBREL is another one, and is held against the rules."""
    with Raw5.open(port, "again") as client:
        for _ in range(20):
            client.send(raw5.publish("fine", b"a", qos=2, id=1))
            client.answer(raw5.PUBREC, 1)
            client.send(raw.ack(raw.PUBREL, 1) + raw5.publish("secret/x", b"b", qos=2, id=1))
            client.answer(raw5.PUBCOMP, 1)
            client.answer(raw5.PUBREC, 1, NOT_AUTHORIZED)
        client.quiet()


@pytest.mark.parametrize("client_id", ["+", "#", "a/b", "+/#", "%c", "%u", "x\u0130"])
def test_client_ids_that_are_patterns(port: int, client_id: str) -> None:
    """A name that is put into a rule is never more than one plain level of it."""
    with Raw5.open(port, client_id) as client:
        codes = client.subscribed(("$own/someone/x", 0), ("$own/+/x", 0), ("$own/#", 0), ("$own/a/b/x", 0))
        assert all(code == NOT_AUTHORIZED for code in codes), codes


def test_passwords_are_shown_nowhere(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """Not in the log at its most talkative, whatever becomes of the CONNECT."""
    gateway = gateway_factory(nats_server, "--log-level", "debug")
    secret = "hunter2-very-secret"
    tails: list[tuple[str | bytes, ...]] = [("user", secret), ("user", secret.encode())]
    for flags, tail, end in itertools.product((0xC2, 0xC3), tails, (b"", b"more")):
        data = raw.connect("teller", flags=flags, tail=tail) + end
        with Raw(gateway.port, patience=PATIENCE) as client:
            client.send(data + raw.publish("x", b"y") + raw.packet(0xE0))
            client.socket.shutdown(1)
            client.expect_closed(PATIENCE)
    for data in (
        raw5.connect("teller", flags=0xC0, tail=raw.field("user") + raw.field(secret)),
        raw5.connect("teller", flags=0xC0, tail=raw.field("user") + raw.field(secret))[:-1],
    ):
        with Raw(gateway.port, patience=PATIENCE) as client:
            client.send(data)
            client.socket.shutdown(1)
            client.expect_closed(PATIENCE)
    assert gateway.term() == 0
    assert "teller" in gateway.log
    assert secret not in gateway.log
    assert secret[:7] not in gateway.log
