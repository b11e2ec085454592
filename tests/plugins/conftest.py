# SPDX-License-Identifier: Apache-2.0
"""Entry points of plugins that a test makes up, and gateways in this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from mqtt_nats.config.settings import Settings
from mqtt_nats.plugins import manager
from tests.harness.inprocess import InProcess, running
from tests.harness.nats import ROOT, NatsServer
from tests.harness.rawclient import RawClient

OURS = {
    "delayed": "mqtt_nats.plugins.delayed:Delayed",
    "otel": "mqtt_nats.plugins.tracing:Tracing",
    "rewrite": "mqtt_nats.plugins.rewrite:Rewrite",
    "subscriptions": "mqtt_nats.plugins.subscriptions:Subscriptions",
}

Install = Callable[[str, str], None]


@contextmanager
def installed() -> Iterator[Install]:
    """Has the plugins of the gateway itself, however this checkout was installed; yields what installs another one.

    It is given a name, and ``module:class``.
    """
    found = [EntryPoint(name, value, manager.GROUP) for name, value in OURS.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "_installed", lambda: list(found))
        yield lambda name, value: found.append(EntryPoint(name, value, manager.GROUP))


@pytest.fixture
def install() -> Iterator[Install]:
    with installed() as install:
        yield install


def running_with(plugins: dict[str, dict[str, Any]], url: str, **settings: Any) -> AbstractContextManager[InProcess]:
    """A gateway with these tables of plugins."""
    return running(Settings(listen="127.0.0.1:0", plugins=plugins, nats=(url,), **settings))


Start = Callable[..., InProcess]


@pytest.fixture
def start(nats_server: NatsServer, install: Install) -> Iterator[Start]:
    """Starts gateways with tables of plugins; ``url`` is that of another nats-server than the module's."""
    with ExitStack() as stack:

        def start(plugins: dict[str, dict[str, Any]], url: str = nats_server.url, **settings: Any) -> InProcess:
            return stack.enter_context(running_with(plugins, url, **settings))

        yield start


def run_ctl(url: str, *arguments: str) -> tuple[int, str]:
    """Run ``mqtt-nats ctl``; its exit status and what it says."""
    command = [sys.executable, "-m", "mqtt_nats", "ctl", "--nats", url, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


async def echo(client: RawClient, topic: str, body: bytes, wanted: bytes) -> None:
    """Publish to a topic that the client has subscribed itself, and see what comes."""
    client.publish(topic, body)
    await client.message(topic, wanted)
