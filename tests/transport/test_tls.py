# SPDX-License-Identifier: Apache-2.0
"""TLS: who gets in, who does not, and what it costs those who do not go on."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import paho.mqtt.client as paho
import psutil
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from tests.backbone.certificates import Authority, Pair
from tests.conftest import GatewayFactory
from tests.harness import raw, raw5
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
from tests.harness.paho import stop
from tests.harness.process import LoggedProcess, wait_ready
from tests.harness.raw import Raw
from tests.harness.raw5 import Raw5
from tests.harness.waiting import eventually, free_port
from tests.transport.support import NAME, PATIENCE, Secure, dial, ports, tls, trusting, write_config

TIMEOUT = 3.0
"""`connect_timeout` of these gateways."""


class Setup(NamedTuple):
    gateway: Gateway
    authority: Authority
    pair: Pair
    clients: Authority
    """Who vouches for clients at `strict`."""
    port: int
    strict: int
    """Asks for a certificate."""
    newest: int
    """Speaks nothing older than TLS 1.3."""
    few: int
    """Has two connections at most."""
    few_plain: int


@pytest.fixture(scope="module")
def setup(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    directory = tmp_path_factory.mktemp("tls")
    (directory / "clients").mkdir()
    authority, clients = Authority(directory), Authority(directory / "clients")
    pair = authority.issue(NAME)
    config = write_config(
        directory / "gateway.toml",
        tls(pair),
        tls(pair, tls_client_ca=clients.file),
        tls(pair, tls_minimum="1.3"),
        tls(pair, max_connections=2),
        {"listen": "127.0.0.1:0", "max_connections": 2},
    )
    gateway = Gateway(
        directory / "gateway.log",
        nats_server.url,
        arguments=("--config", config, "--connect-timeout", str(TIMEOUT), "--log-level", "debug"),
    )
    gateway.start()
    port, strict, newest, few = ports(gateway, "MQTTS")
    yield Setup(gateway, authority, pair, clients, port, strict, newest, few, ports(gateway, "MQTT")[1])
    assert gateway.term() == 0
    assert "Traceback" not in gateway.log
    gateway.process.discard()


def greeted(client: Raw, client_id: str = "") -> None:
    client.send(raw.connect(client_id))
    assert client.expect(raw.CONNACK).body == b"\0\0"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_both_versions(setup: Setup, version: ssl.TLSVersion) -> None:
    context = trusting(setup.authority)
    context.minimum_version = context.maximum_version = version
    with Secure(setup.port, context) as client, Raw.connected(setup.gateway.port) as other:
        assert isinstance(client.socket, ssl.SSLSocket)
        assert client.socket.version() == version.name.replace("v1_", "v1.")
        greeted(client)
        assert client.subscribe(("tls/#", 1)) == [1]
        payload = bytes(range(256)) * 1000
        other.send(raw.publish("tls/x", payload, qos=1, id=7))
        assert client.expect(raw.PUBLISH).payload == payload
        client.send(raw.packet(0xE0))
        client.expect_closed()


def test_large_messages(setup: Setup) -> None:
    """At QoS 0, from and to clients behind TLS and without."""
    with Secure(setup.port, trusting(setup.authority)) as client, Raw.connected(setup.gateway.port) as other:
        greeted(client)
        assert client.subscribe(("tls/large", 0)) == [0]
        assert other.subscribe(("tls/large", 0)) == [0]
        for number in range(6):
            payload = number.to_bytes(4, "big") * 100_000
            (client, other)[number % 2].send(raw.publish("tls/large", payload))
            assert client.expect(raw.PUBLISH).payload == payload
            assert other.expect(raw.PUBLISH).payload == payload


def test_every_byte_in_a_record_of_its_own(setup: Setup) -> None:
    with Secure(setup.port, trusting(setup.authority)) as client:
        for byte in raw.connect("bytes") + raw.publish("a", b"x", qos=1):
            client.send(bytes((byte,)))
        client.expect(raw.CONNACK)
        client.expect(raw.PUBACK)


def test_more_than_the_buffers_hold(setup: Setup) -> None:
    """A reader that stops for a while, on the other side of TLS, gets everything, in order."""
    context = trusting(setup.authority)
    total, size = 300, 60_000
    with Secure(setup.port, context) as reader, Secure(setup.port, context) as writer:
        greeted(reader, "slow-reader")
        greeted(writer, "writer")
        assert reader.subscribe(("flood", 1)) == [1]
        for number in range(total):
            writer.send(raw.publish("flood", number.to_bytes(4, "big") + bytes(size), qos=1, id=number + 1))
        for _ in range(total):
            assert writer.expect(raw.PUBACK, PATIENCE).kind == raw.PUBACK
        for number in range(total):
            message = reader.expect(raw.PUBLISH, PATIENCE)
            assert int.from_bytes(message.payload[:4], "big") == number
            reader.send(raw.ack(raw.PUBACK, message.id))


@pytest.mark.parametrize("protocol", [paho.MQTTv311, paho.MQTTv5])
def test_paho(setup: Setup, protocol: Any) -> None:
    client = paho.Client(CallbackAPIVersion.VERSION2, protocol=protocol)
    client.tls_set_context(trusting(setup.authority))
    got: list[bytes] = []
    subscribed: list[Any] = []
    client.on_message = lambda _client, _data, message: got.append(bytes(message.payload))
    client.on_subscribe = lambda _client, _data, _id, codes, _properties: subscribed.extend(codes)
    client.connect("127.0.0.1", setup.port)
    client.loop_start()
    try:
        eventually(client.is_connected, PATIENCE)
        client.subscribe("paho/tls", 2)
        eventually(lambda: subscribed, PATIENCE)
        client.publish("paho/tls", b"secret", 2)
        eventually(lambda: got == [b"secret"], PATIENCE)
    finally:
        client.disconnect()
        stop(client)


@pytest.mark.skipif(shutil.which("mosquitto_sub") is None, reason="mosquitto's clients are not installed")
@pytest.mark.parametrize("version", ["311", "5"])
def test_mosquitto(setup: Setup, version: str) -> None:
    """With a certificate of its own."""
    pair = setup.clients.issue("mosquitto")
    where = ["-h", "127.0.0.1", "-p", str(setup.strict), "--cafile", str(setup.authority.file), "-V", version]
    where += ["--cert", str(pair.certificate), "--key", str(pair.key), "-q", "1", "-t", f"mosquitto/{version}"]
    publish = ["mosquitto_pub", *where, "-r", "-m", "secret"]
    subprocess.run(publish, check=True, timeout=PATIENCE, capture_output=True)
    subscribe = ["mosquitto_sub", *where, "-C", "1"]
    found = subprocess.run(subscribe, check=True, timeout=PATIENCE, capture_output=True)
    assert found.stdout == b"secret\n"


def test_an_old_version_is_refused(setup: Setup) -> None:
    context = trusting(setup.authority)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        Secure(setup.newest, context)
    eventually(lambda: "failed: UNSUPPORTED_PROTOCOL" in setup.gateway.log, PATIENCE)
    with Secure(setup.newest, trusting(setup.authority)) as client:
        greeted(client)


def refused(setup: Setup, pair: Pair | None, why: str) -> None:
    """Connect with a certificate that is not accepted; in TLS 1.3 the client hears of it when it reads."""
    before = len(re.findall(why, setup.gateway.log))
    try:
        with Secure(setup.strict, trusting(setup.authority, pair)) as client:
            client.send(raw.connect())
            assert client.receive(PATIENCE) is None
    except (ssl.SSLError, ConnectionResetError):
        pass
    eventually(lambda: len(re.findall(why, setup.gateway.log)) > before, PATIENCE)


def test_client_certificates(setup: Setup, tmp_path: Path) -> None:
    good = setup.clients.issue("device")
    with Secure(setup.strict, trusting(setup.authority, good)) as client:
        greeted(client)
    refused(setup, None, "failed: PEER_DID_NOT_RETURN_A_CERTIFICATE")
    for other in (Authority(tmp_path).issue("device"), setup.authority.issue("not-a-client")):
        refused(setup, other, "failed: (unable to get local issuer|self.signed) certificate")


def test_a_certificate_that_has_ended(setup: Setup) -> None:
    late = setup.clients.issue("late", timedelta(minutes=-1))
    refused(setup, late, "failed: certificate has expired")


def test_a_client_that_does_not_trust_the_gateway(setup: Setup, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        Secure(setup.port, trusting(Authority(tmp_path)))
    eventually(lambda: "failed: TLSV1_ALERT_UNKNOWN_CA" in setup.gateway.log, PATIENCE)


def ended(client: socket.socket) -> bool:
    client.settimeout(PATIENCE)
    try:
        while client.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.long
@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01\x02\x00\x01"])
def test_a_handshake_that_is_not_completed(setup: Setup, begun: bytes) -> None:
    """Ends at the connect time-out, not before."""
    since = time.monotonic()
    with socket.create_connection(("127.0.0.1", setup.port)) as client:
        client.sendall(begun)
        assert ended(client)
    assert time.monotonic() - since > TIMEOUT * 0.9


@pytest.mark.long
def test_no_connect_after_the_handshake(setup: Setup) -> None:
    since = time.monotonic()
    with dial(setup.port, trusting(setup.authority)) as client:
        assert ended(client)
    assert time.monotonic() - since > TIMEOUT * 0.9


@pytest.mark.parametrize("data", [raw.connect("plain"), b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 100_000])
def test_what_is_not_tls(setup: Setup, data: bytes) -> None:
    """Is not MQTT either: it ends at once."""
    with socket.create_connection(("127.0.0.1", setup.port)) as client:
        try:
            client.sendall(data)
        except OSError:
            pass
        assert ended(client)


def test_tls_where_none_is_expected(setup: Setup) -> None:
    with pytest.raises((ssl.SSLError, ConnectionResetError)):
        dial(setup.gateway.port, trusting(setup.authority))


def test_a_client_that_leaves_in_the_middle(setup: Setup) -> None:
    """At every point of what it sends first, and without a handle_disconnect later."""
    for size in (0, 1, 4, 5, 6, 100):
        with socket.create_connection(("127.0.0.1", setup.port)) as plain:
            plain.sendall(b"\x16\x03\x01\x02\x00" + bytes(size))
    client = Secure(setup.port, trusting(setup.authority))
    greeted(client, "leaving")
    client.close()
    with Secure(setup.port, trusting(setup.authority)) as client:
        greeted(client)


@pytest.mark.long
def test_the_end_of_a_5_0_client_is_said_before_tls_ends(setup: Setup) -> None:
    """DISCONNECT arrives, then the end of TLS, whether the client agrees or not; what it sends then is ignored."""
    watch = Raw.connected(setup.gateway.port)
    assert watch.subscribe(("tls/late", 0)) == [0]
    for agrees in (True, False):
        client = Raw5(setup.gateway.port)
        client.close()
        client.socket = dial(setup.port, trusting(setup.authority))
        with client:
            client.send(raw5.connect("wrong-5"))
            assert client.expect(raw.CONNACK).body[1] == 0
            client.send(raw.packet(0x30, b"\0\0"))  # neither topic nor alias
            assert client.expect(raw.DISCONNECT, PATIENCE).body[0] == 0x81
            client.send(raw5.publish("tls/late", b"x"))
            if agrees:
                client.expect_closed(PATIENCE)
            else:
                plain = client.socket
                assert isinstance(plain, ssl.SSLSocket)
                raw_end = socket.socket(fileno=plain.detach())
                with raw_end:
                    assert ended(raw_end)
    assert watch.ping() == []
    watch.close()


def test_too_many_are_closed_before_their_handshake(setup: Setup) -> None:
    context = trusting(setup.authority)
    first = Secure(setup.few, context)
    greeted(first)
    with socket.create_connection(("127.0.0.1", setup.few)):  # counts, though it says nothing
        for _ in range(5):
            with pytest.raises((ssl.SSLError, ConnectionResetError, BrokenPipeError)):
                dial(setup.few, context)
    eventually(lambda: "has 2 connections: further connections are closed" in setup.gateway.log, PATIENCE)
    assert setup.gateway.log.count("further connections are closed") <= 2
    first.close()

    def room() -> bool:
        try:
            with Secure(setup.few, context) as one, Secure(setup.few, context) as other:
                greeted(one)
                greeted(other)
                return True
        except OSError:
            return False

    # Neither those that were refused nor those that are gone count.
    assert eventually(room, PATIENCE)


def test_too_many_without_tls(setup: Setup) -> None:
    with Raw.connected(setup.few_plain), socket.create_connection(("127.0.0.1", setup.few_plain)):
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", setup.few_plain)) as more:
                assert ended(more)
    with Raw.connected(setup.gateway.port):
        pass

    def room() -> bool:
        try:
            with Raw.connected(setup.few_plain), Raw.connected(setup.few_plain):
                return True
        except (AssertionError, OSError):
            return False

    assert eventually(room, PATIENCE)


def test_no_files_left(nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    """Nobody is accepted for a while, without turning in circles; then everybody is who has waited."""
    authority = Authority(tmp_path)
    config = write_config(tmp_path / "gateway.toml", tls(authority.issue(NAME)))
    gateway = gateway_factory(nats_server, "--config", config, "--connect-timeout", "60")
    (port,) = ports(gateway, "MQTTS")
    process = psutil.Process(gateway.pid)
    _, most = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 5, most))
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE)) for _ in range(20)]
        eventually(lambda: "accepting is paused: Too many open files" in gateway.log, PATIENCE)
        eventually(lambda: gateway.log.count("accepting is paused") > 1, PATIENCE)
        assert gateway.log.count("accepting is paused") < 20
        process.rlimit(psutil.RLIMIT_NOFILE, (most, most))
        for plain in waiting:
            stack.enter_context(trusting(authority).wrap_socket(plain, server_hostname=NAME))
    with Secure(port, trusting(authority)) as client:
        greeted(client)


def test_addresses(nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    """All that a name stands for, and one that somebody has."""
    authority = Authority(tmp_path)
    pair = authority.issue(NAME)
    names = {found[4][0] for found in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
    config = write_config(tmp_path / "gateway.toml", {**tls(pair), "listen": "localhost:0"})
    gateway = gateway_factory(nats_server, "--config", config)
    addresses = re.findall(r"\bMQTTS (\S+):(\d+) ", gateway.log, re.MULTILINE)
    assert {host.strip("[]") for host, _ in addresses} == names
    for host, port in addresses:
        plain = socket.create_connection((host.strip("[]"), int(port)), PATIENCE)
        trusting(authority).wrap_socket(plain, server_hostname=NAME).close()
    for workers in ("1", "2"):
        taken = write_config(tmp_path / "taken.toml", {**tls(pair), "listen": f"127.0.0.1:{gateway.port}"})
        other = gateway_factory(nats_server, "--config", taken, "--workers", workers, port=free_port(), start=False)
        other.launch()
        assert other.wait() == 1
        line = other.log.splitlines()[-1]
        assert line.startswith(f"mqtt-nats: cannot listen on 127.0.0.1:{gateway.port}: ")


@pytest.mark.long
def test_stopping(nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    """A gateway does not wait for handshakes, nor for clients that do not agree that TLS ends."""
    authority = Authority(tmp_path)
    config = write_config(tmp_path / "gateway.toml", tls(authority.issue(NAME)))
    gateway = gateway_factory(nats_server, "--config", config, "--connect-timeout", "60")
    (port,) = ports(gateway, "MQTTS")
    with socket.create_connection(("127.0.0.1", port)), Secure(port, trusting(authority)) as client:
        greeted(client)
        assert gateway.term() == 0
        client.expect_closed()
    assert "did not" not in gateway.log


def test_only_these(nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    """Without `listen` no port is open that was not asked for."""
    authority = Authority(tmp_path)
    config = write_config(tmp_path / "gateway.toml", tls(authority.issue(NAME)))
    process = LoggedProcess("gateway", tmp_path / "log")
    command = [sys.executable, "-m", "mqtt_nats", "serve", "--nats", nats_server.url, "--config", config]
    try:
        process.start(command, None, ROOT)
        port = int(wait_ready(process, r"\bMQTTS +127\.0\.0\.1:(\d+)  \(MQTT 3\.1\.1, 5\.0; TLS\)", PATIENCE))
        wait_ready(process, r"serving: (NATS) ", PATIENCE)
        assert "MQTT " not in process.text.partition("NATS")[0].replace("(MQTT ", "")
        assert "Try in other terminals" not in process.text
        with Secure(port, trusting(authority)) as client:
            greeted(client)
    finally:
        process.discard()
