# SPDX-License-Identifier: Apache-2.0
"""Whose a consumer of `$MQTT_msgs` is: what `nats consumer ls` shows."""

import shutil
import subprocess

import pytest

from mqtt_streams.consumers import DESCRIBED_LENGTH, describe
from tests.conftest import GatewayFactory
from tests.harness import raw5
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw import Raw
from tests.harness.raw5 import Raw5
from tests.harness.waiting import eventually

pytestmark = pytest.mark.skipif(shutil.which("nats") is None, reason="the nats CLI is not installed")


@pytest.fixture
def gateway(nats_server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(nats_server, env={"MQTT_NATS_SESSION_POSITIONS": "consumers"})


def listed(nats_server: NatsServer, stream: str = "$MQTT_msgs") -> str:
    done = subprocess.run(
        ["nats", "--server", nats_server.url, "consumer", "ls", stream],
        check=True,
        timeout=60,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def test_client_id_and_filter(nats_server: NatsServer, gateway: Gateway) -> None:
    """When the subscription is new, when it is resumed, and of a group."""
    names = ["lamp-7: home/+/lamp", "lamp-7: home/#", "lamp-7: home"]
    with Raw.connected(gateway.port, "lamp-7", clean=False) as client:
        assert client.subscribe(("home/+/lamp", 1), ("home/#", 2)) == [1, 2]
        found = listed(nats_server)
        assert all(one in found for one in names), found
        assert "lamp-7" in listed(nats_server, "$MQTT_out")
    with Raw.connected(gateway.port, "lamp-7", clean=False) as client:
        assert client.ping() == []
        assert listed(nats_server).count("lamp-7: ") == 3
    gateway.restart()
    with Raw.connected(gateway.port, "lamp-7", clean=False) as client:
        client.ping()
        assert listed(nats_server).count("lamp-7: ") == 3
        assert "lamp-7" in listed(nats_server, "$MQTT_out")
    with Raw5.open(gateway.port, "worker") as worker:
        worker.subscribed(("$share/crew/jobs/#", 1))
        assert "$share/crew/jobs/#" in listed(nats_server)
    Raw.connected(gateway.port, "lamp-7").close()
    eventually(lambda: "lamp-7" not in listed(nats_server))


def test_an_older_consumer_gets_it(nats_server: NatsServer, gateway: Gateway) -> None:
    """One that was made without: when its session is resumed."""
    with Raw.connected(gateway.port, "older", clean=False) as client:
        assert client.subscribe(("older/x", 1)) == [1]
    (name,) = [line.split()[1] for line in listed(nats_server).splitlines() if "older: older/x" in line]
    edit = ["nats", "--server", nats_server.url, "consumer", "edit", "$MQTT_msgs", name, "--description", "none", "-f"]
    subprocess.run(edit, check=True, timeout=60, stdout=subprocess.PIPE)
    assert "older: older/x" not in listed(nats_server)
    with Raw.connected(gateway.port, "older", clean=False) as client:
        client.ping()
        assert "older: older/x" in listed(nats_server)
    Raw.connected(gateway.port, "older").close()


def test_names_that_a_terminal_would_obey(nats_server: NatsServer, gateway: Gateway) -> None:
    """What is listed has no control characters of a client's, and is not too long for nats-server."""
    odd = "\x1b[31mred\u009b\u202e"
    with Raw5.open(gateway.port, odd, raw5.prop(raw5.SESSION_EXPIRY, 60)) as client:
        client.subscribed(("x/" + "y" * 3000, 1))
        found = listed(nats_server)
        assert not set(odd[:1] + odd[-2:]) & set(found)
        assert "[31mred" in found
    with Raw.connected(gateway.port, odd):
        pass


def test_describe() -> None:
    assert describe("a", "$MQTT.msgs.b.>") == "a: b/#"
    assert describe("a", "$MQTT.msgs.b.*.//") == "a: b/+/."
    assert describe("a", "$MQTT.pubrel.x") == "a"
    assert len(describe("\U0001f600" * 70_000, "$MQTT.msgs." + "\U0001f600" * 900)) == 2 * DESCRIBED_LENGTH + 2
    assert len(describe("\U0001f600" * 70_000, "$MQTT.msgs." + "\U0001f600" * 900).encode()) < 4096
    assert describe("a\nb\0") == "a\ufffdb\ufffd"
