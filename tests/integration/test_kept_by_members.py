# SPDX-License-Identifier: Apache-2.0
"""A member of a shared subscription that keeps one message unacknowledged while all packet identifiers are used again.

The gateway runs in this process, with few identifiers for messages of groups.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from mqtt_nats.base import server_clock as natstime
from mqtt_nats.client import kept_messages
from mqtt_nats.client.kept_messages import KeptMessages
from mqtt_nats.protocol import durable_sender
from mqtt_nats.sessions.groups.ownership import CLOCK_INEXACT_S
from tests.admin.support import Admin, serving
from tests.base.support import PATIENCE, Inside, running
from tests.harness import raw, raw5
from tests.harness.nats import ROOT, NatsServer
from tests.harness.raw import Raw, Received
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import eventually

pytestmark = pytest.mark.sources

SPACE: Final = 256
"""Packet identifiers for messages of groups: at QoS 2 so many that one is free again when its turn comes."""

DUP: Final = 8

MINUTES: Final = 180.0
"""Seconds by which the clock for kept messages is put forward."""


@pytest.fixture
def inside(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, positions: str) -> Iterator[Inside]:
    """A gateway that can be looked into."""
    monkeypatch.setattr(durable_sender, "RETAINED_SPACE", SPACE)
    with running(nats_server.url, session_positions=positions) as found:
        yield found


def connect(inside: Inside, name: str, version: int, *, present: bool) -> Raw:
    """Begin a connection of a session that stays."""
    if version == 4:
        return Raw.connected(inside.ports[0], name, clean=False)
    return Raw5.open(inside.ports[0], name, prop(SESSION_EXPIRY, 1000), clean=not present)


def complete(client: Raw, found: Received, qos: int) -> None:
    """Answer a message to the end; the next packets are those of its handshake."""
    client.send(raw.ack(raw.PUBACK if qos == 1 else raw.PUBREC, found.id))
    if qos == 2:
        assert comes_again(client, found.id).id == found.id
        client.send(raw.ack(raw.PUBCOMP, found.id))


def comes_again(client: Raw, identifier: int) -> Received:
    """The kept message or its PUBREL; PUBRELs that the client has answered within the last moments may come, too."""
    while (one := client.receive(PATIENCE)) is not None and one.kind == raw.PUBREL and one.id != identifier:
        client.send(raw.ack(raw.PUBCOMP, one.id))
    assert one is not None
    return one


def deliver(client: Raw, topic: str, payload: bytes, qos: int) -> None:
    """Publish, and see it acknowledged."""
    client.send(raw.publish(topic, payload, qos=qos, id=1))
    client.expect(raw.PUBACK if qos == 1 else raw.PUBREC, PATIENCE)
    if qos == 2:
        client.send(raw.ack(raw.PUBREL, 1))
        client.expect(raw.PUBCOMP, PATIENCE)


def _certain(inside: Inside) -> bool:
    """Whether the gateway has been connected to NATS for so long that no message is taken for one of before.

    Such a one keeps its identifier for 16 seconds more.
    """
    account = inside.gateway.account
    assert account is not None
    return natstime.now() > natstime.converted(account.services.nats.linked) + CLOCK_INEXACT_S


def cases() -> list[Any]:
    """Each way to keep positions, each stage, and both versions; one version of each in the usual run."""
    return [
        pytest.param(positions, stage, version, marks=() if (at + on) % 2 == version % 2 else [pytest.mark.soak])
        for at, positions in enumerate(("consumers", "records"))
        for on, stage in enumerate(("PUBACK", "PUBREC", "PUBCOMP"))
        for version in (4, 5)
    ]


@pytest.mark.parametrize(("positions", "stage", "version"), cases())
def test_an_identifier_in_use_is_passed_over(name: str, inside: Inside, version: int, stage: str) -> None:
    """All other messages come at once and in order; at QoS 2 the kept one comes again under the same identifier."""
    qos = 1 if stage == "PUBACK" else 2
    with connect(inside, name, version, present=False) as client, Raw.connected(inside.ports[0]) as publisher:
        client.send((raw if version == 4 else raw5).subscribe((f"$share/group/{name}", qos)))
        assert client.expect(raw.SUBACK, PATIENCE).body[-1] == qos
        deliver(publisher, name, b"kept", qos)
        kept = client.expect(raw.PUBLISH, PATIENCE)
        if stage == "PUBCOMP":
            client.send(raw.ack(raw.PUBREC, kept.id))
            assert client.expect(raw.PUBREL, PATIENCE).id == kept.id
        eventually(lambda: inside.call(lambda: _certain(inside)), PATIENCE)
        used = set()
        for number in range(SPACE + 10):
            deliver(publisher, name, b"%d" % number, qos)
            one = client.expect(raw.PUBLISH, PATIENCE)
            assert (one.payload[-len(b"%d" % number) :], one.first & DUP) == (b"%d" % number, 0)
            used.add(one.id)
            complete(client, one, qos)
        assert used == set(range(durable_sender.RETAINED_BASE, durable_sender.RETAINED_BASE + SPACE)) - {kept.id}
        assert not client.ping()
    with connect(inside, name, version, present=True) as client:
        again = comes_again(client, kept.id)
        assert again.kind == (raw.PUBREL if stage == "PUBCOMP" else raw.PUBLISH)
        if stage == "PUBCOMP":
            client.send(raw.ack(raw.PUBCOMP, kept.id))
        else:  # at QoS 1 the group gives it to a member anew
            assert again.payload.endswith(b"kept")
            assert bool(again.first & DUP) is (qos == 2)
            assert qos == 1 or again.id == kept.id
            complete(client, again, qos)
        assert all(one.kind == raw.PUBREL for one in client.ping())
        client.send((raw if version == 4 else raw5).unsubscribe(f"$share/group/{name}"))
        client.expect(raw.UNSUBACK, PATIENCE)


class Clock:
    """A clock that can be put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which gateways in this process see how long messages are kept; they look often."""
    found = Clock()
    monkeypatch.setattr(KeptMessages.__init__, "__defaults__", (found,))
    monkeypatch.setattr(kept_messages, "KEPT_CHECK_S", 0.1)
    return found


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("clean", [True, False], ids=["regular", "durable"])
def test_operators_see_who_keeps_a_message_for_minutes(
    nats_server: NatsServer, name: str, clock: Clock, shared: bool, clean: bool
) -> None:
    """By ``ctl clients list`` and by a metric, until the client acknowledges it."""
    with (
        serving(nats_server.url) as admin,
        Raw.connected(admin.port, name, clean=clean) as client,
        Raw.connected(admin.port) as publisher,
    ):
        assert client.subscribe((f"$share/group/{name}" if shared else name, 1)) == [1]
        deliver(publisher, name, b"kept", 1)
        one = client.expect(raw.PUBLISH, PATIENCE)
        eventually(lambda: 0 < seen(nats_server, name) < MINUTES, PATIENCE)
        clock.ahead = MINUTES
        deliver(publisher, name, b"more", 1)
        complete(client, client.expect(raw.PUBLISH, PATIENCE), 1)  # others do not hide the kept one
        eventually(lambda: seen(nats_server, name) >= MINUTES, PATIENCE)
        eventually(lambda: measured(admin) >= MINUTES, PATIENCE)
        complete(client, one, 1)
        eventually(lambda: not seen(nats_server, name), PATIENCE)
        eventually(lambda: measured(admin) < MINUTES, PATIENCE)


def seen(server: NatsServer, name: str) -> float:
    """For how many seconds ``ctl clients list`` says that the client has kept a message; 0 = none."""
    command = [sys.executable, "-m", "mqtt_nats", "ctl", "--nats", server.url, "clients", "list", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True)
    (found,) = [one for one in json.loads(done.stdout)["clients"] if one["client"] == name]
    since = found.get("unacknowledged_since")
    return 0.0 if since is None else time.time() - since


def measured(admin: Admin) -> float:
    """What ``/metrics`` says."""
    pattern = r"^mqtt_nats_oldest_unacknowledged_seconds\S* (\S+)$"
    (value,) = re.findall(pattern, admin.metrics(), re.MULTILINE)
    return float(value)
