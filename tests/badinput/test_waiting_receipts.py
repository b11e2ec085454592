# SPDX-License-Identifier: Apache-2.0
"""What has to be acknowledged behind a publish that JetStream does not store for a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqtt_nats.config.settings import Settings
from mqtt_nats.transport.connection import Hold
from tests.conftest import NatsFactory
from tests.harness import raw
from tests.harness.inprocess import InProcess, running
from tests.harness.rawclient import PUBACK, RawClient
from tests.harness.waiting import aeventually

pytestmark = pytest.mark.anyio

READ = 256 * 1024
"""Bytes of one read."""

RULES = '[[rules]]\neffect = "allow"\ntopics = "stored"\n'


@pytest.mark.parametrize("kind", ["unknown PUBREL", "denied PUBLISH"])
async def test_what_waits_is_bounded(nats_factory: NatsFactory, tmp_path: Path, kind: str) -> None:
    """The acknowledgements leave in order, so none of them does; a few bytes of the client take an object each."""
    server = nats_factory()
    packet = raw.ack(raw.PUBREL, 7) if kind == "unknown PUBREL" else raw.publish("other", b"", qos=1, id=2)
    (tmp_path / "acl.toml").write_text(RULES, encoding="utf-8")
    settings = Settings(listen="127.0.0.1:0", nats=(server.url,), acl_file=tmp_path / "acl.toml", sys_interval=0)
    with running(settings) as gateway:
        async with await RawClient.connect(gateway.port, "client") as client:
            await client.deliver("stored", b"", 1)
            server.pause()
            client.publish("stored", b"", 1, packet_id=5)
            client.write(packet * (4 * READ // len(packet)))
            await aeventually(lambda: _held(gateway))
            assert gateway.call(lambda: len(gateway.account.registry.clients["client"].receipts)) < 1100 + READ // len(
                packet
            )
            server.resume()
            await client.expect_ack(PUBACK, 5)


def _held(gateway: InProcess) -> bool:
    """Whether the client is not read from for that reason."""
    return gateway.call(lambda: bool(gateway.account.registry.clients["client"].connection._holds & Hold.WINDOW))
