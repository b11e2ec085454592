# SPDX-License-Identifier: Apache-2.0
"""What operators see when JetStream is in trouble: log, health, metrics, the HTTP API and `mqtt-nats ctl`."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest

from tests.admin.support import address
from tests.conftest import GatewayFactory, NatsFactory
from tests.crash.lag import Lag
from tests.harness import raw
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT
from tests.harness.proxy import Proxy
from tests.harness.raw import Raw, publish
from tests.harness.waiting import eventually

PATIENCE = 40.0
"""Seconds for an election, or until a server has found out that it leads nobody."""

MESSAGES = "$MQTT_msgs"

WAITING_S = 4.0
"""Without an acknowledgement for so long a publish waits for room."""

SOON = 2.0
"""Seconds in which the process itself answers, whatever NATS does, where the machine does not hold it up."""

TLS = ssl.create_default_context()
"""Unused, but httpx would make one for each request, which takes ten times as long as the answer."""


class View:
    """What a gateway shows, and `mqtt-nats ctl` beside it."""

    def __init__(self, gateway: Gateway, nats_url: str) -> None:
        self.gateway = gateway
        self.nats_url = nats_url
        self._url = address(gateway)

    def _get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self._url}{path}", timeout=PATIENCE, verify=TLS)

    def ready(self) -> str:
        """What `/readyz` says: `ready`, or why not; `/healthz` is green meanwhile, and both answer at once."""
        with Lag() as lag:
            begun = time.monotonic()
            assert self._get("/healthz").status_code == 200
            answer = self._get("/readyz")
            assert time.monotonic() - begun < SOON + lag.seconds
        text = answer.text.strip()
        assert (answer.status_code == 200) == (text == "ready")
        return text

    def api(self, path: str) -> Any:
        """What the HTTP API answers, which is all that the dashboard knows; of an error its text."""
        answer = self._get(f"/api/v1/{path}").json()
        return answer.get("error", answer)

    def states(self) -> list[str]:
        """Why gateways are not ready, as the dashboard shows it; of an error its text."""
        found = self.api("status")
        return [found] if isinstance(found, str) else [one["obstacle"] for one in found["gateways"]]

    def metric(self, name: str) -> float:
        """The value of a series, named as in `/metrics`."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self._get("/metrics").text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def ctl(self, *arguments: str) -> str:
        """What `mqtt-nats ctl` prints, or complains."""
        command = [sys.executable, "-m", "mqtt_nats", "ctl", "--nats", self.nats_url, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
        return done.stdout + done.stderr

    def status(self) -> str:
        """What `mqtt-nats ctl status` prints."""
        return self.ctl("status")


@contextmanager
def looking(look: Callable[[], str]) -> Iterator[set[str]]:
    """Look again and again meanwhile; everything that was seen. What `look` raises is raised at the end."""
    seen: set[str] = set()
    ended = threading.Event()
    failures: list[Exception] = []

    def work() -> None:
        while not ended.is_set():
            try:
                seen.add(look())
            except Exception as error:
                failures.append(error)
                return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()
    if failures:
        raise failures[0]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def view(cluster: Cluster, gateway_factory: GatewayFactory) -> View:
    """A gateway at a server that does not lead the messages."""
    first = gateway_factory(cluster.servers[0])
    asyncio.run(cluster.settled(MESSAGES))
    leader = asyncio.run(cluster.leader(MESSAGES))
    first.term()
    url = next(server.url for server in cluster.servers if server is not leader)
    return View(gateway_factory(url, "--admin-listen", "127.0.0.1:0", "--gateway-lease", "300"), url)


def test_the_leader_is_away(cluster: Cluster, view: View) -> None:
    """For as long as an election takes: the stream is named everywhere, and how much waits for it."""
    reason = f"JetStream does not store to {MESSAGES}"
    told: list[bool] = [False, False, False]
    view.nats_url = cluster.url  # in a later round the gateway's own server may be the one that led
    with Raw.connected(view.gateway.port, "publisher") as client:
        for _ in range(6):  # an election that is over before a look is another round
            leader = asyncio.run(cluster.leader(MESSAGES))
            with (
                looking(view.ready) as ready,
                looking(view.status) as status,
                looking(lambda: str(view.states())) as api,
            ):
                leader.kill()
                client.send(publish("t", b"1", qos=1))
                client.expect(raw.PUBACK, PATIENCE)
                eventually(lambda: view.ready() == "ready", PATIENCE)
                eventually(lambda: "  running  " in view.status(), PATIENCE)
            shown = re.compile(rf"  not ready: {re.escape(reason)} ")
            now = (reason in ready, any(reason in one for one in api), any(shown.search(one) for one in status))
            told = [before or seen for before, seen in zip(told, now, strict=True)]
            if all(told):
                break
            leader.start()
            asyncio.run(cluster.settled(MESSAGES))
    assert told == [True, True, True], "in /readyz, in the API, in ctl status"
    log = view.gateway.log
    waits = r"JetStream does not store: (no server answers|no answer for 5 s), on \$MQTT\.msgs\.t; 1 publishes wait"
    assert re.search(waits, log)
    assert f"not ready: {reason}; publishes are not acknowledged" in log
    assert "JetStream stores again to $MQTT_msgs; " in log
    assert "ready again" in log


def test_a_majority_is_away(cluster: Cluster, view: View) -> None:
    """Nothing is stored until a second server is there: which streams that concerns, and what it takes."""
    reason = "JetStream has no leader: that takes a majority of its nats-servers"
    assert view.metric(f'mqtt_nats_stream_available{{stream="{MESSAGES}"}}') == 1
    others = [server for server in cluster.servers if server.url != view.nats_url]
    with Raw.connected(view.gateway.port, "publisher") as client:
        for server in others:
            server.kill()
        client.send(publish("t", b"1", qos=1))
        eventually(lambda: view.ready() == reason, PATIENCE)
        eventually(lambda: view.states() == [reason], PATIENCE)
        eventually(lambda: f"  not ready: {reason}  " in view.status(), PATIENCE)
        eventually(
            lambda: re.search(r"^\$MQTT_msgs +no leader$", view.ctl("cluster", "status"), re.MULTILINE), PATIENCE
        )
        warning = f"{MESSAGES}: no leader: nothing is stored there at present"
        eventually(lambda: warning in view.api("streams")["warnings"], PATIENCE)
        eventually(lambda: view.metric(f'mqtt_nats_stream_available{{stream="{MESSAGES}"}}') == 0, PATIENCE)
        assert view.metric('mqtt_nats_ready{worker="1"}') == 0
        assert view.metric('mqtt_nats_nats_connected{link="main",worker="1"}') == 1
        assert "not ready: JetStream " in view.gateway.log
        for server in others:
            server.start()
        client.expect(raw.PUBACK, PATIENCE)
        eventually(lambda: view.ready() == "ready", PATIENCE)
        eventually(lambda: "  running  " in view.status(), PATIENCE)
    assert "ready again" in view.gateway.log


ACCOUNT = """
accounts {
    A { jetstream { max_file: 12MB }, users: [{user: a, password: a}] }
    "$SYS" { users: [{user: s, password: s}] }
}
no_auth_user: a
"""


async def test_the_account_of_a_cluster_has_no_room(tmp_path: Path, gateway_factory: GatewayFactory) -> None:
    """Leaders stay, so that what is stored can be removed; publishes of 3.1.1 clients wait for that."""
    cluster = Cluster(tmp_path, config=ACCOUNT)
    try:
        await asyncio.to_thread(cluster.start)
        view = View(gateway_factory(cluster.url, "--admin-listen", "127.0.0.1:0"), cluster.url)
        assert view.metric("mqtt_nats_jetstream_allowed_bytes") == 12 * 1024 * 1024
        with Raw.connected(view.gateway.port, "publisher") as client:
            number = 0
            with contextlib.suppress(TimeoutError):
                while True:
                    number += 1
                    client.send(publish("full", bytes(8000), qos=1, id=number))
                    one = client.receive(WAITING_S)
                    assert one is not None
                    assert one.kind == raw.PUBACK
            reason = "JetStream storage is full: resource limits exceeded for account (JetStream error 10002)"
            eventually(lambda: view.ready() == reason, PATIENCE)
            eventually(lambda: f"  not ready: {reason}  " in view.status(), PATIENCE)
            status = view.status()
            assert re.search(r"^JetStream storage +1\d MiB of 12 MiB \((9\d|1\d\d)%\)$", status, re.MULTILINE), status
            assert re.search(r"^refused stores +[1-9]\d* storage full$", status, re.MULTILINE), status
            assert view.metric(f'mqtt_nats_stream_available{{stream="{MESSAGES}"}}') == 1
            nats_client = await nats.connect(cluster.servers[0].url)
            await nats_client.jetstream().purge_stream(MESSAGES)
            await nats_client.close()
            assert client.expect(raw.PUBACK, PATIENCE).id == number
        eventually(lambda: view.ready() == "ready", PATIENCE)
    finally:
        cluster.discard()


def test_a_server_stands_still(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    """The connection stays, and nothing is answered: errors say what the gateway knows."""
    server = nats_factory()
    view = View(gateway_factory(server, "--admin-listen", "127.0.0.1:0"), server.url)
    reason = "JetStream does not answer"
    assert view.states() == [""]
    with Raw.connected(view.gateway.port, "publisher") as client:
        server.pause()
        try:
            client.send(publish("t", b"1", qos=1))
            eventually(lambda: view.ready() == reason, PATIENCE)
            error = view.api("status")
            assert error.startswith("no gateway answers: ")
            assert error.endswith(f" (this gateway is not ready: {reason})")
            assert view.metric('mqtt_nats_ready{worker="1"}') == 0
            assert view.metric(f'mqtt_nats_stream_available{{stream="{MESSAGES}"}}') == 0
            assert view.metric('mqtt_nats_pending_stores{worker="1"}') == 1
            assert "if one is there, it stands still or is overloaded" in view.status()
            assert "JetStream does not store: no answer for 5 s, on $MQTT.msgs.t; 1 publishes wait" in view.gateway.log
            assert f"not ready: {reason}; publishes are not acknowledged" in view.gateway.log
        finally:
            server.resume()
        client.expect(raw.PUBACK, PATIENCE)
        eventually(lambda: view.ready() == "ready", PATIENCE)
        eventually(lambda: "  running  " in view.status(), PATIENCE)


def test_stores_are_slow(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    """Everything is stored, so the gateway is ready: how long it takes is in the status and in metrics."""
    server = nats_factory()
    with Proxy(server.port) as proxy:
        view = View(gateway_factory(proxy.url, "--admin-listen", "127.0.0.1:0"), server.url)
        with Raw.connected(view.gateway.port, "publisher") as client:
            proxy.slow(0.7)
            for number in range(1, 4):
                client.send(publish("t", b"1", qos=1, id=number))
                client.expect(raw.PUBACK, PATIENCE)
            assert view.ready() == "ready"
            (found,) = view.api("status")["gateways"]
            assert found["stored"]["last"] >= 1.4
            proxy.restore()
            below = view.metric('mqtt_nats_store_seconds_bucket{le="1.0",worker="1"}')
            assert view.metric('mqtt_nats_store_seconds_count{worker="1"}') - below >= 3
            assert re.search(r"  [1-9],\d{3}\.\d ms  ", view.status())
