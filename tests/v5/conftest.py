# SPDX-License-Identifier: Apache-2.0
"""Clients of 5.0, byte by byte, and the fixtures of the integration tests."""

from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from tests.harness.gateway import Gateway
from tests.harness.raw5 import Raw5
from tests.integration.conftest import connect, name, second_gateway, stored

__all__ = ["connect", "name", "second_gateway", "stored"]


class Opener(Protocol):
    """Connects 5.0 clients to a gateway and closes them when the test ends."""

    def __call__(
        self,
        client_id: bytes | str = "",
        *parts: bytes,
        clean: bool = True,
        keepalive: int = 60,
        flags: int = 0,
        tail: bytes = b"",
        to: Gateway | None = None,
    ) -> Raw5: ...


@pytest.fixture
def open5(gateway: Gateway) -> Iterator[Opener]:
    """Connect 5.0 clients, to the module's gateway unless ``to`` names another."""
    clients: list[Raw5] = []

    def open5(client_id: bytes | str = "", *parts: bytes, to: Gateway | None = None, **options: Any) -> Raw5:
        client = Raw5.open((to or gateway).port, client_id, *parts, **options)
        clients.append(client)
        return client

    yield open5
    for client in clients:
        client.close()
