# SPDX-License-Identifier: Apache-2.0
"""Open files: whether there are enough of them for what may connect."""

import resource

import pytest

from mqtt_nats.config import Settings
from mqtt_nats.descriptors import BESIDES, warn_of_few
from tests.conftest import GatewayFactory
from tests.harness.nats import NatsServer


def test_fewer_open_files_than_connections(nats_server: NatsServer, gateway_factory: GatewayFactory) -> None:
    """Said once, also by several workers, and the gateway starts."""
    gateway = gateway_factory(nats_server, "--max-connections", str(2**31 - 1), "--workers", "2")
    (line,) = [line for line in gateway.log.splitlines() if " WARNING " in line]
    assert "max_connections is 2147483647" in line
    assert f"but the limit is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}: raise it" in line


@pytest.mark.parametrize(
    ("allowed", "most", "warned"),
    [
        (1024, None, False),
        (1024, 1024 - BESIDES, False),
        (1024, 1025 - BESIDES, True),
        (resource.RLIM_INFINITY, 10**6, False),
    ],
)
def test_when_that_is_said(
    allowed: int, most: int | None, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (allowed, allowed))
    warn_of_few(Settings(max_connections=most))
    assert len(caplog.records) == warned
