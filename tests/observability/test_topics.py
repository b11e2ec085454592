# SPDX-License-Identifier: Apache-2.0
"""Names and values of `$SYS` topics, load averages, and the names of clients in topics: what needs no gateway."""

from __future__ import annotations

from math import exp
from typing import Any
from urllib.parse import unquote

import pytest

from mqtt_nats.access.acl import Identity, Pattern, Permissions, Rule, Rules, Who
from mqtt_nats.codec import validate_topic_name
from mqtt_nats.observability.load_averages import Averages
from mqtt_nats.observability.presence_events import level, places
from mqtt_nats.observability.topics import LOADS, of_cluster, of_gateway, totals
from mqtt_streams.subjects import MAX_SUBJECT_BYTES, system_subject


def report(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": "aaaaaaaa",
        "time": 1100.0,
        "since": 1000.0,
        "interval": 60.0,
        "version": "0.1.0",
        "clients": 3,
        "connections": 4,
        "most": 5,
        "durable": 2,
        "regular": 1,
        "subscriptions": 7,
        "filters": 6,
        "inflight": 8,
        "memory": 1000,
        "connects": 9,
        "refused": {"not_authorized": 2},
        "disconnects": {"client": 6},
        "received": [10, 20, 30],
        "received_bytes": [100, 200, 300],
        "sent": [1, 2, 3],
        "sent_bytes": [11, 12, 13],
        "dropped": {"denied": 1, "expired": 2, "too large": 3, "slow client": 4, "hook": 5, "backlog": 6},
        "streams": {"messages": 50, "bytes": 5000, "retained": 12, "sessions": 10},
    }
    found["loads"] = {name: [1.0, 2.0, 3.0] for name in LOADS}
    return found | changes


def test_sums_of_the_cluster() -> None:
    second = report(id="bbbbbbbb", since=900.0, time=1101.0, clients=4, streams={})
    found = of_cluster([report(), second], 11)
    assert found["$SYS/brokers"] == "aaaaaaaa,bbbbbbbb"
    values = {name.removeprefix("$SYS/broker/"): value for name, value in found.items()}
    assert values["version"] == "mqtt-nats version 0.1.0"
    assert values["uptime"] == "201 seconds"
    assert values["clients/connected"] == "7"
    assert values["clients/maximum"] == "11"
    assert (values["clients/total"], values["clients/disconnected"]) == ("10", "3")
    assert (values["messages/received"], values["messages/sent"]) == ("120", "12")
    assert (values["publish/bytes/received"], values["publish/bytes/sent"]) == ("1200", "72")
    assert values["publish/messages/dropped"] == "42"
    assert values["subscriptions/count"] == "14"
    assert (values["messages/stored"], values["store/messages/bytes"]) == ("50", "5000")
    assert values["retained messages/count"] == "12"
    assert values["load/publish/received/5min"] == "4.00"
    assert {f"load/{one}/{minutes}min" for one in LOADS for minutes in (1, 5, 15)} <= values.keys()


def test_what_is_stored_is_left_out_where_nobody_knows_it() -> None:
    assert "$SYS/broker/messages/stored" not in of_cluster([report(streams={})], 3)


def test_topics_of_a_gateway() -> None:
    found = {name.removeprefix("$SYS/brokers/aaaaaaaa/"): value for name, value in of_gateway(report()).items()}
    assert found["version"] == "0.1.0"
    assert found["uptime"] == "100000"
    assert found["datetime"] == "1970-01-01T00:18:20+00:00"
    assert found["stats/connections/count"] == "3"
    assert found["stats/connections/max"] == "5"
    assert found["stats/subscriptions/count"] == "7"
    assert found["stats/retained/count"] == "12"
    assert found["metrics/messages/qos2/received"] == "30"
    assert found["metrics/messages/dropped"] == "21"
    assert found["metrics/delivery/dropped"] == "15"
    assert found["metrics/client/disconnected"] == "6"


def test_all_names_are_topics() -> None:
    for name in of_gateway(report()) | of_cluster([report()], 1):
        encoded = name.encode()
        validate_topic_name(len(encoded).to_bytes(2) + encoded, 128, 3800)
        assert system_subject(name).startswith("$MQTT_SYS.")


def test_load_averages() -> None:
    averages = Averages()
    averages.update({"a": 100}, 0.0)
    assert averages.loads == {"a": [0.0, 0.0, 0.0]}
    averages.update({"a": 110}, 10.0)
    assert averages.loads["a"] == pytest.approx([60 * (1 - exp(-10 / (60 * minutes))) for minutes in (1, 5, 15)])
    for _ in range(1000):
        averages.update({"a": 110}, 10.0)
    assert averages.loads["a"] == pytest.approx([0.0, 0.0, 0.0], abs=0.01)
    one = totals(report())
    assert set(one) == set(LOADS)


@pytest.mark.parametrize("client_id", ["lamp", "a/b", "a.b", "+", "#", "a b", "$SYS", "é\u2028", "*", ">", "100%"])
def test_any_client_id_is_one_level_of_a_topic_and_of_a_subject(client_id: str) -> None:
    assert unquote(level(client_id)) == client_id
    where = places("connected", "aaaaaaaa", client_id)
    assert where.topic.count("/") == 5
    encoded = where.topic.encode()
    validate_topic_name(len(encoded).to_bytes(2) + encoded, 128, 3800)
    assert where.inner == system_subject(where.topic)
    assert where.inner.count(".") == 5
    assert where.subject.count(".") == 3


def test_a_client_id_that_is_too_long_is_hashed() -> None:
    long = "é" * 4000
    where = places("disconnected", "aaaaaaaa", long)
    assert len(where.subject) < MAX_SUBJECT_BYTES
    assert where.inner == system_subject(where.topic)
    assert len(where.inner) < MAX_SUBJECT_BYTES


def permissions(topics: str) -> Permissions:
    rule = Rule(True, Who(), "subscribe", (Pattern(topics),))
    return Rules((rule,)).permissions(Identity(None, "lamp"))


@pytest.mark.parametrize(
    ("rule", "asked", "allowed"),
    [
        ("#", "$SYS/#", False),
        ("#", "$SYS/broker/uptime", False),
        ("+/#", "$SYS/#", False),
        ("$SYS/#", "$SYS/#", True),
        ("$SYS/broker/#", "$SYS/broker/load/#", True),
        ("$SYS/broker/#", "$SYS/#", False),
        ("$SYS/#", "#", False),
    ],
)
def test_rules_have_to_name_system_topics(rule: str, asked: str, allowed: bool) -> None:
    assert permissions(rule).subscribe(asked, 0) is allowed
