# SPDX-License-Identifier: Apache-2.0
"""Metrics from what workers tell, the page that names them, and the sums."""

from __future__ import annotations

import ast
import math
import re
import time
from typing import Any

import pytest
from prometheus_client.openmetrics import exposition, parser
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from mqtt_nats.admin import metrics
from mqtt_nats.admin.listener import AdminListener
from mqtt_nats.config.accounts import TenantSettings
from mqtt_nats.config.settings import Settings
from mqtt_nats.observability.counters import LAGS, LATENCIES, Counters, Histogram
from mqtt_nats.observability.jetstream_state import JetStreamState, StreamState, stream_state
from mqtt_nats.observability.process_usage import process_usage
from mqtt_streams.account import AccountStorage, account_storage
from tests.admin.fakes import FakeListener, as_listener
from tests.harness.nats import ROOT


def worker(number: int, **changed: Any) -> dict[str, Any]:
    stored, lag = Histogram(LATENCIES), Histogram(LAGS)
    for value in (0.0001, 0.0005, 0.002, 20.0):
        stored.observe(value * number)
    zero = dict.fromkeys(("connects", "connections", "clients", "durable", "regular", "subscriptions", "filters"), 0)
    zero |= dict.fromkeys(("inflight", "queued", "unacknowledged", "unread_bytes", "slow", "stalled"), 0)
    zero["oldest_unacknowledged"] = 60 * number
    zero |= dict.fromkeys(("pending_stores", "pending_store_bytes", "resent_stores", "reconnects"), 0)
    zero |= dict.fromkeys(("cpu", "memory", "tasks", "copies_stored"), 0)
    return {
        **zero,
        "worker": number,
        "since": 1000.0 + number,
        "received": [number, 0, 0],
        "received_bytes": [10 * number, 0, 0],
        "sent": [0, 0, 0],
        "sent_bytes": [0, 0, 0],
        "refused": {"not_authorized": number},
        "limited": {"max_sessions": number},
        "filters_refused": Counters([0], [0]).filters_refused | {"max_subscriptions": number},
        "disconnects": Counters([0], [0]).disconnects,
        "dropped": {"too large": number},
        "refused_stores": {"storage_full": number, "other": 0},
        "failures": {"denied": number},
        "log_records_left_out": number,
        "nats": [{"link": "main", "online": number == 1}],
        "stored": stored.state(),
        "lag": lag.state(),
        "draining": False,
        "obstacle": "",
        "refused_tenants": {},
        "tenants": {},
        "process": {name: 1.5 for name, *_ in metrics.PROCESS} | {"start_time_seconds": 1000.0 + number},
        **changed,
    }


STATE = JetStreamState(
    {"$MQTT_msgs": StreamState(True, 5, 50, 1, max_age=60.0), "$MQTT_sess": StreamState(False)},
    AccountStorage(100, None),
    2,
    1,
    3.5,
)


def listener(**settings: Any) -> AdminListener:
    """An admin listener, as far as metrics look at it."""
    found = FakeListener(Settings(**settings), workers=2)
    found.certificates["0.0.0.0:8883"] = 1e9
    return as_listener(found)


def families(reports: list[dict[str, Any]], aggregated: bool, **settings: Any) -> dict[str, Any]:
    text = metrics.exposed(metrics.families(listener(**settings), reports, {"": STATE}, aggregated)).decode()
    return {one.name: one for one in text_string_to_metric_families(text)}


def values(family: Any) -> dict[tuple[str, ...], float]:
    """By name, worker and the other labels."""
    found = {}
    for one in family.samples:
        labels = sorted(one.labels, key=lambda name: name != "worker")
        found[one.name, *(one.labels[label] for label in labels)] = one.value
    return found


def test_each_worker_and_their_sums() -> None:
    reports = [worker(1), worker(2, obstacle="JetStream does not answer")]
    each, all_of_them = families(reports, False), families(reports, True)
    name = "mqtt_nats_messages_received"
    assert values(each[name])[f"{name}_total", "1", "0"] == 1
    assert values(each[name])[f"{name}_total", "2", "0"] == 2
    assert values(all_of_them[name])[f"{name}_total", "0"] == 3
    assert values(all_of_them["mqtt_nats_messages_dropped"])["mqtt_nats_messages_dropped_total", "too_large"] == 3
    assert values(each["mqtt_nats_ready"]) == {("mqtt_nats_ready", "1"): 1, ("mqtt_nats_ready", "2"): 0}
    assert values(all_of_them["mqtt_nats_ready"]) == {("mqtt_nats_ready",): 0}
    assert values(all_of_them["mqtt_nats_start_time_seconds"]) == {("mqtt_nats_start_time_seconds",): 1001}
    assert values(all_of_them["mqtt_nats_nats_connected"]) == {("mqtt_nats_nats_connected", "main"): 0}
    assert values(each["mqtt_nats_worker_up"])["mqtt_nats_worker_up", "2"] == 1
    assert values(families(reports[:1], False)["mqtt_nats_worker_up"])["mqtt_nats_worker_up", "2"] == 0


def test_tenants() -> None:
    """Each has its own values, beside those of the gateway's account; what is of the process is there once."""
    mine = {"tenants": {"acme": TenantSettings(nats_user="acme", nats_password=SecretStr("pw"))}}
    reports = [worker(number, tenants={"acme": worker(10 * number)}) for number in (1, 2)]
    each, together = families(reports, False, **mine), families(reports, True, **mine)
    name = "mqtt_nats_messages_received"
    assert values(each[name])[f"{name}_total", "2", "0", ""] == 2
    assert values(each[name])[f"{name}_total", "2", "0", "acme"] == 20
    assert values(together[name])[f"{name}_total", "0", "acme"] == 30
    assert values(each["mqtt_nats_tasks"]) == {("mqtt_nats_tasks", "1"): 0, ("mqtt_nats_tasks", "2"): 0}
    assert values(together["mqtt_nats_store_seconds"])["mqtt_nats_store_seconds_count", "acme"] == 8
    assert ("mqtt_nats_loop_lag_seconds_count",) in values(together["mqtt_nats_loop_lag_seconds"])


def test_histograms() -> None:
    reports = [worker(1), worker(2)]
    found = values(families(reports, False)["mqtt_nats_store_seconds"])
    assert found["mqtt_nats_store_seconds_bucket", "1", "0.0005"] == 2  # a class has its upper end
    assert found["mqtt_nats_store_seconds_bucket", "1", "10.0"] == 3
    assert found["mqtt_nats_store_seconds_bucket", "1", "+Inf"] == found["mqtt_nats_store_seconds_count", "1"] == 4
    together = values(families(reports, True)["mqtt_nats_store_seconds"])
    assert together[("mqtt_nats_store_seconds_count",)] == 8
    assert together["mqtt_nats_store_seconds_bucket", "0.0005"] == 3


def test_processes() -> None:
    """The usual names, one for each worker; what a machine does not tell is not there."""
    reports = [worker(1), worker(2)]
    for one in reports:
        del one["process"]["max_fds"]
    each, together = families(reports, False), families(reports, True)
    assert values(each["process_cpu_seconds"])["process_cpu_seconds_total", "2"] == 1.5
    assert values(together["process_cpu_seconds"]) == {("process_cpu_seconds_total",): 3}
    assert values(together["process_open_fds"]) == {("process_open_fds",): 3}
    assert values(together["process_start_time_seconds"]) == {("process_start_time_seconds",): 1001}
    assert values(each["process_max_fds"]) == {}


def test_what_a_process_takes() -> None:
    found = process_usage()
    assert set(found) == {name for name, *_ in metrics.PROCESS}
    assert found["resident_memory_bytes"] > 1_000_000
    assert found["virtual_memory_bytes"] > found["resident_memory_bytes"]
    assert 0 < found["open_fds"] < found["max_fds"]
    assert 0 < found["cpu_seconds_total"] < time.time() - found["start_time_seconds"] + 1000


def test_every_counter_is_there_from_the_start() -> None:
    """Else a rate does not see the first refusal: there is no 0 before it."""
    found = values(families([worker(1)], True)["mqtt_nats_connects_refused"])
    assert found["mqtt_nats_connects_refused_total", "not_authorized"] == 1
    assert found["mqtt_nats_connects_refused_total", "bad_user_name_or_password"] == 0
    assert set(metrics.REFUSALS) == {label for _, label in found}
    limits = values(families([worker(1, limited={"max_sessions": 2})], True)["mqtt_nats_limits_reached"])
    assert {label for _, label in limits} == set(metrics.SESSION_LIMITS)
    assert limits["mqtt_nats_limits_reached_total", "max_sessions"] == 2


def test_every_kind_of_failure_is_known() -> None:
    """What the sources count by kind, and by limit, has a series from the start."""
    kinds: set[object] = set()
    limits: set[object] = set()
    for path in (ROOT / "mqtt_nats").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                at = {"log_failure": 2, "_count_refusal": 0}.get(name)
                if at is not None and isinstance(given := node.args[at], ast.Constant):
                    (kinds if name == "log_failure" else limits).add(given.value)
    assert kinds
    assert kinds <= set(metrics.FAILURE_KINDS)
    assert limits == set(metrics.SESSION_LIMITS)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("application/openmetrics-text; version=1.0.0; charset=utf-8,text/plain;q=0.5", True),
        ("text/plain;version=0.0.4;q=1,application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.8", True),
        ("Application/OpenMetrics-Text", True),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=0.0,text/plain", False),
        ("text/plain", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_who_asks_for_open_metrics(accept: str, wanted: bool) -> None:
    assert metrics.accepts(accept, metrics.OPEN_METRICS) is wanted


def test_open_metrics() -> None:
    found = metrics.families(listener(), [worker(1)], {}, False)
    found_text = metrics.exposed(found, exposition.generate_latest).decode()
    assert found_text.endswith("# EOF\n")
    assert "# TYPE mqtt_nats_connects counter\n" in found_text
    read = {one.name for one in parser.text_string_to_metric_families(found_text)}  # type: ignore[no-untyped-call]
    assert read == {name.removesuffix("_info") for name in families([worker(1)], False)}


def test_jetstream() -> None:
    """A stream that is not available has no numbers; what is not known has no sample."""
    found = families([worker(1)], False)
    assert values(found["mqtt_nats_stream_available"]) == {
        ("mqtt_nats_stream_available", "$MQTT_msgs"): 1,
        ("mqtt_nats_stream_available", "$MQTT_sess"): 0,
    }
    assert values(found["mqtt_nats_stream_messages"]) == {("mqtt_nats_stream_messages", "$MQTT_msgs"): 5}
    assert values(found["mqtt_nats_jetstream_used_bytes"]) == {("mqtt_nats_jetstream_used_bytes",): 100}
    assert values(found["mqtt_nats_jetstream_allowed_bytes"]) == {("mqtt_nats_jetstream_allowed_bytes",): math.inf}
    assert values(found["mqtt_nats_dead_gateways"]) == {("mqtt_nats_dead_gateways",): 2}
    assert values(found["mqtt_nats_message_retention_seconds"]) == {("mqtt_nats_message_retention_seconds",): 60}
    unknown = list(metrics.families(listener(), [worker(1)], {"": JetStreamState({})}, False))
    empty = [one for one in unknown if one.name.startswith(("mqtt_nats_stream_", "mqtt_nats_jetstream_"))]
    assert len(empty) == 8
    assert not any(one.samples for one in empty)


@pytest.mark.parametrize(
    ("info", "used", "allowed"),
    [
        ({"storage": 5, "limits": {"max_storage": 10}}, 5, 10),
        ({"storage": 5, "limits": {"max_storage": -1}}, 5, None),
        ({"storage": 5}, 5, None),
        ({"storage": 5, "tiers": {"R1": {"limits": {"max_storage": 7}}, "R3": {"limits": {"max_storage": 8}}}}, 5, 15),
        (
            {"storage": 5, "tiers": {"R1": {"limits": {"max_storage": 7}}, "R3": {"limits": {"max_storage": -1}}}},
            5,
            None,
        ),
    ],
)
def test_the_storage_of_an_account(info: dict[str, Any], used: int, allowed: int | None) -> None:
    assert account_storage(info) == AccountStorage(used, allowed)


def test_the_state_of_a_stream() -> None:
    replicas = [{"current": True}, {"current": False, "lag": 7}, {"current": True, "offline": True, "lag": 3}]
    state = {"messages": 1, "bytes": 2, "consumer_count": 3}
    info = {"config": {"max_age": 60 * 10**9}, "state": state, "cluster": {"leader": "n0", "replicas": replicas}}
    assert stream_state(info) == StreamState(True, 1, 2, 3, 2, 7, 60.0)
    assert stream_state({"config": {}, "state": state}) == StreamState(True, 1, 2, 3)
    assert not stream_state({**info, "cluster": {"name": "c", "replicas": replicas}}).available, "any replica answers"


def test_nobody_answers() -> None:
    for aggregated in (False, True):
        found = families([], aggregated)
        assert values(found["mqtt_nats_worker_up"]) == {
            ("mqtt_nats_worker_up", "1"): 0,
            ("mqtt_nats_worker_up", "2"): 0,
        }


def test_the_page_names_every_metric_and_no_other() -> None:
    text = (ROOT / "docs" / "admin.md").read_text(encoding="utf-8")
    table = text.partition("<!-- begin: metrics -->")[2].partition("<!-- end: metrics -->")[0]
    named = {
        row[0]: row[1:]
        for row in re.findall(r"^\| `((?:mqtt_nats|process)_\w+)` \| ([^|]*) \| ([^|]*) \|$", table, re.MULTILINE)
    }
    found = families([worker(1, refused_tenants={"acme": "no server answers"})], False)
    real = {}
    for family in found.values():
        plain = {one.name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for one in family.samples}
        assert len(plain) == 1
        labels = {name for one in family.samples for name in one.labels}
        real[plain.pop()] = labels
    assert set(named) == set(real)
    for name, (labels, _) in named.items():
        if not name.endswith("_info"):
            assert {one.strip() for one in labels.split(",")} - {"–"} == real[name], name
