# SPDX-License-Identifier: Apache-2.0
"""After NATS was lost: when what was sent again has been handled."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import MagicMock

import pytest

from mqtt_nats.backbone import retry as patience
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway import reconnect as recovery
from mqtt_nats.gateway.account import Tenant


class Slow:
    """A link whose server answers after some fences, or is lost after some."""

    def __init__(self, fences: int, lost: bool) -> None:
        self.wire: object | None = object()
        self.fences = fences
        self.lost = lost

    async def fence(self) -> None:
        self.fences -= 1
        if self.fences:
            raise TimeoutError("a test")
        if self.lost:
            self.wire = object()  # and there is another connection already
            raise TimeoutError("a test")


@pytest.mark.parametrize("fences", [1, 3])
@pytest.mark.parametrize("lost", [True, False])
async def test_a_server_that_answers_late_is_waited_for(fences: int, lost: bool) -> None:
    """Nothing begins where recovery gives up while the connection lives."""
    link: Any = Slow(fences, lost)
    assert await recovery._passed(link) is not lost
    assert not link.fences


async def test_a_reconnect_is_known_before_the_connection_is_used() -> None:
    """Else the records of groups' messages would be removed, whose acknowledgements a killed server has forgotten."""
    tenant = Tenant("", Settings())
    broker: Any = MagicMock()
    tenant.broker, tenant.store, tenant.inbox = broker, MagicMock(), MagicMock()
    online: list[bool] = []
    services = broker.account.services
    services.nats.relink.side_effect = lambda: online.append(tenant.link.online)
    services.tasks.spawn.side_effect = lambda work, name: work.close()
    await tenant._online()
    assert online == [False]
    assert tenant.link.online


@pytest.mark.parametrize("owner", [True, False])
async def test_consumers_are_looked_at_once_more(monkeypatch: pytest.MonkeyPatch, owner: bool) -> None:
    """The leader of a consumer may keep the former deliver subject, although the change was confirmed."""
    done: list[str] = []

    async def still_owner(client: Any) -> bool:
        return owner

    async def rebind(client: Any, side: Any) -> None:
        done.append("attached")

    monkeypatch.setattr(recovery, "still_owner", still_owner)
    monkeypatch.setattr(recovery, "rebind_consumers", rebind)
    client = MagicMock()
    client.durable_side.attachments = {"one": None, "two": None}
    client.delivery.reconciling.due.side_effect = lambda client, name: done.append(name)
    await recovery._check(client)
    assert done == (["attached", "one", "two"] if owner else [])


async def test_sessions_that_wait_hold_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their consumers, or the stream of PUBRELs, have no leader, and get none."""
    checked: list[int] = []
    stuck, others = asyncio.Event(), asyncio.Event()

    async def check(client: Any) -> None:
        if client.number < recovery.AT_ONCE:
            await stuck.wait()
        checked.append(client.number)
        if len(checked) == recovery.AT_ONCE * 2:
            others.set()

    monkeypatch.setattr(recovery, "_check", check)
    monkeypatch.setattr(patience, "LONGEST", 0.05)
    account = MagicMock()
    clients: dict[int, Any] = {}
    tasks: set[asyncio.Task[None]] = set()
    for number in range(recovery.AT_ONCE * 3):
        client = MagicMock(number=number)
        client.do = lambda work: tasks.add(asyncio.create_task(work))
        clients[number] = client
    account.registry.clients = clients
    recovery._check_all(account)
    async with asyncio.timeout(10):
        await others.wait()
        stuck.set()
        await asyncio.gather(*tasks)
    assert len(checked) == recovery.AT_ONCE * 3


async def test_a_connection_that_is_lost_is_not_waited_for() -> None:
    link: Any = Slow(1, False)
    link.wire = None
    assert not await recovery._passed(link)
