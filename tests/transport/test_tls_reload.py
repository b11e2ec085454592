# SPDX-License-Identifier: Apache-2.0
"""SIGHUP: certificates are read again, and no connection is dropped."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from mqtt_nats.base.errors import StartupError
from mqtt_nats.transport.listener_settings import ListenerSettings
from mqtt_nats.transport.tls import make_context
from tests.backbone.certificates import Authority, Pair
from tests.conftest import GatewayFactory
from tests.gateway.test_supervisor import workers as worker_processes
from tests.harness import raw
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
from tests.harness.raw import Raw
from tests.harness.waiting import eventually
from tests.transport.support import NAME, PATIENCE, Secure, ports, tls, trusting, write_config


class Place:
    """The files of one listener, which change."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        self.pair = Pair(directory / "cert.pem", directory / "key.pem")
        self.trusted = directory / "clients.pem"
        self.number = 0
        self.renew()

    def renew(self) -> None:
        """A new certificate, in the same files."""
        self.number += 1
        found = self.authority.issue(NAME)
        shutil.copy(found.certificate, self.pair.certificate)
        shutil.copy(found.key, self.pair.key)

    def serial(self, port: int) -> int:
        """Which certificate new connections are shown."""
        with Secure(port, trusting(self.authority)) as client:
            return client.serial


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "tls").mkdir()
    return Place(tmp_path / "tls")


def start(place: Place, nats_server: NatsServer, factory: GatewayFactory, tmp_path: Path, *more: str) -> Gateway:
    config = write_config(tmp_path / "gateway.toml", tls(place.pair), tls(place.pair))
    return factory(nats_server, "--config", config, *more)


@contextlib.contextmanager
def connected(place: Place, gateway: Gateway, count: int) -> Iterator[list[Raw]]:
    """Clients with a subscription each, on every listener."""
    with contextlib.ExitStack() as stack:
        found: list[Raw] = []
        for number in range(count):
            for port in ports(gateway, "MQTTS"):
                client: Raw = stack.enter_context(Secure(port, trusting(place.authority)))
                client.send(raw.connect(f"stays-{number}-{port}"))
                assert client.expect(raw.CONNACK).body == b"\0\0"
                found.append(client)
            found.append(stack.enter_context(Raw.connected(gateway.port, f"stays-{number}")))
        for number, client in enumerate(found):
            assert client.subscribe((f"stays/{number}", 1)) == [1]
        yield found


def unharmed(clients: list[Raw], payload: bytes) -> None:
    for number, client in enumerate(clients):
        client.send(raw.publish(f"stays/{number}", payload, qos=1, id=9))
        kinds = {client.receive(PATIENCE), client.receive(PATIENCE)}
        assert {one.kind for one in kinds if one} == {raw.PUBACK, raw.PUBLISH}
        client.send(raw.ack(raw.PUBACK, next(one.id for one in kinds if one and one.kind == raw.PUBLISH)))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_new_certificate(
    place: Place, nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path, workers: int
) -> None:
    gateway = start(place, nats_server, gateway_factory, tmp_path, "--workers", str(workers))
    first, second = ports(gateway, "MQTTS")
    before = place.serial(first)
    with connected(place, gateway, 4) as clients:
        unharmed(clients, b"before")
        place.renew()
        assert place.serial(first) == before  # nothing happens by itself
        gateway.process.send(signal.SIGHUP)
        eventually(lambda: gateway.log.count("files are read again") == workers, PATIENCE)
        for port in (first, second):
            # Which worker a connection gets is up to the kernel.
            assert before not in {place.serial(port) for _ in range(8 * workers)}
        unharmed(clients, b"after")
    assert gateway.term() == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_what_cannot_be_used_changes_nothing(
    place: Place, nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path, workers: int
) -> None:
    gateway = start(place, nats_server, gateway_factory, tmp_path, "--workers", str(workers))
    first, second = ports(gateway, "MQTTS")
    before = place.serial(first)
    with connected(place, gateway, 2) as clients:
        for number, (spoil, text) in enumerate(SPOILT.items()):
            place.renew()
            spoil(place)
            gateway.process.send(signal.SIGHUP)
            count = 2 * workers
            eventually(lambda text=text, count=count: gateway.log.count(text) == count, PATIENCE, what=text)  # type: ignore[misc]
            assert {place.serial(first), place.serial(second)} == {before}
            unharmed(clients, b"%d" % number)
        errors = [line for line in gateway.log.splitlines() if " ERROR " in line]
        assert len(errors) == 2 * workers * len(SPOILT)
        place.pair.certificate.unlink(missing_ok=True)
        place.renew()
        gateway.process.send(signal.SIGHUP)
        eventually(lambda: place.serial(first) != before, PATIENCE)
        unharmed(clients, b"last")


def no_certificate(place: Place) -> None:
    place.pair.certificate.unlink()


def no_pem(place: Place) -> None:
    place.pair.certificate.write_bytes(b"\0" * 1000)


def half_of_it(place: Place) -> None:
    text = place.pair.certificate.read_bytes()
    place.pair.certificate.write_bytes(text[: len(text) // 2])


def another_key(place: Place) -> None:
    shutil.copy(place.authority.issue("other").key, place.pair.key)


def encrypted_key(place: Place) -> None:
    key = serialization.load_pem_private_key(place.pair.key.read_bytes(), None)
    how = serialization.BestAvailableEncryption(b"passphrase")
    place.pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how))


SPOILT: dict[Callable[[Place], None], str] = {
    no_certificate: "No such file or directory",
    another_key: "the key belongs to another certificate",
    encrypted_key: "the key is encrypted",
    no_pem: "expected PEM files",
}


@pytest.mark.parametrize(("spoil", "text"), [*SPOILT.items(), (half_of_it, "expected PEM files")])
def test_what_is_said(place: Place, spoil: Callable[[Place], None], text: str) -> None:
    settings = ListenerSettings.model_validate(tls(place.pair))
    make_context(settings)
    spoil(place)
    with pytest.raises(StartupError) as caught:
        make_context(settings)
    message = str(caught.value)
    assert text in message
    assert "\n" not in message
    assert message.startswith("listener 127.0.0.1:0: ")
    assert str(place.pair.certificate) in message


@pytest.mark.parametrize(("content", "text"), [(None, "cannot read"), (b"", "expected a PEM file of"), (b"x", "PEM")])
def test_authorities_that_cannot_be_used(place: Place, content: bytes | None, text: str) -> None:
    place.trusted.write_bytes(b"")
    settings = ListenerSettings.model_validate(tls(place.pair, tls_client_ca=place.trusted))
    if content is None:
        place.trusted.unlink()
    else:
        place.trusted.write_bytes(content)
    with pytest.raises(StartupError, match=text) as caught:
        make_context(settings)
    assert str(place.trusted) in str(caught.value)


@pytest.mark.long
def test_a_gateway_does_not_start_with_a_bad_certificate(
    place: Place, nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    another_key(place)
    for workers in ("1", "2"):
        config = write_config(tmp_path / "gateway.toml", tls(place.pair))
        gateway = gateway_factory(nats_server, "--config", config, "--workers", workers, start=False)
        gateway.launch()
        assert gateway.wait() == 1
        (line,) = gateway.log.splitlines()
        assert line.startswith("mqtt-nats: listener 127.0.0.1:")
        assert line.endswith("the key belongs to another certificate")


def test_other_clients_are_trusted(
    place: Place, nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """Those who were connected are disconnected; a session of TLS from before does not let anybody in."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    former, latter = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    place.trusted.write_bytes(former.file.read_bytes())
    config = write_config(tmp_path / "gateway.toml", tls(place.pair, tls_client_ca=place.trusted))
    gateway = gateway_factory(nats_server, "--config", config)
    (port,) = ports(gateway, "MQTTS")
    old = trusting(place.authority, former.issue("old"))
    new = trusting(place.authority, latter.issue("new"))

    def let_in(context: ssl.SSLContext) -> bool:
        try:
            with Secure(port, context) as client:
                client.send(raw.connect())
                found = client.receive(PATIENCE)
                return found is not None and found.kind == raw.CONNACK
        except (ssl.SSLError, ConnectionResetError):
            return False

    with Secure(port, old) as client:
        client.send(raw.connect("stays"))
        assert client.expect(raw.CONNACK).body == b"\0\0"
        assert client.ping() == []
        assert isinstance(client.socket, ssl.SSLSocket)
        session = client.socket.session
        assert let_in(old)
        assert not let_in(new)
        place.trusted.write_bytes(latter.file.read_bytes())
        gateway.process.send(signal.SIGHUP)
        eventually(lambda: let_in(new), PATIENCE)
        assert not let_in(old)
        assert client.expect_closed(PATIENCE) == []
        resumed = old.wrap_socket(
            socket.create_connection(("127.0.0.1", port), PATIENCE), server_hostname=NAME, session=session
        )
        with resumed:
            try:
                resumed.sendall(raw.connect())
                assert resumed.recv(10) == b""
            except (ssl.SSLError, ConnectionResetError):
                pass


@pytest.mark.long
def test_a_worker_that_was_being_started(
    place: Place, nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """Is told when it is ready, and SIGHUP does not end it."""
    gateway = start(place, nats_server, gateway_factory, tmp_path, "--workers", "2")
    first, _ = ports(gateway, "MQTTS")
    before = place.serial(first)
    old = set(worker_processes(gateway))
    os.kill(min(old), signal.SIGKILL)
    eventually(lambda: "it is started again" in gateway.log, PATIENCE)
    place.renew()
    gateway.process.send(signal.SIGHUP)
    eventually(lambda: len(worker_processes(gateway)) == 2 and set(worker_processes(gateway)) != old, PATIENCE)
    eventually(lambda: before not in {place.serial(first) for _ in range(16)}, PATIENCE)
    assert gateway.log.count("it is started again") == 1


def test_nothing_to_read_again(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    gateway = gateway_factory(nats_server)
    with Raw.connected(gateway.port) as client:
        gateway.process.send(signal.SIGHUP)
        eventually(lambda: "files are read again" in gateway.log, PATIENCE)
        assert client.ping() == []
    assert gateway.term() == 0


def test_before_it_has_started(gateway_factory: GatewayFactory) -> None:
    """SIGHUP does not end a gateway that waits for NATS to answer; its end is as always."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        gateway = gateway_factory(f"nats://127.0.0.1:{silent.getsockname()[1]}", start=False)
        gateway.launch()
        silent.settimeout(PATIENCE)
        accepted, _ = silent.accept()
        with accepted:
            gateway.process.send(signal.SIGHUP)
            eventually(lambda: "files are read again" in gateway.log, PATIENCE)
            assert gateway.process.alive
            gateway.process.send(signal.SIGTERM)
            assert gateway.wait() == 0


@pytest.mark.long
def test_the_terminal_is_closed(nats_server: NatsServer, tmp_path: Path) -> None:
    """That is what the signal was invented for: the gateway ends in good order."""
    master, slave = pty.openpty()
    log = tmp_path / "log"
    code = "import fcntl, termios, runpy; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    code += "runpy.run_module('mqtt_nats', run_name='__main__')"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "--listen", "127.0.0.1:0", "--nats", nats_server.url],
            stdin=slave,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        os.close(slave)
        eventually(lambda: b"serving: MQTT" in log.read_bytes(), PATIENCE)
        process.send_signal(signal.SIGHUP)  # not because of the terminal
        eventually(lambda: b"files are read again" in log.read_bytes(), PATIENCE)
        os.close(master)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
