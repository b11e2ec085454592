# SPDX-License-Identifier: Apache-2.0
"""Certificates of clients that end, whose authority is withdrawn, or that are revoked: they let nobody in, or stay."""

from __future__ import annotations

import contextlib
import signal
import ssl
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.backbone.certificates import Authority, Pair
from tests.conftest import GatewayFactory
from tests.harness import raw5
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw5 import Raw5
from tests.harness.waiting import eventually
from tests.transport.support import NAME, PATIENCE, ports, tls, trusting, write_config

NOT_AUTHORIZED, EXPIRED = 0x87, 0xA0
SHORT = timedelta(seconds=4)
LONGEST = 20.0


class Secure5(Raw5):
    """A 5.0 client by TLS, whose CONNECT was accepted."""

    def __init__(self, port: int, context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> None:
        super().__init__(port, patience=PATIENCE)
        try:
            self.socket = context.wrap_socket(self.socket, server_hostname=NAME, session=session)
            self.send(raw5.connect(""))
            self.connack = self.answer(raw5.CONNACK, reason=0)
        except BaseException:
            self.close()
            raise

    @property
    def tls(self) -> ssl.SSLSocket:
        assert isinstance(self.socket, ssl.SSLSocket)
        return self.socket


class Place:
    """A gateway with a listener for clients of two authorities, whose files change."""

    def __init__(self, directory: Path, *, lists: bool, identity: bool = False) -> None:
        for name in ("own", "first", "second"):
            (directory / name).mkdir()
        self.own = Authority(directory / "own")
        self.first = Authority(directory / "first", "first authority")
        self.second = Authority(directory / "second", "second authority")
        self.trusted, self.lists = directory / "clients.pem", directory / "lists.pem"
        self.trust(self.first, self.second)
        self.revoke()
        self.config = directory / "gateway.toml"
        more: dict[str, Path | str] = {"tls_crl_file": self.lists} if lists else {}
        more |= {"use_identity": "cn"} if identity else {}
        pair = self.own.issue(NAME)
        write_config(self.config, tls(pair, tls_client_ca=self.trusted, **more))
        self.gateway: Gateway | None = None

    def trust(self, *authorities: Authority) -> None:
        self.trusted.write_bytes(b"".join(one.file.read_bytes() for one in authorities))

    def revoke(self, *pairs: Pair, lifetime: timedelta = timedelta(days=1)) -> None:
        """Of the first authority."""
        lists = self.first.revocations(*pairs, lifetime=lifetime), self.second.revocations(lifetime=lifetime)
        self.lists.write_bytes(b"".join(lists))

    @property
    def running(self) -> Gateway:
        assert self.gateway is not None
        return self.gateway

    @property
    def port(self) -> int:
        return ports(self.running, "MQTTS")[0]

    def client(self, pair: Pair, session: ssl.SSLSession | None = None) -> Secure5:
        return Secure5(self.port, self.context(pair), session)

    def context(self, pair: Pair) -> ssl.SSLContext:
        return trusting(self.own, pair)

    def reload(self) -> None:
        before = self.running.log.count("files are read again")
        self.running.process.send(signal.SIGHUP)
        eventually(lambda: self.running.log.count("files are read again") > before, PATIENCE)

    def refused(self, pair: Pair, why: str) -> None:
        """A handshake fails for this reason."""
        text = f"failed: {why}"
        before = self.running.log.count(text)
        with pytest.raises((OSError, AssertionError)):
            self.client(pair)
        eventually(lambda: self.running.log.count(text) > before, PATIENCE)


@contextlib.contextmanager
def started(place: Place, nats_server: NatsServer, factory: GatewayFactory, *more: str) -> Iterator[Place]:
    place.gateway = factory(nats_server, "--config", str(place.config), "--log-level", "debug", *more)
    yield place
    assert place.gateway.term() == 0


@pytest.fixture
def place(tmp_path: Path, nats_server: NatsServer, gateway_factory: GatewayFactory) -> Iterator[Place]:
    with started(Place(tmp_path, lists=False), nats_server, gateway_factory) as found:
        yield found


@pytest.fixture
def listed(tmp_path: Path, nats_server: NatsServer, gateway_factory: GatewayFactory) -> Iterator[Place]:
    with started(Place(tmp_path, lists=True), nats_server, gateway_factory) as found:
        yield found


@pytest.mark.long
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
def test_a_session_of_tls_does_not_outlive_its_certificate(place: Place, version: ssl.TLSVersion) -> None:
    """OpenSSL does not verify a certificate again when it resumes a session."""
    pair = place.first.issue("resumes", SHORT)
    context = place.context(pair)
    context.maximum_version = version
    with Secure5(place.port, context) as client:
        assert client.ping() == []  # the tickets of TLS 1.3 have come
        session = client.tls.session

    def ended() -> bool:
        try:
            with Secure5(place.port, context, session) as again:
                assert not again.tls.session_reused
                return False
        except (OSError, AssertionError):
            return True

    eventually(ended, LONGEST)
    for known in (session, None):
        with pytest.raises((OSError, AssertionError)):
            Secure5(place.port, context, known)


@pytest.mark.long
@pytest.mark.parametrize("identity", [True, False], ids=["with use_identity", "without"])
def test_a_connection_ends_with_its_certificate(
    tmp_path: Path, nats_server: NatsServer, gateway_factory: GatewayFactory, identity: bool
) -> None:
    with contextlib.ExitStack() as stack:
        found = Place(tmp_path, lists=False, identity=identity)
        place = stack.enter_context(started(found, nats_server, gateway_factory))
        client = stack.enter_context(place.client(place.first.issue("short", SHORT)))
        other = stack.enter_context(place.client(place.first.issue("long")))
        client.ended(EXPIRED)
        assert other.ping() == []


def test_a_reload_that_withdraws_an_authority(place: Place) -> None:
    """Its clients are disconnected, also one of a new authority with the same name; the others stay."""
    first, second = place.first.issue("one"), place.second.issue("two")
    with place.client(first) as one, place.client(second) as two:
        place.reload()
        assert one.ping() == two.ping() == []
        place.trust(place.second)
        place.reload()
        one.ended(NOT_AUTHORIZED)
        assert two.ping() == []
        place.refused(first, "unable to get local issuer certificate")
        place.client(second).close()
        directory = place.trusted.parent / "renewed"
        directory.mkdir()
        renewed = Authority(directory, "second authority")
        place.trust(renewed)
        place.reload()
        two.ended(NOT_AUTHORIZED)
        place.client(renewed.issue("three")).close()


def test_revoked_certificates(listed: Place) -> None:
    """They are refused, and after a reload disconnected; a list that cannot be used changes nothing."""
    good, bad, other = listed.first.issue("good"), listed.first.issue("bad"), listed.second.issue("bad")
    with listed.client(good) as one, listed.client(bad) as two, listed.client(other) as three:
        listed.revoke(bad)
        assert two.ping() == []  # nothing happens by itself
        listed.reload()
        two.ended(NOT_AUTHORIZED)
        assert one.ping() == three.ping() == []
        listed.refused(bad, "certificate revoked")
        listed.lists.write_bytes(b"no list")
        listed.reload()
        assert "expected a PEM file of lists of revoked certificates" in listed.running.log
        listed.refused(bad, "certificate revoked")
        assert one.ping() == three.ping() == []
        listed.client(good).close()


def test_lists_that_are_not_in_force(listed: Place) -> None:
    """Nobody is let in without the list of its authority, or with one that has ended; who is connected stays."""
    good, other = listed.first.issue("good"), listed.second.issue("other")
    with listed.client(good) as one:
        listed.lists.write_bytes(listed.first.revocations())
        listed.reload()
        listed.refused(other, "unable to get certificate CRL")
        listed.client(good).close()
        listed.revoke(lifetime=timedelta(minutes=-1))
        listed.reload()
        listed.refused(good, "CRL has expired")
        assert one.ping() == []
