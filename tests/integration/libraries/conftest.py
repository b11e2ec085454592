# SPDX-License-Identifier: Apache-2.0
"""Clients of each library in turn, and the properties that they send."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

import pytest

from tests.harness.gateway import Gateway
from tests.integration.libraries5 import LIBRARIES, Paho
from tests.integration.library5 import Library

USER = [("unit", "°C"), ("site", "north"), ("unit", "K"), ("Empty", "")]
EVERYTHING: dict[str, Any] = {
    "payload_format_indicator": 1,
    "content_type": "text/plain",
    "response_topic": "answers/of mine",
    "correlation_data": b"\x00\xff42",
    "user_property": USER,
}


class Maker(Protocol):
    """Connects clients of the library under test; what is left of them ends with the test."""

    async def __call__(self, client_id: str, *, to: Gateway | None = None, **options: Any) -> Library: ...


async def _clients(kind: type[Library], gateway: Gateway) -> AsyncIterator[Maker]:
    made: list[Library] = []

    async def make(client_id: str, *, to: Gateway | None = None, **options: Any) -> Library:
        made.append(kind(to or gateway, client_id, **options))
        await made[-1].connect()
        return made[-1]

    yield make
    for client in made:
        await client.close()


@pytest.fixture(params=LIBRARIES)
async def make(request: pytest.FixtureRequest, gateway: Gateway) -> AsyncIterator[Maker]:
    """With each library in turn."""
    async for made in _clients(LIBRARIES[request.param], gateway):
        yield made


@pytest.fixture(params=["paho", "gmqtt"])
async def make_either(request: pytest.FixtureRequest, gateway: Gateway) -> AsyncIterator[Maker]:
    """With those libraries that leave acknowledgements and DISCONNECT to their user."""
    async for made in _clients(LIBRARIES[request.param], gateway):
        yield made


@pytest.fixture
async def make_paho(gateway: Gateway) -> AsyncIterator[Maker]:
    async for made in _clients(Paho, gateway):
        yield made


@pytest.fixture
async def make_gmqtt(gateway: Gateway) -> AsyncIterator[Maker]:
    async for made in _clients(LIBRARIES["gmqtt"], gateway):
        yield made
