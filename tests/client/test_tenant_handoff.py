# SPDX-License-Identifier: Apache-2.0
"""A client of another account than its listener, where one of the two accounts has just stood still."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mqtt_nats.access import passwords
from mqtt_nats.access.passwords import set_password
from mqtt_nats.client import authentication
from mqtt_nats.client.authentication import hand_over
from mqtt_nats.client.client import Client
from mqtt_nats.lifecycle import pause_detection
from mqtt_nats.transport.connection import Hold
from tests.access.test_passwords import CHEAP
from tests.base.support import Inside, running
from tests.conftest import NatsFactory
from tests.harness import raw, raw5
from tests.harness.raw import Raw, field
from tests.harness.raw5 import Raw5

_EACH = [f"{name}: {{jetstream: enabled, users: [{{user: {name}, password: pw}}]}}" for name in ("own", "acme")]
CONFIG = f"accounts {{ {', '.join(_EACH)} }}"


@pytest.fixture
def inside(nats_factory: NatsFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    monkeypatch.setattr(passwords, "DEVICE_COST", CHEAP)
    users = tmp_path / "passwords"
    set_password(users, "ann", "pw", "acme")
    tenants = {"acme": {"nats_user": "acme", "nats_password": "pw"}}
    with running(
        nats_factory(config=CONFIG).url, nats_user="own", nats_password="pw", tenants=tenants, password_file=users
    ) as found:
        yield found


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("standing", ["", "acme"])
def test_it_is_read_from_afterwards(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, version: int, standing: str
) -> None:
    """Who lets go of those that wait for the end of a standstill knows the clients of one account."""
    held: list[bool] = []

    async def hand_over_then(client: Client, client_id: str) -> None:
        former = client.account
        pause_detection._begin((former if not standing else former.accounts[standing]).services)
        await hand_over(client, client_id)
        assert client.account.tenant == "acme"
        held.append(bool(client.connection._holds & Hold.STANDSTILL))

    monkeypatch.setattr(authentication, "hand_over", hand_over_then)
    tail = field("ann") + field("pw")
    with (Raw5 if version == 5 else Raw)(inside.ports[0]) as client:
        client.send(
            (raw5 if version == 5 else raw).connect("x", flags=0xC0, tail=tail if version == 5 else ("ann", "pw"))
        )
        client.expect(raw.CONNACK)
        assert client.ping() == []
    assert held == [standing == "acme"]
