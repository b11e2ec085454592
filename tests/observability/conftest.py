# SPDX-License-Identifier: Apache-2.0
"""Two gateways in this process for all tests of a module."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client as NatsClient

from mqtt_nats.config.settings import Settings
from tests.harness.inprocess import InProcess, running
from tests.harness.nats import NatsServer

_count = itertools.count()


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rules that permit everything, also who comes and goes, which needs a rule."""
    file = tmp_path_factory.mktemp("readers") / "acl.toml"
    file.write_text('[[rules]]\neffect = "allow"\ntopics = ["#", "$SYS/#"]\n', encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def pair(nats_server: NatsServer, readers: Path) -> Iterator[tuple[InProcess, InProcess]]:
    """They publish `$SYS` topics when they start, and when a test has them do it."""
    settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,), sys_interval=3600, acl_file=readers)
    with running(settings) as first, running(settings) as second:
        yield first, second


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"observed{next(_count)}"


@pytest.fixture
async def nats_client(nats_server: NatsServer) -> AsyncIterator[NatsClient]:
    client = await nats.connect(nats_server.url)
    yield client
    await client.close()
