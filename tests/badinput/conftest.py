# SPDX-License-Identifier: Apache-2.0
"""Every test here does something bad to a gateway whose other clients must not notice."""

from collections.abc import Iterator

import pytest

from tests.conftest import NatsFactory, _nats_factory
from tests.harness.bystanders import Bystanders
from tests.harness.gateway import Gateway
from tests.harness.monitor import Monitor
from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually, free_port


@pytest.fixture(scope="module")
def monitor_port() -> int:
    """Port of the monitoring of the module's nats-server."""
    return free_port()


@pytest.fixture(scope="module")
def nats_server(nats_backend: str, monitor_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One monitored nats-server for all tests of a module, which must leave it running."""
    start: NatsFactory
    with _nats_factory(nats_backend, tmp_path_factory.mktemp("nats")) as start:
        yield start(config=f'http: "127.0.0.1:{monitor_port}"')


@pytest.fixture(scope="module")
def monitor(nats_server: NatsServer, monitor_port: int) -> Monitor:
    """The monitoring of the module's nats-server."""
    return Monitor(monitor_port)


@pytest.fixture(scope="module")
def bystanders(gateway: Gateway) -> Iterator[Bystanders]:
    """Clients of the module's gateway whose messages flow all the time."""
    with Bystanders(gateway.port) as found:
        yield found


@pytest.fixture
def unharmed(gateway: Gateway, bystanders: Bystanders, monitor: Monitor) -> Iterator[None]:
    """The gateway keeps its connections to NATS, and the bystanders notice nothing."""
    before = monitor.connections("mqtt-nats")
    assert len(before) == 3
    yield
    bystanders.check()
    # A gateway that the test has killed may still be there for a moment.
    eventually(lambda: monitor.connections("mqtt-nats") == before, what="the connections that there were")
    assert "connection to NATS is lost" not in gateway.log
