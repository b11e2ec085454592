# SPDX-License-Identifier: Apache-2.0
"""Rules that change while a gateway waits for NATS to connect a client, or to subscribe something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqtt_nats.client.client import Client
from mqtt_streams.wills import will_subject
from tests.conftest import NatsFactory
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import CONNACK, SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import eventually
from tests.integration.inprocess import Running, running

OPEN = "[[rules]]\neffect = 'allow'\ntopics = '#'\n"
SECRET = "[[rules]]\neffect = 'deny'\ntopics = 'secret/#'\n" + OPEN
NOT_AUTHORIZED, PATIENCE = 0x87, 30.0


class Ruled:
    """A gateway with rules, and its NATS server."""

    def __init__(self, server: NatsServer, inside: Running, file: Path) -> None:
        self.server, self.inside, self.file = server, inside, file

    def write(self, rules: str) -> None:
        """Have other rules."""
        self.file.write_text(rules, encoding="utf-8")
        self.inside.reload()

    def client(self, name: str) -> Client | None:
        """What the gateway has of a client, once it is identified."""
        account: Any = self.inside.gateway.account
        return next((one for one in list(account.registry.connections) if one.client_id == name), None)


@pytest.fixture
def ruled(nats_factory: NatsFactory, tmp_path: Path) -> Iterator[Ruled]:
    server, file = nats_factory(), tmp_path / "acl.toml"
    file.write_text(OPEN, encoding="utf-8")
    with running(nats=(server.url,), acl_file=file, allow_anonymous=True) as inside:
        yield Ruled(server, inside, file)


@pytest.mark.parametrize("durable", [False, True])
def test_of_a_client_that_connects(ruled: Ruled, durable: bool) -> None:
    """It is held to them from its first packet on, not only after its next connect."""
    properties = prop(SESSION_EXPIRY, 600) if durable else b""
    if durable:
        with Raw5.open(ruled.inside.port, "late", properties) as before:
            before.subscribed(("secret/+", 1), ("open/+", 1))
        eventually(lambda: ruled.client("late") is None)
    with Raw5(ruled.inside.port, patience=PATIENCE) as client:
        ruled.server.pause()
        try:
            client.send(raw5.connect("late", properties, clean=not durable))
            eventually(lambda: ruled.client("late") is not None)
            ruled.write(SECRET)
        finally:
            ruled.server.resume()
        client.answer(CONNACK, reason=0)
        client.send(raw5.publish("secret/x", b"", qos=1, id=1))
        client.answer(raw.PUBACK, 1, reason=NOT_AUTHORIZED)
        assert client.subscribed(("secret/x", 0)) == (NOT_AUTHORIZED,)
        found = ruled.client("late")
        assert found is not None
        eventually(lambda: {one.text for one in found.filters} == ({"open/+"} if durable else set()))


def test_of_a_will_that_is_being_stored(ruled: Ruled, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is removed, as those are that were stored before."""

    connecting: list[str] = []

    def subject(gateway: str, client_hash: str) -> str:
        if connecting:  # not when a published will is removed: the observer may not have its message yet
            connecting.clear()
            ruled.file.write_text(SECRET, encoding="utf-8")
            ruled.inside.gateway.reload()
        return will_subject(gateway, client_hash)

    with Raw5.open(ruled.inside.port, "observer") as observer:
        observer.subscribed(("#", 1))
        monkeypatch.setattr("mqtt_nats.lifecycle.will.will_subject", subject)
        for name, topic in (("w1", "secret/w1"), ("w2", "open/w2")):
            ruled.write(OPEN)
            connecting.append(name)
            doomed = Raw5(ruled.inside.port)
            doomed.send(raw5.connect(name, flags=0x0C, tail=raw5.will(topic, name.encode())))
            doomed.answer(CONNACK, reason=0)
            found = ruled.client(name)
            assert found is not None
            assert not connecting
            assert (found.will is None) == (name == "w1")
            ruled.write(OPEN)  # at the end nothing but the missing will keeps it from being published
            observer.subscribed(("#", 1))
            doomed.close()
        assert observer.message().payload == b"w2"


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("durable", [False, True])
def test_of_a_subscription_that_is_made(ruled: Ruled, version: int, durable: bool) -> None:
    """SUBACK says what the rules of its own moment say, and nothing is left of what they deny."""
    code = NOT_AUTHORIZED if version == 5 else 0x80
    filters = ("secret/+", 1), ("open/+", 1), ("$share/g/secret/x", 1), ("$share/g/open/x", 1)
    with Raw(ruled.inside.port, patience=PATIENCE) as client:
        if version == 5:
            client.send(raw5.connect("sub", *([prop(SESSION_EXPIRY, 600)] if durable else [])))
        else:
            client.send(raw.connect("sub", clean=not durable))
        client.expect(CONNACK)
        found = ruled.client("sub")
        assert found is not None
        eventually(lambda: not found.busy)
        ruled.server.pause()
        try:
            client.send((raw5 if version == 5 else raw).subscribe(*filters))
            eventually(lambda: found.busy)
            ruled.write(SECRET)
        finally:
            ruled.server.resume()
        answer = client.expect(raw.SUBACK)
        assert answer.body[-4:] == bytes((code, 1, code, 1))
        eventually(lambda: not found.busy)
        assert {one.text for one in found.filters} == {"open/+"}
        assert set(found.shares or ()) == {"$share/g/open/x"}
        record = found.record
        assert record is not None
        assert record.v5 is not None
        assert set(record.subs) == ({"open.*"} if durable else set())
        assert set(record.v5.shared) == {"$share/g/open/x"}
        ruled.write(OPEN)
        with Raw5.open(ruled.inside.port, "pub") as publisher:
            publisher.deliver("secret/y", b"no")
            publisher.deliver("open/y", b"yes")
        got = client.expect(raw.PUBLISH)
        assert (raw5.message(got).payload if version == 5 else got.payload) == b"yes"
