# SPDX-License-Identifier: Apache-2.0
"""Interface for plugins: an unloaded plugin leaves nothing behind."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from mqtt_nats.client.account import Account
from mqtt_nats.hooks import CLIENT_CONNECTED, Hooks
from mqtt_nats.ingress.interceptors import Takers
from mqtt_nats.plugins import Host
from mqtt_nats.transport.write_buffer import FlushRound
from tests.harness.doubles import stands_for
from tests.sessions.fakes import FakeServices


class FakeHookedServices(FakeServices):
    """Services with hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks = Hooks(self.tasks.spawn)
        self.path.round = FlushRound(lambda flush: None)


class FakeHostIngress:
    """Ingress with the takers of topics."""

    def __init__(self) -> None:
        self.takers = Takers()


@stands_for(Account)
class FakeHostAccount:
    """Stands for `Account`: hooks, takers and tasks, without clients."""

    def __init__(self) -> None:
        self.services = FakeHookedServices()
        self.registry = self.services.registry
        self.ingress = FakeHostIngress()


def ignore(event: Any) -> None:
    """A hook."""


async def test_hooks_takers_and_tasks_end_with_the_plugin() -> None:
    account = FakeHostAccount()
    one, other = (Host(cast("Any", account), name) for name in ("one", "other"))
    one.on(CLIENT_CONNECTED, ignore)
    other.on(CLIENT_CONNECTED, ignore)
    one.take("$one/", cast("Any", object()))
    other.take("$other/", cast("Any", object()))
    task = one.spawn(asyncio.Event().wait(), "waits")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    one.withdraw()
    await asyncio.wait([task])
    assert task.cancelled()
    assert [entry.owner for entry in account.services.hooks.accounts()] == ["other"]
    one.take("$one/", cast("Any", object()))  # it is free again
    with pytest.raises(ValueError, match=r"\$other/"):
        one.take("$other/", cast("Any", object()))


async def test_the_callback_of_a_removed_hook_is_not_of_the_plugin_any_more() -> None:
    account = FakeHostAccount()
    host = Host(cast("Any", account), "one")
    host.off(host.on(CLIENT_CONNECTED, ignore))
    assert not account.services.hooks.in_use
    assert host.identity == account.services.identity.id
    assert host.clients() == []
