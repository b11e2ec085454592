# SPDX-License-Identifier: Apache-2.0
"""One gateway in this process for all tests of a module; each test's hooks are gone when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mqtt_nats.config.settings import Settings
from mqtt_nats.hooks import Entry
from tests.harness.inprocess import InProcess, running
from tests.harness.nats import NatsServer


@pytest.fixture(scope="module")
def inside(nats_server: NatsServer) -> Iterator[InProcess]:
    with running(Settings(listen="127.0.0.1:0", nats=(nats_server.url,))) as found:
        yield found


Add = Callable[..., Entry]


@pytest.fixture
def add(inside: InProcess) -> Iterator[Add]:
    """Adds a hook, in the gateway's thread."""

    def add(point: Any, callback: Any, **options: Any) -> Entry:
        return inside.call(lambda: inside.account.services.hooks.add(point, callback, owner="test", **options))

    yield add
    inside.call(lambda: inside.account.services.hooks.remove_all("test"))
