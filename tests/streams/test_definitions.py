# SPDX-License-Identifier: Apache-2.0
"""Bringing a JetStream account in line with the definitions, against real servers."""

import asyncio
import json
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

import orjson
import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from mqtt_streams import headers, stored
from mqtt_streams.api import ApiError, call, publish
from mqtt_streams.consumers import ConsumerRef, create_consumer
from mqtt_streams.definitions import (
    EVERY,
    RECORDS,
    STREAMS,
    StreamConflict,
    StreamSetupError,
    ensure_streams,
    load_definition,
    shown,
    with_ids,
)
from mqtt_streams.error_codes import MAXIMUM_MESSAGES_TEXT
from mqtt_streams.gateways import GatewayStore, LeaseTaken
from mqtt_streams.hashing import name_hash
from mqtt_streams.headers import PUB_BLOCKS
from mqtt_streams.retained import RetainedStore, set_block
from mqtt_streams.sessions import SessionStore
from tests.harness.paho import stop
from tests.harness.waiting import aeventually
from tests.streams.support import NatsPyJetStream, StreamsServer

Start: TypeAlias = Callable[[str], StreamsServer]
Link: TypeAlias = Callable[..., Awaitable[NatsPyJetStream]]
DAY_NS = 86400 * 10**9


ROLLED_UP = ["allow_rollup_hdrs", "max_msgs_per_subject"]
ADDED = ["$MQTT_wills", "$MQTT_shared", "KV_MQTT_gateways", "KV_MQTT_bans", "KV_MQTT_fleet"]


async def config_of(js: NatsPyJetStream, stream: str) -> dict[str, Any]:
    config: dict[str, Any] = (await call(js, f"STREAM.INFO.{stream}"))["config"]
    return config


async def create(js: NatsPyJetStream, stream: str, **changes: object) -> None:
    definition = load_definition(stream) | changes
    wanted = {key: value for key, value in definition.items() if value is not None}

    async def made() -> bool:
        """The files of the one that was removed before the test may be there still."""
        try:
            await call(js, f"STREAM.CREATE.{stream}", wanted)
        except ApiError as error:
            if error.err_code != 10049:
                raise
            return False
        return True

    await aeventually(made)


def test_definitions_are_what_the_nats_cli_reads() -> None:
    for stream in EVERY:
        definition = load_definition(stream)
        assert definition["name"] == stream
        assert definition["storage"] == "file"
        assert definition["duplicate_window"] == 120 * 10**9
    assert load_definition("$MQTT_msgs")["max_age"] == DAY_NS
    assert load_definition("$MQTT_msgs") is not load_definition("$MQTT_msgs")


async def test_missing_streams_are_created_as_defined(js: NatsPyJetStream) -> None:
    report = await ensure_streams(js)
    assert report.created == list(STREAMS)
    assert (report.upgraded, report.kept, report.domain) == ({}, [], "")
    for stream in STREAMS:
        config = await config_of(js, stream)
        definition = load_definition(stream)
        assert {key: config.get(key) for key in definition} == definition
        assert report.configs[stream] == config


async def test_present_streams_are_left_alone(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    report = await ensure_streams(js)
    assert (report.created, report.upgraded, report.kept) == ([], {}, [])
    assert set(report.configs) == set(STREAMS)


async def test_many_gateways_start_at_once(js: NatsPyJetStream, streams_server: StreamsServer, link: Link) -> None:
    others = [await link(streams_server) for _ in range(6)]
    reports = await asyncio.gather(*(ensure_streams(other) for other in others))
    assert {stream for report in reports for stream in report.created} == set(STREAMS)


class Late(NatsPyJetStream):
    """A transport whose first look finds no stream, as when another gateway creates them a moment later."""

    def __init__(self, js: NatsPyJetStream) -> None:
        super().__init__(js.client)
        self.blind = set(STREAMS)

    async def request(self, subject: str, payload: bytes = b"", headers: bytes = b"", **options: Any) -> Any:
        stream = subject.rpartition(".")[2]
        reply = await super().request(subject, payload, headers, **options)
        if ".STREAM.INFO." in subject and stream in self.blind:
            self.blind.remove(stream)
            error = {"code": 404, "err_code": 10059, "description": "stream not found"}
            return reply._replace(payload=orjson.dumps({"error": error}))
        return reply


async def test_a_stream_that_appears_meanwhile_is_checked(js: NatsPyJetStream) -> None:
    await create(js, "$MQTT_sess", description="made by somebody else")
    await create(js, "$MQTT_msgs", allow_direct=False)
    report = await ensure_streams(Late(js))
    assert report.created == ["$MQTT_rmsgs", "$MQTT_qos2in", "$MQTT_out", "$MQTT_timers", *ADDED]
    assert report.upgraded == {"$MQTT_msgs": ["allow_direct"]}


async def test_settings_for_messages(js: NatsPyJetStream) -> None:
    await ensure_streams(js, message_retention=60)
    config = await config_of(js, "$MQTT_msgs")
    assert (config["retention"], config["max_age"], config["duplicate_window"]) == ("limits", 60 * 10**9, 60 * 10**9)


async def test_switches_are_turned_on(js: NatsPyJetStream) -> None:
    for stream in STREAMS:
        limit = 1 if stream in RECORDS else load_definition(stream)["max_msgs_per_subject"]
        changes = dict.fromkeys(("allow_direct", "allow_msg_ttl", "allow_msg_schedules", "allow_rollup_hdrs"))
        await create(js, stream, **changes, max_msgs_per_subject=limit, max_consumers=-1)
    report = await ensure_streams(js)
    assert report.created == []
    assert report.upgraded == {
        "$MQTT_sess": ["allow_direct", *ROLLED_UP],
        "$MQTT_msgs": ["allow_direct", "allow_msg_ttl", "max_consumers"],
        "$MQTT_rmsgs": ["allow_direct", "allow_msg_ttl", *ROLLED_UP],
        "$MQTT_out": ["allow_direct", "max_consumers"],
        "$MQTT_timers": ["allow_direct", "allow_msg_ttl", "allow_msg_schedules"],
        "$MQTT_wills": ["allow_direct", *ROLLED_UP],
        "$MQTT_shared": ["allow_direct", *ROLLED_UP],
        "KV_MQTT_gateways": ["allow_direct", "allow_msg_ttl", *ROLLED_UP],
        "KV_MQTT_bans": ["allow_direct", "allow_msg_ttl", *ROLLED_UP],
        "KV_MQTT_fleet": ["allow_direct", *ROLLED_UP],
    }
    assert report.kept == []
    assert (await ensure_streams(js)).upgraded == {}


async def test_more_than_a_thousand_consumers(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    for start in range(0, 1100, 50):
        await asyncio.gather(
            *(
                create_consumer(
                    js,
                    "$MQTT_msgs",
                    ConsumerRef(f"d{n}", f"$MQTT.sub.d{n}", "$MQTT.msgs.a", 1, extra={"mem_storage": True}),
                )
                for n in range(start, start + 50)
            )
        )
    assert (await call(js, "STREAM.INFO.$MQTT_msgs"))["state"]["consumer_count"] == 1100


async def test_an_age_limit_grows_but_never_shrinks_under_messages(js: NatsPyJetStream) -> None:
    await ensure_streams(js, message_retention=3600)
    report = await ensure_streams(js, message_retention=7200)
    assert report.upgraded == {"$MQTT_msgs": ["max_age"]}
    await publish(js, "$MQTT.msgs.a", b"x", PUB_BLOCKS[1])
    report = await ensure_streams(js, message_retention=60)
    assert report.upgraded == {}
    assert report.kept == ["stream $MQTT_msgs: max_age is 2h, message_retention says 1m"]
    assert (await config_of(js, "$MQTT_msgs"))["max_age"] == 7200 * 10**9
    await call(js, "STREAM.PURGE.$MQTT_msgs")
    report = await ensure_streams(js, message_retention=60)
    assert report.upgraded == {"$MQTT_msgs": ["max_age", "duplicate_window"]}


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        ("max_age", 259_200 * 10**9, "3d"),
        ("max_age", 5400 * 10**9, "90m"),
        ("max_age", 3601 * 10**9, "3601s"),
        ("duplicate_window", 250 * 10**6, "250ms"),
        ("duplicate_window", 7, "7ns"),
        ("max_age", 0, "unlimited"),
        ("max_bytes", 86_400, "86400"),
        ("discard", "old", "old"),
    ],
)
def test_settings_for_people(setting: str, value: object, text: str) -> None:
    assert shown(setting, value) == text


async def test_limits_of_the_operator_stay(js: NatsPyJetStream) -> None:
    await create(js, "$MQTT_msgs", max_bytes=10_000_000, discard="new")
    await create(js, "$MQTT_rmsgs", storage="memory")
    report = await ensure_streams(js)
    assert report.upgraded == {}
    assert [line.partition(" is")[0] for line in report.kept] == [
        "stream $MQTT_msgs: max_bytes",
        "stream $MQTT_rmsgs: storage",
    ]
    assert (await config_of(js, "$MQTT_msgs"))["max_bytes"] == 10_000_000


@pytest.mark.parametrize("age", [0, 60])
async def test_interest_becomes_limits(js: NatsPyJetStream, age: int) -> None:
    """What waits for sessions stays, also where somebody has set a limit of age."""
    await create(js, "$MQTT_msgs", retention="interest", max_age=age * 10**9, duplicate_window=30 * 10**9)
    await create_consumer(js, "$MQTT_msgs", ConsumerRef("waits", "deliver", "$MQTT.msgs.t", 10))
    await publish(js, "$MQTT.msgs.t", b"waits")
    report = await ensure_streams(js)
    assert report.upgraded["$MQTT_msgs"][:2] == ["retention", "max_age"]
    config = await config_of(js, "$MQTT_msgs")
    assert (config["retention"], config["max_age"]) == ("limits", DAY_NS)
    found = await stored.get_last(js, "$MQTT_msgs", "$MQTT.msgs.t")
    assert found is not None
    assert found.payload == b"waits"
    assert (await ensure_streams(js)).upgraded == {}


async def test_messages_of_an_interest_stream_stay_as_long_again(
    js: NatsPyJetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may wait for a session that has been away for longer than `message_retention`."""
    await create(js, "$MQTT_msgs", retention="interest", max_age=0)
    await create_consumer(js, "$MQTT_msgs", ConsumerRef("waits", "deliver", "$MQTT.msgs.t", 10))
    await publish(js, "$MQTT.msgs.t", b"waits")
    later = time.time_ns() + 10 * DAY_NS
    monkeypatch.setattr("time.time_ns", lambda: later)
    await ensure_streams(js)
    assert 20 * DAY_NS <= (await config_of(js, "$MQTT_msgs"))["max_age"] < 21 * DAY_NS


@pytest.mark.parametrize(
    ("stream", "changes", "setting"),
    [
        ("$MQTT_sess", {"subjects": ["$MQTT.sess.x"]}, "subjects"),
        ("$MQTT_sess", {"subjects": ["$MQTT.sess.hub.>"]}, "subjects"),
        ("$MQTT_rmsgs", {"subjects": ["$MQTT.rmsgs.>", "extra"]}, "subjects"),
        ("$MQTT_sess", {"max_msgs_per_subject": 5}, "max_msgs_per_subject"),
        ("$MQTT_rmsgs", {"max_msgs_per_subject": -1}, "max_msgs_per_subject"),
        ("$MQTT_msgs", {"max_msgs_per_subject": 1}, "max_msgs_per_subject"),
        ("$MQTT_qos2in", {"discard": "old", "discard_new_per_subject": False}, "discard"),
        ("$MQTT_qos2in", {"discard_new_per_subject": False}, "discard_new_per_subject"),
        ("$MQTT_sess", {"discard": "new"}, "discard"),
        ("$MQTT_msgs", {"retention": "workqueue"}, "retention"),
        ("$MQTT_out", {"retention": "limits"}, "retention"),
        ("$MQTT_rmsgs", {"retention": "interest"}, "retention"),
        ("$MQTT_sess", {"deny_delete": True}, "deny_delete"),
        ("$MQTT_out", {"deny_purge": True}, "deny_purge"),
        ("$MQTT_msgs", {"no_ack": True}, "no_ack"),
        ("$MQTT_msgs", {"subject_transform": {"src": ">", "dest": "x.>"}}, "subject_transform"),
        ("$MQTT_rmsgs", {"subjects": None, "mirror": {"name": "elsewhere"}}, "its content"),
        ("$MQTT_msgs", {"subjects": None, "mirror": {"name": "elsewhere"}}, "its content"),
        ("$MQTT_rmsgs", {"sources": [{"name": "elsewhere"}]}, "its content"),
    ],
)
async def test_conflicts(js: NatsPyJetStream, stream: str, changes: dict[str, Any], setting: str) -> None:
    await create(js, stream, **changes)
    with pytest.raises(StreamConflict) as caught:
        await ensure_streams(js)
    assert (caught.value.stream, caught.value.setting) == (stream, setting)
    text = str(caught.value)
    assert f"stream {stream}: {setting} is " in text
    assert "must be" in text
    assert "\n" not in text


async def test_a_subject_that_another_stream_takes(js: NatsPyJetStream) -> None:
    await call(js, "STREAM.CREATE.greedy", {"name": "greedy", "subjects": ["$MQTT.out.x"]})
    with pytest.raises(StreamSetupError, match=r"\$MQTT_out cannot be created: greedy takes \$MQTT\.out\.>"):
        await ensure_streams(js)


async def test_replicas_need_a_cluster(js: NatsPyJetStream) -> None:
    with pytest.raises(StreamSetupError, match=r"\$MQTT_sess cannot be created.*stream_replicas"):
        await ensure_streams(js, replicas=3)
    await ensure_streams(js)
    with pytest.raises(StreamConflict, match=r"num_replicas is 1 but must be 3"):
        await ensure_streams(js, replicas=3)


async def test_no_jetstream(own_server: Start, link: Link) -> None:
    server = own_server("jetstream: disabled\n")
    js = await link(server)
    with pytest.raises(StreamSetupError, match="no JetStream here; start nats-server with -js"):
        await ensure_streams(js)


async def test_no_jetstream_for_the_account(own_server: Start, link: Link) -> None:
    server = own_server("accounts { A: { users: [{user: a, password: a}] } }\n")
    js = await link(server, user="a", password="a")
    with pytest.raises(StreamSetupError, match="JetStream") as caught:
        await ensure_streams(js)
    assert "\n" not in str(caught.value)


async def test_too_few_streams_allowed(own_server: Start, link: Link) -> None:
    limits = "{ max_streams: 2, max_mem: 10MB, max_file: 100MB }"
    server = own_server(
        "accounts { A: { jetstream: LIMITS, users: [{user: a, password: a}] } }".replace("LIMITS", limits)
    )
    js = await link(server, user="a", password="a")
    with pytest.raises(StreamSetupError, match=r"\$MQTT_rmsgs cannot be created: maximum number of streams"):
        await ensure_streams(js)


async def test_no_permission(own_server: Start, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    server = own_server(
        "accounts { A: { jetstream: enabled, users: [{ user: a, password: a, permissions: {"
        ' publish: ["$JS.API.INFO", "$JS.API.STREAM.INFO.>"], subscribe: ["_INBOX.>"] } }] } }'
    )

    async def ignore(error: Exception) -> None:
        assert "permissions violation" in str(error).lower()

    js = await link(server, user="a", password="a", error_cb=ignore)
    real = NatsPyJetStream.request

    async def impatient(self: NatsPyJetStream, *args: Any, **options: Any) -> Any:
        return await real(self, *args, **(options | {"timeout": 0.5}))

    monkeypatch.setattr(NatsPyJetStream, "request", impatient)
    with pytest.raises(StreamSetupError, match=r"no answer to \$JS\.API\.STREAM\.CREATE\.\$MQTT_sess; check that"):
        await ensure_streams(js)


async def test_a_domain(own_server: Start, link: Link, tmp_path: Path) -> None:
    directory = json.dumps(str(tmp_path / "js"))
    server = own_server("server_name: hub\njetstream { store_dir: DIR, domain: hub }\n".replace("DIR", directory))
    js = await link(server)
    await create(js, "$MQTT_sess", subjects=["$MQTT.sess.hub.>"])
    report = await ensure_streams(js)
    assert report.domain == "hub"
    js.api_prefix = "$JS.hub.API"
    again = await ensure_streams(js)
    assert again.created == []


async def test_streams_of_nats_servers_own_listener(own_server: Start, link: Link) -> None:
    server = own_server("server_name: native\nmqtt { listen: 127.0.0.1:-1 }\n")
    client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id="native-1", clean_session=False)
    client.connect("127.0.0.1", server.mqtt_port())
    client.loop_start()
    client.subscribe("a/#", 2)
    client.publish("a/b", b"kept", 1, retain=True).wait_for_publish(10)

    js = await link(server)
    report = await ensure_streams(js)
    assert report.created == ["$MQTT_timers", *ADDED]
    assert report.upgraded == {
        "$MQTT_sess": ["allow_direct", "allow_rollup_hdrs"],
        "$MQTT_msgs": ["allow_direct", "allow_msg_ttl", "max_consumers", "retention", "max_age"],
        "$MQTT_rmsgs": ["allow_direct", "allow_msg_ttl", "allow_rollup_hdrs"],
        "$MQTT_out": ["allow_direct", "max_consumers"],
    }
    assert report.single.keys() == {"$MQTT_sess", "$MQTT_rmsgs"}
    assert (await config_of(js, "$MQTT_msgs"))["retention"] == "limits"

    await native_records(js)
    info = client.publish("a/b", b"still works", 2)
    info.wait_for_publish(10)
    assert info.is_published()
    client.disconnect()
    stop(client)


async def native_records(js: NatsPyJetStream) -> None:
    """What nats-server itself wrote is read by our stores."""
    loaded = await SessionStore(js).load(name_hash("native-1"), "native-1")
    assert loaded is not None
    record, _ = loaded
    assert record.subs == {"a.>": 2}
    assert set(record.cons) == {"a.>", "a fwc"}
    assert record.pubrel is not None
    assert record.origin == name_hash("native")
    raw = await call(js, "STREAM.MSG.GET.$MQTT_sess", {"last_by_subj": "$MQTT.sess." + name_hash("native-1")})
    assert orjson.loads(record.encode()) == orjson.loads(b64decode(raw["message"]["data"]))
    message = await RetainedStore(js).get("a.b")
    assert message is not None
    assert (message.payload, message.qos) == (b"kept", 1)
    raw = await call(js, "STREAM.MSG.GET.$MQTT_rmsgs", {"seq": message.seq})
    own = b64decode(raw["message"]["hdrs"])
    assert own.replace(headers.START, headers.START + headers.REPLACES) == set_block("a/b", 3, record.origin)


async def test_the_duplicate_window_is_short_where_every_message_has_an_id(js: NatsPyJetStream) -> None:
    """And only there; one that somebody has chosen stays."""

    async def window() -> int:
        found: int = (await config_of(js, "$MQTT_msgs"))["duplicate_window"]
        return found // 10**9

    await ensure_streams(js, message_ids="replicated")
    assert await window() == 120
    report = await ensure_streams(js, message_ids="always")
    assert report.upgraded == {"$MQTT_msgs": ["duplicate_window"]}
    assert await window() == 30
    report = await ensure_streams(js, message_ids="never")
    assert (report.upgraded, await window()) == ({}, 30)
    await call(js, "STREAM.UPDATE.$MQTT_msgs", await config_of(js, "$MQTT_msgs") | {"duplicate_window": 60 * 10**9})
    report = await ensure_streams(js, message_ids="always")
    assert (report.upgraded, await window()) == ({}, 60)


async def test_a_new_stream_has_the_short_window(js: NatsPyJetStream) -> None:
    await ensure_streams(js, message_ids="always")
    assert (await config_of(js, "$MQTT_msgs"))["duplicate_window"] == 30 * 10**9


@pytest.mark.parametrize(
    ("setting", "replicas", "expected"),
    [("replicated", 1, False), ("replicated", 3, True), ("always", 1, True), ("never", 3, False)],
)
def test_which_streams_get_ids(setting: str, replicas: int, expected: bool) -> None:
    assert with_ids(setting, replicas) is expected


# -- replicas by the size of the cluster ----------------------------------------------------------


async def test_a_limit_of_retained_messages(js: NatsPyJetStream) -> None:
    """A topic that has one gets another; one more topic is refused, and none is lost."""

    async def retain(topic: str) -> None:
        await publish(js, f"$MQTT.rmsgs.{topic}", b"x")

    await ensure_streams(js)
    for topic in ("a", "b", "c"):
        await retain(topic)
    report = await ensure_streams(js, max_retained=2)
    assert set(report.upgraded["$MQTT_rmsgs"]) == {"max_msgs", "discard", "max_msgs_per_subject"}
    assert report.single.keys() == {"$MQTT_rmsgs"}
    assert (await call(js, "STREAM.INFO.$MQTT_rmsgs"))["state"]["messages"] == 3
    await retain("a")
    with pytest.raises(ApiError, match=MAXIMUM_MESSAGES_TEXT):
        await retain("d")
    report = await ensure_streams(js, max_retained=4)
    assert report.upgraded == {"$MQTT_rmsgs": ["max_msgs"]}
    await retain("d")
    with pytest.raises(ApiError, match=MAXIMUM_MESSAGES_TEXT):
        await retain("e")
    # A gateway without the setting takes it back.
    report = await ensure_streams(js)
    assert report.upgraded == {"$MQTT_rmsgs": ["max_msgs", "discard"]}
    assert not report.kept
    assert (await ensure_streams(js)).upgraded == {"$MQTT_rmsgs": ["max_msgs_per_subject"]}  # it refuses nothing now
    await retain("e")
    assert (await call(js, "STREAM.INFO.$MQTT_rmsgs"))["state"]["messages"] == 5
    assert not (await ensure_streams(js)).upgraded


@pytest.mark.parametrize(
    ("found", "changed"),
    [
        ({"max_msgs": 2}, None),  # not what gateways set: it removes
        (
            {"max_msgs": 2, "discard": "new", "max_bytes": 1_000_000},
            ["max_msgs_per_subject", "max_msgs"],
        ),  # it refuses still
    ],
)
async def test_of_retained_messages_only_limits_of_gateways_are_taken_back(
    js: NatsPyJetStream, found: dict[str, Any], changed: list[str] | None
) -> None:
    await create(js, "$MQTT_rmsgs", **found)
    report = await ensure_streams(js)
    assert report.upgraded.get("$MQTT_rmsgs") == changed
    (kept,) = [line for line in report.kept if "$MQTT_rmsgs" in line]
    assert kept.startswith(f"stream $MQTT_rmsgs: {'max_bytes' if changed else 'max_msgs'} is ")
    assert (await config_of(js, "$MQTT_rmsgs"))["discard"] == found.get("discard", "old")


async def test_a_lease_lapses_at_its_time(js: NatsPyJetStream) -> None:
    """Also one that was renewed."""
    await ensure_streams(js)
    store = GatewayStore(js)
    first = await store.hold("aaaaaaaa", "aaaaaaaa", 0, 60)
    await store.hold("aaaaaaaa", "aaaaaaaa", first, 1)

    async def lapsed() -> bool:
        return await store.lease("aaaaaaaa") == (0, "")

    await aeventually(lapsed)
    assert await store.hold("aaaaaaaa", "bbbbbbbb", 0, 60)
    with pytest.raises(LeaseTaken):
        await store.hold("aaaaaaaa", "cccccccc", 0, 60)
