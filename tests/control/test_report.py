# SPDX-License-Identifier: Apache-2.0
"""Counters that a gateway tells the other workers of its supervisor."""

from __future__ import annotations

from typing import Any, cast

import orjson
import pytest

from mqtt_nats.config.worker_identity import WorkerIdentity
from mqtt_nats.control.report import reported
from tests.control.fakes import FakeAccount

PLACE = WorkerIdentity("group", 1, 2)


@pytest.mark.parametrize(
    ("reply", "payload"),
    [
        (b"", b'{"group":"group"}'),
        (b"reply", b'{"group":"another"}'),
        (b"reply", b'{"group":["group"]}'),
        (b"reply", b"{}"),
        (b"reply", b"[]"),
        (b"reply", b"null"),
        (b"reply", b"no JSON"),
    ],
)
async def test_it_answers_its_own_group_alone(reply: bytes, payload: bytes) -> None:
    account = FakeAccount()
    reported(cast("Any", account), PLACE, b"", reply, b"", payload)
    assert account.services.tasks.fake_spawned == []


async def test_it_answers_its_own_group() -> None:
    account = FakeAccount()
    reported(cast("Any", account), PLACE, b"", b"reply", b"", orjson.dumps({"group": PLACE.group}))
    (task,) = account.services.tasks.fake_spawned
    task.cancel()
