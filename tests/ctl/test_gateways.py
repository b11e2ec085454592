# SPDX-License-Identifier: Apache-2.0
"""``ctl status``, ``listeners``, ``hooks``, ``acl check``, ``streams`` and ``reload``."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.config.build_info import build_and_reason
from mqtt_nats.ctl.commands.gateways import shown
from mqtt_nats.ctl.commands.streams import _warnings
from mqtt_streams import api
from mqtt_streams.api import ApiError
from mqtt_streams.definitions import EVERY
from tests.ctl.conftest import Fleet
from tests.ctl.test_trace import Watching
from tests.harness.raw5 import Raw5, publish
from tests.harness.waiting import eventually, free_port


def test_status(fleet: Fleet) -> None:
    one, two = fleet.ids
    with Raw5.open(fleet.one.port, "c-status") as client:
        before = {each["gateway"]: sum(each["received"]) for each in fleet.json("status")["gateways"]}
        client.send(publish("status/x", b"1") + publish("status/x", b"2"))
        client.quiet()
        found = fleet.json("status")
        after = {each["gateway"]: sum(each["received"]) for each in found["gateways"]}
        assert (after[one] - before[one], after[two] - before[two]) == (2, 0)
        assert found["stored"]["sessions"] >= 1
        # A gateway that another test has killed has its lease for a while.
        eventually(lambda: fleet.json("status")["silent"] == [], 60)
        text = fleet.text("status")
        assert re.search(rf"^{one} +running +\S+ \S+ +[1-9]\d* ", text, re.MULTILINE), text
        assert re.search(r"^sessions +[1-9]\d*$", text, re.MULTILINE), text
        assert re.search(r"^JetStream storage +\d[\d.]* (Ki)?B, the account has no limit$", text, re.MULTILINE), text
        assert re.search(r"^refused stores +none$", text, re.MULTILINE), text
        assert re.search(rf"^build +{re.escape(build_and_reason())}$", text, re.MULTILINE), text
        (only,) = fleet.json("status", "--gateway", two)["gateways"]
        assert only["gateway"] == two


def test_status_of_a_full_storage() -> None:
    """The sums over the gateways by reason; one that is older does not tell."""
    one = {
        "gateway": "one",
        "draining": False,
        "obstacle": "",
        "since": 0,
        "time": 60,
        "clients": 1,
        "subscriptions": 1,
    }
    one |= {"received": [1, 0, 0], "sent": [1, 0, 0], "dropped": {"expired": 2}, "slow": 0, "stalled": 0, "queued": 0}
    one |= {"pending_stores": 0, "memory": 1, "lag": {"sum": 0.0, "counts": [1]}, "stored": {"last": 1.2345}}
    one |= {"build": "compiled"}
    one |= {"refused_stores": {"storage_full": 3, "other": 1}, "disconnects": {"lost": 1}}
    old = {key: value for key, value in one.items() if key not in ("refused_stores", "build")} | {"stored": {}}
    stored = {"sessions": None, "retained": 1, "messages": 1}
    found = {"gateways": [one, old, one], "stored": stored, "silent": [], "storage": {"used": 3072, "allowed": 4096}}
    text = shown(found)
    assert re.search(r"^JetStream storage +3\.0 KiB of 4\.0 KiB \(75%\)$", text, re.MULTILINE), text
    assert re.search(r"^refused stores +2 other, 6 storage full$", text, re.MULTILINE), text
    assert re.search(r"^dropped +6 expired$", text, re.MULTILINE)
    assert re.search(r"^build +2 compiled; 1 not known$", text, re.MULTILINE), text
    assert " 1,234.5 ms  " in text
    unknown = shown(found | {"storage": {"used": None, "allowed": None}})
    assert re.search(r"^JetStream storage +not known$", unknown, re.MULTILINE)


def test_listeners(fleet: Fleet) -> None:
    with Raw5.open(fleet.two.port, "c-listening"):
        found = {one["gateway"]: one for one in fleet.json("listeners")["listeners"]}
        two = found[fleet.ids[1]]
        assert (two["listen"], two["type"], two["anonymous"]) == ([f"127.0.0.1:{fleet.two.port}"], "tcp", True)
        assert two["connections"] >= 1
        text = fleet.text("listeners", "--gateway", fleet.ids[0])
        assert re.search(rf"^{fleet.ids[0]} +127\.0\.0\.1:{fleet.one.port} +tcp ", text, re.MULTILINE), text
        assert text.rstrip().endswith("anonymous")


def test_hooks(fleet: Fleet) -> None:
    assert fleet.json("hooks") == {"hooks": [], "silent": []}
    with Watching(fleet.server, topic="hooked"), Raw5.open(fleet.one.port, "c-hooked") as client:
        client.send(publish("hooked", b"1"))
        client.quiet()
        found = fleet.json("hooks")["hooks"]
        assert {one["gateway"] for one in found} == set(fleet.ids)
        calls = {one["gateway"]: one["calls"] for one in found if one["point"] == "message.publish"}
        assert calls == {fleet.ids[0]: 1, fleet.ids[1]: 0}
        assert all(one["owner"].startswith("trace ") and not one["failures"] for one in found)
        text = fleet.text("hooks", "--gateway", fleet.ids[0])
        assert re.search(
            rf"^{fleet.ids[0]} +message\.publish +\S+ +trace \S+ +-1000000000 +1 +0$", text, re.MULTILINE
        ), text


def test_log_levels(fleet: Fleet) -> None:
    """Of one gateway or all, of one logger; the message log begins and ends with its level."""
    one, two = fleet.ids

    def level(logger: str) -> dict[str, str]:
        return {each["gateway"]: each["level"] for each in fleet.json("log")["loggers"] if each["logger"] == logger}

    def publishes(topic: str) -> bool:
        with Raw5.open(fleet.one.port, "c-logged") as client:
            client.send(publish(topic, b"1"))
            client.quiet()
        return f"publishes on {topic!r}" in fleet.one.log

    assert level("mqtt_nats.messages") == {one: "info", two: "info"}
    assert not publishes("logged/1")
    text = fleet.text("log", "level", "mqtt_nats.messages", "debug", "--gateway", one)
    assert re.search(rf"^{one} +mqtt_nats\.messages +debug$", text, re.MULTILINE)
    assert level("mqtt_nats.messages") == {one: "debug", two: "info"}
    assert publishes("logged/2")
    assert "an administrator has set the log level of mqtt_nats.messages to debug" in fleet.one.log
    fleet.text("log", "level", "mqtt_nats", "warning")
    assert level("mqtt_nats.broker") == {one: "warning", two: "warning"}
    fleet.text("log", "level", "mqtt_nats.messages", "default")
    fleet.text("log", "level", "mqtt_nats", "default")
    assert level("mqtt_nats.messages") == {one: "info", two: "info"}
    assert not publishes("logged/3")
    assert fleet.run("log", "level", "mqtt_nats.nothing", "debug").text == "there is no logger 'mqtt_nats.nothing'"
    assert fleet.run("log", "level", "mqtt_nats", "loud").status == 2


def decisions(fleet: Fleet, *arguments: str) -> dict[tuple[str, int], tuple[bool, str]]:
    """By access and QoS, at the first gateway."""
    found = fleet.json("acl", "check", *arguments, "--gateway", fleet.ids[0])["decisions"]
    return {(one["access"], one["qos"]): (one["allowed"], one["why"]) for one in found}


def test_acl(fleet: Fleet) -> None:
    found = decisions(fleet, "alice", "alice/x")
    rule = "the ACL file, rule 2: allow publish alice/# at QoS 0, 1"
    assert found[("publish", 0)] == found[("publish", 1)] == (True, rule)
    assert found[("publish", 2)] == (False, "the ACL file: no rule applies")
    assert found[("subscribe", 0)] == (False, "the ACL file: no rule applies")
    secret = (False, "the ACL file, rule 1: deny publish and subscribe secret/#")
    assert set(decisions(fleet, "-", "secret/x").values()) == {secret}
    # A filter that has anything in common with what is denied.
    assert decisions(fleet, "-", "+/x", "--client", "c-1")["subscribe", 0] == secret
    assert decisions(fleet, "-", "a", "--client", "c-1", "--qos", "1") == {
        ("publish", 1): (True, "the ACL file, rule 3: allow publish and subscribe #"),
        ("subscribe", 1): (True, "the ACL file, rule 3: allow publish and subscribe #"),
    }
    assert decisions(fleet, "bob", "hall/a", "--access", "subscribe", "--qos", "0")["subscribe", 0][0]
    assert decisions(fleet, "eve", "hall/a", "--group", "guests", "--qos", "2")["subscribe", 2][0]
    assert not decisions(fleet, "eve", "hall/a", "--qos", "2")["subscribe", 2][0]
    text = fleet.text("acl", "check", "alice", "alice/x")
    for identity in fleet.ids:
        assert re.search(rf"^{identity} +publish +0, 1 +allowed +the ACL file, rule 2: ", text, re.MULTILINE), text
        assert re.search(rf"^{identity} +publish +2 +denied +the ACL file: no rule applies$", text, re.MULTILINE), text


def test_acl_of_a_client_that_is_connected(fleet: Fleet) -> None:
    with Raw5.open(fleet.one.port, "c-judged") as client:
        found = fleet.json("acl", "check", "-", "x", "--client", "c-judged", "--qos", "0")["decisions"]
        connected = {(one["gateway"], one["connected"]) for one in found}
        assert connected == {(fleet.ids[0], True), (fleet.ids[1], False)}
        # What is said is what happens.
        assert client.subscribed(("x", 0), ("secret/x", 0)) == (0, 0x87)


def test_streams(fleet: Fleet) -> None:
    found = fleet.json("streams")
    streams = {one["name"]: one for one in found["streams"]}
    assert (streams["$MQTT_msgs"]["replicas"], streams["$MQTT_msgs"]["max_age"]) == (1, 86_400.0)
    assert streams["$MQTT_timers"]["consumers"] == 1
    assert found["warnings"] == []
    assert re.search(r"^\$MQTT_msgs +1 +\S+ +0 +\d+ .* 24 h$", fleet.text("streams"), re.MULTILINE)
    found = fleet.json("streams", "list", "--monitor", f"http://127.0.0.1:{fleet.monitor}")
    (server,) = found["monitoring"]
    assert (server["name"], server["sync_interval"], server["sync_always"]) == ("test", 1.0, False)
    assert found["warnings"] == []
    text = fleet.text("streams", "--monitor", f"127.0.0.1:{fleet.monitor}")
    assert "nats-server test writes to the disk every 1 s" in text


def test_streams_set(fleet: Fleet) -> None:
    text = fleet.text("streams", "set", "$MQTT_msgs", "--retention", "2d")
    assert text.startswith("$MQTT_msgs: 1 replica, keeps messages for 2 d\n")
    assert "set message_retention" in text
    assert "lower how long messages are kept while none is stored" in text
    (same,) = fleet.json("streams", "set", "$MQTT_msgs", "--retention", "2d", "--replicas", "1")["streams"]
    assert (same["changed"], same["max_age"]) == (False, 172_800.0)
    (back,) = fleet.json("streams", "set", "$MQTT_msgs", "--retention", "1d")["streams"]
    assert (back["changed"], back["max_age"]) == (True, 86_400.0)
    assert "(as before)" in fleet.text("streams", "set", "all", "--replicas", "1")
    refused = fleet.run("streams", "set", "$MQTT_sess", "--replicas", "3")
    assert refused.status == 1
    assert refused.text.startswith("$MQTT_sess is not changed: ")
    assert fleet.run("streams", "set", "all", "--replicas", "3").text.count(" is not changed: ") == len(EVERY)


def test_streams_of_which_one_is_refused(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are changed all the same, and which is said."""

    async def call(inbox: RequestInbox, what: str, *more: Any) -> Any:
        if what == "STREAM.INFO.$MQTT_rmsgs":
            raise ApiError(503, 10008, "system temporarily unavailable")
        return await api.call(inbox, what, *more)

    monkeypatch.setattr("mqtt_nats.ctl.commands.streams.call", call)
    found, complaint = fleet.part("streams", "set", "all", "--replicas", "1")
    assert [one["name"] for one in found["streams"]] == [name for name in EVERY if name != "$MQTT_rmsgs"]
    assert [one["name"] for one in found["refused"]] == ["$MQTT_rmsgs"]
    assert complaint.startswith("$MQTT_rmsgs is not changed: ")
    assert "temporarily unavailable" in complaint


def test_positions_are_a_stream_like_the_others(fleet: Fleet) -> None:
    """Not every gateway needs it; where it is, it is seen and changed."""
    names = [one["name"] for one in fleet.json("streams")["streams"]]
    assert names == list(EVERY)
    assert "$MQTT_pos" in names
    assert [one["name"] for one in fleet.json("cluster", "status")["streams"]] == names
    assert fleet.text("streams", "set", "$MQTT_pos", "--replicas", "1") == "$MQTT_pos: 1 replica (as before)\n"
    assert [one["name"] for one in fleet.json("streams", "set", "all", "--replicas", "1")["streams"]] == names


def test_what_streams_are_warned_of() -> None:
    """By what a cluster would say."""

    def stream(name: str, replicas: int, **more: object) -> dict[str, object]:
        plain: dict[str, object] = {"obstacle": "", "followers": [], "storage": "file"}
        return {"name": name, "replicas": replicas, **plain, **more}

    behind = [{"name": "n2", "current": False, "offline": False, "lag": 7}]
    offline = [{"name": "n3", "current": False, "offline": True, "lag": 0}]
    assert _warnings([stream("a", 3), stream("b", 3)], 3) == []
    assert _warnings([stream("a", 1)], 1) == []
    assert "`mqtt-nats ctl streams set 'a' --replicas 3`" in _warnings([stream("a", 1)], 3)[0]
    assert _warnings([stream("a", 3, followers=[*behind, *offline])], 3) == [
        "a: the replica on n2 is 7 operations behind",
        "a: the replica on n3 is offline",
    ]
    assert "in memory" in _warnings([stream("a", 1, storage="memory")], 1)[0]
    assert "different numbers" in _warnings([stream("a", 1), stream("b", 2)], 1)[0]
    assert _warnings([stream("a", 0, obstacle="no leader")], 3) == ["a: no leader: nothing is stored there at present"]


def test_reload(fleet: Fleet) -> None:
    assert {one["id"] for one in fleet.json("reload")} == set(fleet.ids)


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("acl", "check", "alice"), 2, "Missing argument"),
        (("acl", "check", "alice", "a/#/b"), 1, "'a/#/b': "),
        (("acl", "check", "alice", ""), 1, "empty"),
        (("acl", "check", "alice", "a/+", "--access", "publish"), 1, "wildcard"),
        (("acl", "check", "alice", "a", "--qos", "9"), 2, "qos: "),
        (("acl", "check", "alice", "a", "--address", "nowhere"), 1, "nowhere"),
        (("streams", "set", "$MQTT_msgs"), 1, "no change is requested"),
        (("streams", "set", "orders", "--replicas", "1"), 1, "there is no stream orders of gateways"),
        (("streams", "set", "$MQTT_sess", "--retention", "1d"), 1, "--retention is about $MQTT_msgs"),
        (("streams", "set", "all", "--replicas", "9"), 2, "replicas: "),
        (("streams", "set", "$MQTT_msgs", "--retention", "always"), 1, "the shortest retention is one second"),
        (("status", "--gateway", "nobody"), 1, "gateway nobody does not run"),
        (("drain", "nobody"), 1, "gateway nobody does not run"),
        (("drain",), 2, "Missing argument"),
    ],
)
def test_bad_input(fleet: Fleet, arguments: tuple[str, ...], status: int, text: str) -> None:
    done = fleet.run(*arguments)
    assert done.status == status, done.text
    assert text in done.text


def test_no_nats_server_is_monitored(fleet: Fleet) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = fleet.run("streams", "--monitor", url)
    assert done.status == 1
    assert done.text.startswith(f"no nats-server answers at {url}: ")
