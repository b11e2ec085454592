# SPDX-License-Identifier: Apache-2.0
"""What a client is refused again and again: the log stays small, and the metrics count all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest

from mqtt_nats.base.logs import FAILURES, RECORDS_BURST, RECORDS_PER_S
from mqtt_nats.lifecycle import connection_hooks
from tests.base.support import PATIENCE, Inside, running
from tests.conftest import Logged
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import Raw5
from tests.harness.waiting import eventually

TIMES: Final = 60
LONG: Final = "x" * 3000
LINE_MAX: Final = 1500
"""Characters of the longest line of the log."""

MALFORMED: Final = (b"\x36\x05\0\1x\0\1", b"\x82\x02\0\1", b"\x30\x03\0\1+")


def malformed(inside: Inside, number: int) -> None:
    """A packet that is none."""
    with Raw.connected(inside.ports[0], f"{number}-{LONG}"[:200]) as client:
        client.send(MALFORMED[0])
        client.expect_closed()


def protocol(inside: Inside, number: int) -> None:
    """A packet that does not belong there."""
    with Raw5.open(inside.ports[0]) as client:
        client.send(raw5.connect())
        client.ended(0x82)


def before(inside: Inside, number: int) -> None:
    """PUBLISH in place of CONNECT."""
    with Raw(inside.ports[0], patience=PATIENCE) as client:
        client.send(raw.publish(LONG, b"x"))
        client.expect_closed()


def filters(inside: Inside, number: int) -> None:
    """Filters that are reserved."""
    with Raw.connected(inside.ports[0]) as client:
        assert client.subscribe((f"$MQTT/{number}/{LONG}", 1)) == [0x80]


def denied(inside: Inside, number: int) -> None:
    """Filters that the rules do not permit."""
    with Raw.connected(inside.ports[0]) as client:
        assert client.subscribe((f"secret/{number}/{LONG}", 1)) == [0x80]


def denied_publishes(inside: Inside, number: int) -> None:
    """Topics that the rules do not permit."""
    with Raw.connected(inside.ports[0]) as client:
        client.send(raw.publish(f"secret/{number}/{LONG}", b"x"))
        client.ping()


def password(inside: Inside, number: int) -> None:
    """User names that are not known."""
    with Raw(inside.ports[0], patience=PATIENCE) as client:
        client.send(raw.connect(f"{number}", flags=0xC2, tail=(f"{number}{LONG}", b"wrong")))
        assert client.expect(raw.CONNACK).body[1] in (4, 5)


def client_ids(inside: Inside, number: int) -> None:
    """Client ids that are too long."""
    with Raw(inside.ports[0], patience=PATIENCE) as client:
        client.send(raw.connect(f"{number}{LONG}"))
        assert client.expect(raw.CONNACK).body[1] == 2


def crowd(inside: Inside, number: int) -> None:
    """More connections than there may be."""
    limit = inside.gateway.settings.max_connections
    assert limit is not None
    clients = [Raw(inside.ports[0], patience=PATIENCE) for _ in range(limit + 1)]
    try:
        clients[-1].expect_closed()
    finally:
        for client in clients:
            client.close()
    eventually(lambda: inside.connections == 0, PATIENCE)


class Refusal(NamedTuple):
    """One row: what is refused, and what counts it."""

    attempt: Callable[[Inside, int], None]
    kind: str
    settings: dict[str, Any]


REFUSALS: Final = (
    Refusal(malformed, "malformed_packet", {}),
    Refusal(protocol, "protocol_error", {}),
    Refusal(before, "protocol_error", {}),
    Refusal(filters, "subscribe", {}),
    Refusal(denied, "denied", {"acl_file": 'default = "deny"\n'}),
    Refusal(denied_publishes, "denied", {"acl_file": 'default = "deny"\n'}),
    Refusal(password, "authentication", {"password_file": ""}),
    Refusal(client_ids, "client_identifier_not_valid", {}),
    Refusal(crowd, "listener_full", {"max_connections": 2}),
)


@pytest.mark.parametrize("refusal", REFUSALS, ids=[one.attempt.__name__ for one in REFUSALS])
def test_refusals_have_a_budget_and_a_count(
    refusal: Refusal,
    nats_server: NatsServer,
    tmp_path_factory: pytest.TempPathFactory,
    logged: Logged,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(connection_hooks, "CONNECTIONS_PER_S", RECORDS_PER_S)  # fewer than there are here
    settings = dict(refusal.settings)
    for name in ("acl_file", "password_file"):
        if name in settings:
            file = tmp_path_factory.mktemp("files") / name
            file.write_text(settings[name], encoding="utf-8")
            settings[name] = file
    with running(nats_server.url, **settings) as inside:
        logged.clear()
        counted = FAILURES[refusal.kind]
        for number in range(TIMES):
            refusal.attempt(inside, number)
        eventually(lambda: FAILURES[refusal.kind] >= counted + TIMES, PATIENCE, what="what is counted")
        logged.summarize()
        lines = logged.messages
    kinds = 4  # two of refusals, and that connections begin and end
    assert len(lines) < kinds * (RECORDS_BURST + 25), lines
    assert max(map(len, lines), default=0) < LINE_MAX
    if refusal.attempt not in (before, client_ids):  # they are logged at level DEBUG
        assert [line for line in lines if "more records of this kind were omitted" in line], lines
