# SPDX-License-Identifier: Apache-2.0
"""What a job says while NATS is away, with a real nats-server."""

import re

import pytest

from pyspark_mqtt_nats.jobs import monitor, rule
from pyspark_mqtt_nats.jobs.monitor import Monitor
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.rules import metrics
from pyspark_mqtt_nats.rules.query import Figures
from tests.conftest import NatsFactory
from tests.harness.monitor import Monitor as Monitoring
from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually, free_port


class Watched:
    """A nats-server, and what a monitor of it says."""

    def __init__(self, nats_factory: NatsFactory, patience: str) -> None:
        port = free_port()
        self.server: NatsServer = nats_factory(config=f'http: "127.0.0.1:{port}"')
        self.said: list[str] = []
        options = Options.parse({"servers": self.server.url, "connectTimeout": patience})
        self.monitor = Monitor(options, self.said.append)
        self._monitoring = Monitoring(port)

    def connected(self) -> None:
        """Wait for a connection of the monitor."""
        eventually(lambda: self._monitoring.get("connz")["num_connections"] == 1)


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


def test_rules_that_wait_for_nats_are_not_up() -> None:
    figures = {"hot": Figures(read=5), "cold": Figures(error="no such column")}
    assert rule.seen(figures, "") == figures
    text = metrics.text(rule.seen(figures, "connection refused"))
    assert 'mqtt_nats_rule_up{rule="hot"} 0' in text
    assert 'mqtt_nats_rule_rows_read_total{rule="hot"} 5' in text
    assert 'mqtt_nats_rule_error_info{rule="hot",error="connection refused"} 1' in text
    assert 'mqtt_nats_rule_error_info{rule="cold",error="no such column"} 1' in text
