# SPDX-License-Identifier: Apache-2.0
"""What a job says while NATS is away, with a real nats-server."""

import re
import threading
from pathlib import Path
from typing import Self

import pytest

from pyspark_mqtt_nats.errors import ConnectError
from pyspark_mqtt_nats.jobs import monitor, rule
from pyspark_mqtt_nats.jobs.monitor import Monitor
from pyspark_mqtt_nats.nats.access import Access
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.rules import metrics
from pyspark_mqtt_nats.rules.query import Figures
from tests.backbone.certificates import USER, nkey
from tests.conftest import NatsFactory
from tests.harness.monitor import Monitor as Monitoring
from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually, free_port


class Staying(Monitor):
    """A monitor that says whether nats-server has answered its present connection."""

    staying = False

    def _stay(self, connection: Connection) -> None:
        self.staying = True
        try:
            super()._stay(connection)
        finally:
            self.staying = False


class Watched:
    """A nats-server, and what a monitor of it says."""

    def __init__(self, nats_factory: NatsFactory, patience: str) -> None:
        port = free_port()
        self.server: NatsServer = nats_factory(config=f'http: "127.0.0.1:{port}"')
        self.said: list[str] = []
        options = Options.parse({"servers": self.server.url, "connectTimeout": patience})
        self.monitor = Staying(options, self.said.append)
        self._monitoring = Monitoring(port)

    def connected(self) -> None:
        """Wait for a connection of the monitor that nats-server has answered."""
        eventually(lambda: self._monitoring.get("connz")["num_connections"] == 1 and self.monitor.staying)


@pytest.fixture
def watched(nats_factory: NatsFactory, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(monitor, "INTERVAL_S", 0.1)
    return Watched(nats_factory, "2")


def test_a_loss_is_told_once_and_so_is_its_end(watched: Watched) -> None:
    with watched.monitor as looking:
        watched.connected()
        assert looking.error == ""
        watched.server.kill()
        eventually(lambda: watched.said)
        refused = f"cannot connect to {watched.server.url}: connection refused (option servers)"
        assert watched.said == [f"the connection to NATS is lost: {refused}"]
        assert looking.error == refused
        watched.server.start()
        eventually(lambda: len(watched.said) == 2)
        assert re.fullmatch(r"the connection to NATS is back after \d+ s", watched.said[1])
        assert looking.error == ""


def test_a_server_that_is_silent_is_lost(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "ANSWER_S", 0.5)
    with watched.monitor:
        watched.connected()
        watched.server.pause()
        eventually(lambda: watched.said)
        assert watched.said[0].startswith(f"the connection to NATS is lost: cannot connect to {watched.server.url}: ")
        watched.server.resume()
        eventually(lambda: len(watched.said) == 2)


def test_a_restart_is_not_told(nats_factory: NatsFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "INTERVAL_S", 0.1)
    monkeypatch.setattr(monitor, "ANSWER_S", 60.0)
    watched = Watched(nats_factory, "60")
    with watched.monitor:
        watched.connected()
        watched.server.restart()
        watched.connected()
    assert watched.said == []


def test_nothing_is_told_before_nats_has_answered(watched: Watched) -> None:
    watched.server.kill()
    with watched.monitor as looking:
        watched.server.start()
        watched.connected()
        assert looking.error == ""
    assert watched.said == []


class Attempts:
    """Connections that a monitor makes: the second one waits for leave, and every PING finds a connection lost."""

    def __init__(self) -> None:
        self.accesses: list[Access] = []
        self.leave = threading.Event()

    def __call__(self, access: Access) -> Self:
        self.accesses.append(access)
        if len(self.accesses) == 2:
            assert self.leave.wait(30)
            raise ConnectError("refused")
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def send(self, data: bytes) -> None:
        raise ConnectError("lost")


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    made = Attempts()
    monkeypatch.setattr(monitor, "INTERVAL_S", 0.01)
    monkeypatch.setattr(monitor, "Connection", made)
    return made


def test_nothing_is_told_after_the_end(attempts: Attempts) -> None:
    said: list[str] = []
    before = set(threading.enumerate())
    with Monitor(Options.parse({"servers": "nats://a"}), said.append):
        (thread,) = set(threading.enumerate()) - before
        eventually(lambda: len(attempts.accesses) == 2)
    attempts.leave.set()
    thread.join(30)
    assert not thread.is_alive()
    assert said == []


def test_a_file_that_is_being_replaced_keeps_what_was_read_last(attempts: Attempts, tmp_path: Path) -> None:
    seed = tmp_path / "seed"
    seed.write_bytes(nkey(USER).seed)
    options = Options.parse({"servers": "nats://a", "nkey": str(seed)})
    renewed = nkey(USER).seed
    seed.write_bytes(renewed)
    with Monitor(options, print):
        eventually(lambda: len(attempts.accesses) == 2)
        seed.unlink()
        attempts.leave.set()
        eventually(lambda: len(attempts.accesses) > 2)
    assert [one.nkey for one in attempts.accesses[:3]] == [renewed.decode()] * 3


def test_rules_that_wait_for_nats_are_not_up() -> None:
    figures = {"hot": Figures(read=5), "cold": Figures(error="no such column")}
    assert rule.seen(figures, "") == figures
    text = metrics.text(rule.seen(figures, "connection refused"))
    assert 'mqtt_nats_rule_up{rule="hot"} 0' in text
    assert 'mqtt_nats_rule_rows_read_total{rule="hot"} 5' in text
    assert 'mqtt_nats_rule_error_info{rule="hot",error="connection refused"} 1' in text
    assert 'mqtt_nats_rule_error_info{rule="cold",error="no such column"} 1' in text
