# SPDX-License-Identifier: Apache-2.0
"""WebSocket: bad upgrades, bad frames, limits."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import GatewayFactory
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.waiting import eventually
from tests.transport.support import PATIENCE, ports
from tests.transport.web import CLOSE, CONTINUATION, PING, PONG, TEXT, Web, frame, request
from tests.transport.websocket_gateway import PACKET, TIMEOUT, Setup, greeted, serving


@pytest.fixture(scope="module")
def setup(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with serving(nats_server, tmp_path_factory.mktemp("web")) as found:
        yield found


def ended(client: socket.socket) -> bytes:
    client.settimeout(PATIENCE)
    data = b""
    try:
        while more := client.recv(4096):
            data += more
    except ConnectionResetError:
        pass
    return data


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request("/other"), 404),
        (request("/mqtt//"), 404),
        (request("//"), 404),
        (request("*"), 404),
        (request("/MQTT"), 404),
        (request("/%6dqtt"), 404),
        (request("http://gateway.test/mqtt"), 404),
        (request(method="POST"), 400),
        (request(method="CONNECT"), 400),
        (request(version="HTTP/1.0"), 505),
        (request(version="HTTP/9.9"), 505),
        (request(Upgrade=None), 400),
        (request(Upgrade="h2c"), 400),
        (request(Connection="keep-alive"), 400),
        (request(Connection=None), 400),
        (request(Sec_WebSocket_Key=None), 400),
        (request(Sec_WebSocket_Key="c2hvcnQ="), 400),
        (request(Sec_WebSocket_Key="no base64, 24 characters"), 400),
        (request(**{"sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="}), 400),  # a second one
        (request(Sec_WebSocket_Version=None), 400),
        (request(Sec_WebSocket_Version="8"), 426),
        (request(Sec_WebSocket_Protocol=None), 400),
        (request(Sec_WebSocket_Protocol="mqttv5.0"), 400),
        (request(Sec_WebSocket_Protocol="MQTT"), 400),
        (request(Sec_WebSocket_Protocol="\xff, mqtt"), 400),
        (request(Host=None), 400),
        (request(Host="\xff\xfe"), 400),
        (request(Host="xn--\xff.test"), 400),
        (request(Host="x" * 256), 400),
        (request(Host="gateway.test\r\n folded"), 400),
        (request()[:-4] + b"\n\r\n" + b"frames, for who takes this for the end" + b"\r\n\r\n", 400),
        (request(Connection="\xe9"), 400),
        (request(**{"X y": "z"}), 400),
        (request(Content_Length="x"), 400),
        (request("/mqtt\x00"), 400),
        (request(Long="x" * 20_000), 431),
        (b"x" * 20_000, 431),
        (b"GET /mqtt HTTP/1.1\r\n" + b"a: b\r\n" * 1300 + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: gateway.test\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (raw.connect("not-websocket") + b"\r\n\r\n", 400),
    ],
)
def test_bad_upgrades(setup: Setup, data: bytes, status: int) -> None:
    """One answer, the end, and nothing of it in the log but a line for those who want it."""
    with socket.create_connection(("127.0.0.1", setup.port), PATIENCE) as plain:
        plain.sendall(data)
        answer = ended(plain)
    assert answer.startswith(b"HTTP/1.1 %d" % status), answer
    assert b"connection: close" in answer.lower()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body.endswith(b"\n"), "it says why"
    assert b"content-length: %d\r\n" % len(body) in head.lower() + b"\r\n"
    if status == 426:
        assert b"sec-websocket-version: 13" in answer.lower()


SERVED = "the listener serves MQTT at /mqtt, / (setting `paths`)"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            request("/other?token=secret"),
            f"the path of the request is '/other'; {SERVED}",
        ),
        (request("/<script>"), f"the path of the request is '/<script>'; {SERVED}"),
        (request("/" + "x" * 5000), f"the path of the request is '/{'x' * 99}'; {SERVED}"),
        (request(Sec_WebSocket_Protocol=None), "the header Sec-WebSocket-Protocol is missing; a client of MQTT offers"),
        (
            request(Sec_WebSocket_Protocol="chat, v2"),
            "the header Sec-WebSocket-Protocol is 'chat, v2'; a client of ",
        ),
    ],
)
def test_what_is_wrong_is_said(setup: Setup, data: bytes, said: str) -> None:
    """To the client in the body, which no browser takes for a page, and to the operator in the log."""
    with socket.create_connection(("127.0.0.1", setup.port), PATIENCE) as plain:
        plain.sendall(data)
        head, _, body = ended(plain).partition(b"\r\n\r\n")
    assert body.decode().startswith(said)
    assert b"content-type: text/plain" in head.lower()
    assert b"x-content-type-options: nosniff" in head.lower()
    lines = [line for line in setup.gateway.log.splitlines() if said in line]
    assert lines
    assert " INFO mqtt_nats.listeners: " in lines[-1]
    assert "secret" not in setup.gateway.log


def test_an_answer_to_head_has_no_body(setup: Setup) -> None:
    with socket.create_connection(("127.0.0.1", setup.port), PATIENCE) as plain:
        plain.sendall(request(method="HEAD"))
        head, _, body = ended(plain).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert not body


@pytest.mark.parametrize(
    ("paths", "good", "bad"),
    [
        (None, ["/mqtt", "/mqtt/", "/", "/?x=y", "/mqtt/?x=y"], ["/ws", "/mqtt//", "//", "/mqtt/a"]),
        (["/ws", "/a/b/"], ["/ws", "/ws/", "/a/b", "/a/b/", "/ws?x=/mqtt"], ["/mqtt", "/", "/a", "/a/"]),
        (["*"], ["/mqtt", "/", "/whatever/else?x"], []),
    ],
)
def test_paths(
    nats_server: NatsServer,
    gateway_factory: GatewayFactory,
    tmp_path: Any,
    paths: list[str] | None,
    good: list[str],
    bad: list[str],
) -> None:
    config = tmp_path / "gateway.toml"
    lines = ["[[listeners]]", 'listen = "127.0.0.1:0"', 'type = "ws"']
    config.write_text("\n".join([*lines, *([f"paths = {paths}"] if paths else [])]))
    (port,) = ports(gateway_factory(nats_server, "--config", str(config)), "WS")
    for path, status in [*((one, b"101") for one in good), *((one, b"404") for one in bad)]:
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as plain:
            plain.sendall(request(path))
            assert plain.recv(12) == b"HTTP/1.1 " + status, path


@pytest.mark.parametrize(
    ("offered", "chosen"), [("mqttv3.1, mqtt", "mqtt"), ("mqtt", "mqtt"), ("mqttv3.1", "mqttv3.1")]
)
def test_subprotocols(setup: Setup, offered: str, chosen: str) -> None:
    with socket.create_connection(("127.0.0.1", setup.port), PATIENCE) as plain:
        plain.sendall(request(Sec_WebSocket_Protocol=offered))
        answer = plain.recv(4096)
    assert answer.startswith(b"HTTP/1.1 101")
    assert f"sec-websocket-protocol: {chosen}\r\n".encode() in answer.lower()


def test_a_query_does_not_matter(setup: Setup) -> None:
    with socket.create_connection(("127.0.0.1", setup.port), PATIENCE) as plain:
        plain.sendall(request("/mqtt?x=/y"))
        assert plain.recv(12) == b"HTTP/1.1 101"


@pytest.mark.long
@pytest.mark.parametrize("begun", [b"", b"GET /mq", request()[:-1], request()])
def test_what_is_not_completed(setup: Setup, begun: bytes) -> None:
    """Neither the upgrade nor CONNECT: both share the connect time-out."""
    since = time.monotonic()
    with socket.create_connection(("127.0.0.1", setup.port), PATIENCE) as plain:
        plain.sendall(begun)
        ended(plain)
    assert time.monotonic() - since > TIMEOUT * 0.9


BAD_FRAMES = {
    "text": (frame(raw.connect(), TEXT), 1003),
    "text that is no text": (frame(b"\xff", TEXT), 1007),
    "not masked": (frame(raw.connect(), mask=False), 1002),
    "reserved bit": (frame(raw.connect(), bits=0x40), 1002),
    "unknown kind": (frame(raw.connect(), 3), 1002),
    "unknown control frame": (frame(b"", 11), 1002),
    "continuation of nothing": (frame(raw.connect(), CONTINUATION), 1002),
    "begins in the middle": (frame(b"", fin=False) + frame(b""), 1002),
    "long ping": (frame(bytes(126), PING), 1002),
    "ping in fragments": (frame(b"x", PING, fin=False), 1002),
    "length that is too long": (b"\x82\xfe\x00\x01\0\0\0\0x", 1002),
    "length that is much too long": (b"\x82\xff\x00\x00\x00\x00\x00\x00\x00\x01\0\0\0\0x", 1002),
    "length beyond all": (b"\x82\xff" + b"\xff" * 8 + b"\0\0\0\0x", 1002),
    "close with half a code": (frame(b"\x03", CLOSE), 1002),
    "close with a code of nobody": (frame(b"\x03\xed", CLOSE), 1002),
    "close with a reason that is no text": (frame(b"\x03\xe8\xff", CLOSE), 1007),
}


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("name", BAD_FRAMES)
def test_bad_frames(setup: Setup, name: str, live: bool) -> None:
    """Close with a code, also for frames of text [MQTT-6.0.0-1] (3.1.1, 5.0); nothing that follows is looked at."""
    wire, code = BAD_FRAMES[name]
    with Raw.connected(setup.gateway.port, patience=PATIENCE) as other, Web(setup.port) as client:
        assert other.subscribe(("web/after", 0)) == [0]
        if live:
            greeted(client)
        client.wire(wire + frame(raw.publish("web/after", b"x")))
        assert client.closed() == code
        assert client.gone()
        assert other.ping() == []


def test_pongs_that_nobody_asked_for(setup: Setup) -> None:
    with Web(setup.port) as client:
        client.wire(frame(b"", PONG) + frame(b"x" * 125, PONG))
        greeted(client)
        assert client.ping() == []


@pytest.mark.parametrize("version", [4, 5])
def test_packets_that_are_too_large(setup: Setup, version: int) -> None:
    """Before CONNECT and after; whatever the frames are."""
    with Web(setup.port) as client:
        client.wire(frame(raw.packet(0x10, bytes(100_000))[:10]))
        assert client.closed() == 1000
    with Web(setup.port) as client:
        client.send(raw.connect() if version == 4 else raw5.connect())
        client.expect(raw.CONNACK)
        for at in range(0, PACKET, 50_000):
            client.wire(frame((raw.packet(0x30, b"\0\1a" + bytes(PACKET)))[at : at + 50_000]))
        found = client.expect_closed()
        assert [one.body[0] for one in found] == ([0x95] if version == 5 else [])
        assert client.framed.code == 1000


@pytest.mark.long
def test_too_many(setup: Setup) -> None:
    """Upgrades that are not complete count; who is one too many hears nothing."""
    with Web(setup.few) as first, socket.create_connection(("127.0.0.1", setup.few), PATIENCE) as half:
        greeted(first)
        half.sendall(b"GET")
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", setup.few), PATIENCE) as more:
                try:
                    more.sendall(request())
                except OSError:
                    pass
                assert ended(more) == b""
        assert first.ping() == []

    def room() -> bool:
        try:
            with Web(setup.few) as one, Web(setup.few) as two:
                greeted(one)
                greeted(two)
                return True
        except (AssertionError, OSError):
            return False

    assert eventually(room, PATIENCE)
    for data in (request("/"), b"x" * 20_000):  # refused ones do not count either
        for _ in range(4):
            with socket.create_connection(("127.0.0.1", setup.few), PATIENCE) as plain:
                plain.sendall(data)
                ended(plain)
    assert eventually(room, PATIENCE)
