# SPDX-License-Identifier: Apache-2.0
"""The alert rules: their metrics are there from the start, each has a section, and promtool finds what they find."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from pyspark_mqtt_nats.rules import metrics as rule_metrics
from pyspark_mqtt_nats.rules.query import Figures
from tests.admin.promql import TARGET, Samples
from tests.admin.support import PATIENCE, address
from tests.backbone.certificates import Authority
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness import raw5
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop, will
from tests.harness.shell import BUILD_WAIT, find_promtool
from tests.harness.waiting import eventually
from tests.test_docs import anchors
from tests.transport.support import NAME, tls, write_config

RULES: Final = ROOT / "deploy" / "prometheus" / "alerts.yaml"
UNIT_TESTS: Final = RULES.with_name("alerts_test.yaml")
PAGE: Final = ROOT / "docs" / "alerts.md"

DASHBOARD: Final = ROOT / "docs" / "grafana" / "mqtt-nats.json"

RULE_METRICS: Final = rule_metrics.text({"hot": Figures(error="there is no stream x")})
"""What the job `rule` of Spark answers."""

QUOTA_EXCEEDED: Final = 0x97
NEVER: Final = 0xFFFFFFFF
"""Session expiry interval of a session that does not expire."""

ALERTS: Final[list[dict[str, Any]]] = [
    rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]
]


needs_promtool = pytest.mark.timeout(BUILD_WAIT + 240)
"""Of a test that may have to wait until the program is there."""


@pytest.fixture(scope="module")
def promtool() -> str:
    return find_promtool()


@pytest.fixture
def gateway(nats_factory: NatsFactory, gateway_factory: GatewayFactory, tmp_path: Path) -> Gateway:
    """A gateway with a listener of each kind, whose nats-server has little room."""
    server = nats_factory(config="jetstream { max_file_store: 3MB }")
    config = write_config(tmp_path / "gateway.toml", tls(Authority(tmp_path).issue(NAME)))
    return gateway_factory(server, "--config", config, "--admin-listen", "127.0.0.1:0")


def metrics(gateway: Gateway) -> str:
    """All of ``/metrics``."""
    answer = httpx.get(f"{address(gateway)}/metrics", timeout=PATIENCE)
    assert answer.status_code == 200
    return answer.text


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_has_a_section(alert: dict[str, Any]) -> None:
    """With what it means, what to look at and what to do."""
    name = alert["alert"]
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert alert["annotations"]["summary"]
    assert alert["annotations"]["runbook_url"] == f"docs/alerts.md#{name.lower()}"
    assert name.lower() in anchors(PAGE)
    section = PAGE.read_text(encoding="utf-8").partition(f"## {name}\n")[2].partition("\n## ")[0]
    for part in (r"\*\*Means\.\*\*", r"\*\*Look at(\.|, and do\.)\*\*", r"\*\*(Do|Look at, and do)\.\*\*"):
        assert re.search(part, section), part


def test_every_section_has_an_alert() -> None:
    sections = re.findall(r"^## (\w+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sections == [alert["alert"] for alert in ALERTS]


def test_every_alert_has_a_unit_test_in_which_it_fires() -> None:
    text = UNIT_TESTS.read_text(encoding="utf-8")
    fires = re.findall(r"alertname: (\w+)\n +eval_time: \w+\n +exp_alerts:\n +- exp_labels", text)
    assert sorted(fires) == sorted(alert["alert"] for alert in ALERTS)


def test_every_metric_is_there_from_the_start(gateway: Gateway) -> None:
    """With the labels that the rules name; `up` is Prometheus' own, and without tenants there is no label for them."""
    samples = Samples(f"{metrics(gateway)}up 1\n{RULE_METRICS}")
    for alert in ALERTS:
        query = alert["expr"].replace(", tenant", "")
        assert samples.problems(query) == [], alert["alert"]
    assert samples.problems("mqtt_nats_ready == 0 unless mqtt_nats_nothing == 1") == [
        "there is no metric mqtt_nats_nothing"
    ]


def test_the_grafana_dashboard_finds_what_it_asks_for(gateway: Gateway) -> None:
    samples = Samples(metrics(gateway) + RULE_METRICS)
    queries = dashboard_queries()
    assert len(queries) > 30
    for query in queries:
        plain = query.replace("$__rate_interval", "5m").replace("$job", ".*").replace("$instance", ".*")
        assert samples.problems(plain) == [], query
    assert samples.problems("mqtt_nats_nothing") == ["there is no metric mqtt_nats_nothing"]
    assert samples.problems("sum by (x) (mqtt_nats_ready)") == ["mqtt_nats_ready has no label x"]
    assert samples.problems('rate(mqtt_nats_messages_sent_total{qos="3"}[5m])')


def test_the_grafana_dashboard_shows_what_alerts_are_about() -> None:
    known = {"mqtt_nats_build_info", "mqtt_nats_draining", "mqtt_nats_tasks"}
    asked = set(re.findall(r"(?:mqtt_nats|process)_\w+", " ".join(alert["expr"] for alert in ALERTS))) - known
    shown = set(re.findall(r"(?:mqtt_nats|process)_\w+", " ".join(dashboard_queries())))
    assert asked <= shown


def value(gateway: Gateway, name: str, label: str = "") -> float:
    """The only value of a metric, with a label."""
    (found,) = re.findall(rf"^{name}(?:\{{.*{re.escape(label)}.*\}})? (\S+)$", metrics(gateway), re.MULTILINE)
    return float(found)


def test_the_end_of_the_certificate_in_force(
    nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """A new file counts when it was read."""
    name = "mqtt_nats_certificate_expiry_seconds"
    authority = Authority(tmp_path)
    config = write_config(tmp_path / "gateway.toml", tls(authority.issue(NAME)))
    gateway = gateway_factory(nats_server, "--config", config, "--admin-listen", "127.0.0.1:0")
    assert value(gateway, name) == pytest.approx(time.time() + 86_400, abs=300)
    authority.issue(NAME, timedelta(days=30))
    assert value(gateway, name) == pytest.approx(time.time() + 86_400, abs=300)
    os.kill(gateway.pid, signal.SIGHUP)
    eventually(lambda: value(gateway, name) > time.time() + 29 * 86_400)


@pytest.mark.long
def test_dead_gateways_and_absent_sessions(nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    """Nobody deals with the clients of the dead one: the other has not been there for a whole lease of its own."""
    server = nats_factory()
    dead = gateway_factory(server, "--gateway-lease", "2")
    gateway = gateway_factory(
        server,
        *("--gateway-lease", "3600", "--max-session-expiry-interval", "never", "--admin-listen", "127.0.0.1:0"),
    )
    for name in ("dead_gateways", "dead_gateways_with_wills", "absent_session_seconds"):
        assert value(gateway, f"mqtt_nats_{name}") == 0
    assert value(gateway, "mqtt_nats_message_retention_seconds") == 86_400
    for name in ("ever", "for ever"):
        Raw5.open(gateway.port, name, prop(SESSION_EXPIRY, NEVER)).close()
    eventually(lambda: value(gateway, "mqtt_nats_stream_messages", 'stream="$MQTT_timers"') == 2)
    assert value(gateway, "mqtt_nats_absent_session_seconds") == 0, "sessions that never expire do not count"
    Raw5.open(gateway.port, "absent", prop(SESSION_EXPIRY, 600)).close()
    eventually(lambda: 0 < value(gateway, "mqtt_nats_absent_session_seconds") < PATIENCE)
    with Raw5.open(gateway.port, "absent", prop(SESSION_EXPIRY, 600), clean=False):
        eventually(lambda: value(gateway, "mqtt_nats_absent_session_seconds") == 0)
    with Raw5.open(dead.port, "willing", flags=4, tail=will("gone", "x")):
        dead.kill()
    eventually(lambda: value(gateway, "mqtt_nats_dead_gateways") == 1)
    assert value(gateway, "mqtt_nats_dead_gateways_with_wills") == 1


def dashboard_queries() -> list[str]:
    """All queries of the Grafana dashboard."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def run_tests(promtool: str, file: Path) -> None:
    """Have promtool run unit tests of rules."""
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
@needs_promtool
def test_the_rules_are_valid(promtool: str) -> None:
    done = subprocess.run([promtool, "check", "rules", str(RULES)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


@pytest.mark.processes
@needs_promtool
def test_the_unit_tests_of_the_rules(promtool: str) -> None:
    run_tests(promtool, UNIT_TESTS)


def series_of(name: str, labels: Mapping[str, str]) -> str:
    """A series as PromQL writes it."""
    return name + "{" + ", ".join(f'{label}="{value}"' for label, value in labels.items()) + "}"


def recorded(texts: Sequence[str], minutes: int, directory: Path, expected: Mapping[str, Mapping[str, str]]) -> Path:
    """Unit tests of the rules on what a gateway has answered.

    Args:
        texts: answers of ``/metrics``, which hold for ten minutes each.
        minutes: when the alerts are looked at.
        expected: labels of each alert that fires then, besides its name and severity; no other alert does.
    """
    values: dict[str, list[str]] = {}
    for number, text in enumerate(texts):
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                before = values.setdefault(series_of(one.name, {**one.labels, **TARGET}), ["_x9"] * number)
                before.append(f"{one.value:+}".replace("inf", "Inf") + "+0x9")
    rules = [{key: value for key, value in alert.items() if key != "annotations"} for alert in ALERTS]
    looks = []
    for alert in ALERTS:
        name, labels = alert["alert"], alert["labels"]
        firing = [{"exp_labels": {**labels, **expected[name]}}] if name in expected else []
        looks.append({"alertname": name, "eval_time": f"{minutes}m", "exp_alerts": firing})
    test = {
        "interval": "1m",
        "input_series": [{"series": series, "values": " ".join(each)} for series, each in values.items()],
        "alert_rule_test": looks,
    }
    (directory / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "r", "rules": rules}]}), encoding="utf-8")
    file = directory / "recorded.yaml"
    content = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


@pytest.mark.long
@pytest.mark.processes
@needs_promtool
def test_a_gateway_in_order_and_one_without_room(promtool: str, gateway: Gateway, tmp_path: Path) -> None:
    """What a real gateway answers: nothing fires, then its nats-server has no room."""
    before = metrics(gateway)
    run_tests(promtool, recorded([before], 9, tmp_path, {}))
    with Raw5.open(gateway.port, "filler") as client:
        for number in range(1, 100):
            client.send(raw5.publish("full", bytes(100_000), qos=1, id=number))
            if client.answer(raw5.PUBACK, number).reason == QUOTA_EXCEEDED:
                break
    after = metrics(gateway)
    assert 'mqtt_nats_stores_refused_total{reason="storage_full",worker="1"} 1.0' in after
    run_tests(promtool, recorded([before, after], 12, tmp_path, {"MqttNatsStorageFull": TARGET}))
