# SPDX-License-Identifier: Apache-2.0
"""Session records: nats-server's JSON byte for byte, poisoned records, compare-and-set."""

import asyncio

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client

from mqtt_streams import sessions
from mqtt_streams.api import publish
from mqtt_streams.consumers import ConsumerRef
from mqtt_streams.definitions import ensure_streams
from mqtt_streams.fields import MAX_SEQUENCE
from mqtt_streams.hashing import name_hash, second_key
from mqtt_streams.messages import subscription_consumer
from mqtt_streams.pubrel import pubrel_consumer
from mqtt_streams.sessions import (
    FIRST,
    V5,
    V5_VERSION,
    Conflict,
    Draining,
    EndedShare,
    ForeignRecord,
    NewerRecord,
    PoisonedRecord,
    SessionRecord,
    SessionStore,
    SharedSubscription,
    SubscriptionOptions,
    decode,
    encode_v5,
)
from tests.harness.fence import fence
from tests.streams.support import NatsPyJetStream

ONE, TWO, THREE = "BprQ0123456789abcdefgh", "BprQ0123456789abcdefgi", "BprQ0123456789abcdefgj"

# As nats-server 2.15.1 writes it, except that Go spells ">" as \u003e.
CAPTURED = (
    rb'{"origin":"7BA7vU7Z","id":"sub-1",'
    rb'"subs":{"a.\u003e":2,"dev.*.temp":1,"q0.x":0},'
    rb'"cons":{"a fwc":{'
    rb'"durable_name":"A4a1Bsn5_BprQ0123456789abcdefgh","deliver_policy":"new","ack_policy":"explicit",'
    rb'"ack_wait":30000000000,"filter_subject":"$MQTT.msgs.a","replay_policy":"instant","max_ack_pending":1024,'
    rb'"deliver_subject":"$MQTT.sub.BprQ0123456789abcdefgi","num_replicas":0},'
    rb'"a.\u003e":{"durable_name":"A4a1Bsn5_BprQ0123456789abcdefgj","deliver_policy":"new","ack_policy":"explicit",'
    rb'"ack_wait":30000000000,"filter_subject":"$MQTT.msgs.a.\u003e","replay_policy":"instant","max_ack_pending":1024,'
    rb'"deliver_subject":"$MQTT.sub.BprQ0123456789abcdefgh","num_replicas":0}},'
    rb'"pubrel":{"durable_name":"$MQTT_PUBREL_A4a1Bsn5","deliver_policy":"new","ack_policy":"explicit",'
    rb'"ack_wait":30000000000,"filter_subject":"$MQTT.out.pubrel.A4a1Bsn5","replay_policy":"instant",'
    rb'"max_ack_pending":1024,"deliver_subject":"$MQTT.deliver.pubrel.A4a1Bsn5","num_replicas":0}}'
)


def captured_record() -> SessionRecord:
    return SessionRecord(
        "sub-1",
        "7BA7vU7Z",
        subs={"a.>": 2, "dev.*.temp": 1, "q0.x": 0},
        cons={
            "a fwc": subscription_consumer("A4a1Bsn5", "a", name_nuid=ONE, deliver_nuid=TWO, max_ack_pending=1024),
            "a.>": subscription_consumer("A4a1Bsn5", "a.>", name_nuid=THREE, deliver_nuid=ONE, max_ack_pending=1024),
        },
        pubrel=pubrel_consumer("A4a1Bsn5", max_ack_pending=1024),
    )


def full_v5() -> V5:
    return V5(
        "regular",
        3600,
        "gw000001",
        "n1",
        True,
        1.5,
        {"a.>": SubscriptionOptions("a/#", True, True, 2, 7), "b": SubscriptionOptions("b")},
        {"a.>": 10, "a fwc": 11},
        [Draining("A4a1Bsn5_x", "$MQTT.msgs.old", 2, 99), Draining("A4a1Bsn5_y", "$MQTT.msgs.newer", 1, 99, 50, True)],
        {"a.>": 5},
        {"a.>": (1, 88)},
        former=17,
        leaving=["$share/group/a"],
        ended={"$share/group/a": EndedShare(True, 7, ((49152, 99), (49153, 100)))},
    )


def test_same_bytes_as_nats_server() -> None:
    assert captured_record().encode() == CAPTURED.replace(rb"\u003e", b">")
    assert decode(CAPTURED, client_id="sub-1") == captured_record()


def test_clean_session() -> None:
    data = b'{"origin":"7BA7vU7Z","id":"pub-1","clean":true}'
    assert SessionRecord("pub-1", "7BA7vU7Z", clean=True).encode() == data
    assert decode(data) == SessionRecord("pub-1", "7BA7vU7Z", clean=True)


@pytest.mark.parametrize("version", range(1, V5_VERSION + 1))
def test_records_of_every_version_are_read(version: int) -> None:
    """They have the same keys; what is written has the last one."""
    record = captured_record()
    record.v5 = full_v5()
    stored = orjson.loads(record.encode())
    assert stored["v5"]["version"] == V5_VERSION
    stored["v5"]["version"] = version
    assert decode(orjson.dumps(stored), client_id="sub-1") == record


@pytest.mark.parametrize("v5", [V5(), V5(expiry=0), full_v5()])
def test_v5_comes_back(v5: V5) -> None:
    record = captured_record()
    record.v5 = v5
    assert decode(record.encode(), client_id="sub-1") == record


def test_ended_shared_subscriptions() -> None:
    """They are named until nothing is left of them, unless they have begun again."""
    wanted = SharedSubscription(1, False, None, 1)
    v5 = V5(shared={"$share/g/a": wanted, "$share/g/b": wanted})
    v5.unshare(["$share/g/a", "$share/g/unknown"])
    assert (list(v5.shared), v5.leaving) == (["$share/g/b"], ["$share/g/a"])
    assert v5.groups == ["$share/g/b", "$share/g/a"]
    v5.share("$share/g/a", wanted)
    assert (v5.leaving, v5.groups) == ([], ["$share/g/b", "$share/g/a"])
    v5.unshare(["$share/g/b"])
    v5.forget_leaving()
    assert v5.groups == ["$share/g/a"]


def test_unacknowledged_messages_of_ended_shared_subscriptions() -> None:
    """Without any, nothing is stored; those of a stream that was replaced are gone."""
    v5 = V5()
    v5.end_share("$share/g/a", EndedShare(False, None, ((50000, 5), (50001, 9))))
    v5.count_anew(8)
    assert v5.ended == {"$share/g/a": EndedShare(False, None, ((50000, 5),))}
    v5.count_anew(4)
    assert v5.ended == {}
    assert "ended" not in encode_v5(v5)


@pytest.mark.parametrize("sent", ["7", "[7]", "[[1]]", '[["1",2]]', "[[0,2]]", "[[65536,2]]", "[[1,0]]", "[[true,1]]"])
def test_unacknowledged_messages_that_cannot_be_read(sent: str) -> None:
    data = b'{"id":"a","v5":{"version":1,"kind":"durable","ended":{"$share/g/a":{"sent":%b}}}}' % sent.encode()
    with pytest.raises(PoisonedRecord, match="v5: "):
        decode(data)


@pytest.mark.parametrize("sent", [(1, 1), (65535, MAX_SEQUENCE)])
def test_the_least_and_the_highest_numbers_of_unacknowledged_messages(sent: tuple[int, int]) -> None:
    record = SessionRecord("a", v5=V5(kind="durable", ended={"$share/g/a": EndedShare(False, None, (sent,))}))
    assert decode(record.encode()) == record


@pytest.mark.parametrize("leaving", ['"$share/g/a"', "[1]"])
def test_ended_shared_subscriptions_that_cannot_be_read(leaving: str) -> None:
    data = b'{"id":"a","v5":{"version":1,"kind":"durable","leaving":%b}}' % leaving.encode()
    with pytest.raises(PoisonedRecord, match="leaving is not a list of shared subscriptions"):
        decode(data)


def test_a_session_that_the_listener_has_served_is_known_as_one() -> None:
    """Its record had no data of gateways; they write down why."""
    record = captured_record()
    assert record.upgrade().listener
    again = decode(record.encode())
    assert again.upgrade().listener
    again.v5 = V5()
    assert not decode(again.encode()).upgrade().listener


@pytest.mark.parametrize("user", ["", "ann", None])
def test_the_user_and_the_quota_come_back(user: str | None) -> None:
    """A record without a user differs from that of a client that has not proved who it is."""
    record = SessionRecord("a", v5=V5(user=user, quota="q" if user else ""))
    data = orjson.loads(record.encode())
    assert data["v5"].get("user", None) == user
    assert ("user" in data["v5"]) is (user is not None)
    assert decode(record.encode(), key=name_hash("a")) == record


def test_a_record_belongs_to_its_key() -> None:
    """Under the hash of the client id or its second key, which is its user's too; consumers are named after it."""
    key = second_key("sub-1", "ann")
    v5 = V5(user="ann", draining=[Draining(f"{key}_x", "$MQTT.msgs.old", 1, 9)])
    record = SessionRecord("sub-1", v5=v5, key=key)
    assert decode(record.encode(), client_id="sub-1", key=key) == record
    for other in (second_key("sub-1", "bob"), second_key("sub-2", "ann"), name_hash("sub-2")):
        with pytest.raises(PoisonedRecord):
            decode(record.encode(), client_id="sub-1", key=other)
    with pytest.raises(PoisonedRecord, match="draining does not name a consumer of this client"):
        decode(record.encode(), client_id="sub-1", key=name_hash("sub-1"))
    with pytest.raises(ForeignRecord) as caught:
        decode(record.encode(), client_id="sub-2", key=key)
    assert "sub-1" not in str(caught.value)


def test_unknown_keys_and_null_consumers_are_harmless() -> None:
    data = orjson.loads(CAPTURED)
    data["future"] = {"x": [1]}
    data["cons"]["gone"] = None
    data["cons"]["a.>"]["mem_storage"] = True
    data["cons"]["a.>"]["inactive_threshold"] = 5
    record = decode(orjson.dumps(data))
    assert "gone" not in record.cons
    assert record.cons["a.>"].inactive_threshold == 5
    again = orjson.loads(record.encode())
    del data["cons"]["gone"]
    assert again == data


def poisoned(**changes: object) -> bytes:
    record = captured_record()
    record.v5 = full_v5()
    data = orjson.loads(record.encode())
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = data
        for key in parents:
            target = target[int(key) if isinstance(target, list) else {"sid": "a.>"}.get(key, key)]
        target[{"sid": "a.>"}.get(last, last)] = value
    return orjson.dumps(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\x00", "not JSON"),
        (b'{"id":"sub-1","subs":' + b"[" * 5000, "not JSON"),
        (b"null", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"17", "not a JSON object"),
        (b"{}", "another client"),
        (poisoned(id="other"), "belongs to another client$"),
        (poisoned(id=5), "id is not a string"),
        (poisoned(origin=[]), "origin is not a string"),
        (poisoned(clean="yes"), "clean is not true or false"),
        (poisoned(subs=[]), "subs is not a JSON object"),
        (poisoned(subs__sid=3), "whole number from 0 to 2"),
        (poisoned(subs__sid=True), "whole number"),
        (poisoned(subs__sid=1.0), "whole number"),
        (poisoned(subs={"a b": 1}), "not a subject"),
        (poisoned(subs={"a..b": 1}), "not a subject"),
        (poisoned(subs={">.a": 1}), "not a subject"),
        (poisoned(cons=1), "cons is not a JSON object"),
        (poisoned(cons__sid="x"), "consumer of 'a.>' is not a JSON object"),
        *(
            (poisoned(cons__sid__durable_name=name), "durable_name is not a consumer of this client")
            for name in ("A4a1Bsn5_a.b", "A4a1Bsn5_ b", "A4a1Bsn5_>", "", "B4a1Bsn5_x", "$MQTT_PUBREL_B4a1Bsn5")
        ),
        (poisoned(cons__sid__deliver_subject="$MQTT.>"), "deliver_subject is not"),
        (poisoned(cons__sid__deliver_subject="app.data"), "deliver_subject is not"),
        (poisoned(cons__sid__deliver_subject="$MQTT.sess.x"), "deliver_subject is not"),
        (poisoned(cons__sid__filter_subject="$MQTT.rmsgs.>"), "filter_subject is not"),
        (poisoned(cons__sid__deliver_subject=None), "deliver_subject is not a string"),
        (poisoned(cons__sid__filter_subject="\r\n"), "filter_subject is not"),
        (poisoned(cons__sid__max_ack_pending=-1), "max_ack_pending"),
        (poisoned(cons__sid__max_ack_pending=10**6), "max_ack_pending"),
        (poisoned(cons__sid__ack_wait="30s"), "ack_wait"),
        (poisoned(cons__sid__ack_policy=1), "ack_policy"),
        (poisoned(pubrel=[]), "pubrel is not a JSON object"),
        (poisoned(v5=7), "v5 is not a JSON object"),
        (poisoned(v5__version="1"), "version"),
        (poisoned(v5__kind="eternal"), "kind"),
        (poisoned(v5__expiry=-5), "expiry"),
        (poisoned(v5__expiry=2**32), "expiry"),
        (poisoned(v5__owner=1), "owner"),
        (poisoned(v5__q2=1), "q2"),
        (poisoned(v5__deadline="soon"), "deadline"),
        (poisoned(v5__deadline=1e300), "deadline"),
        (poisoned(v5__deadline=True), "deadline"),
        (poisoned(v5__options=[]), "options"),
        (poisoned(v5__options__sid=1), "options of 'a.>'"),
        (poisoned(v5__options__sid__rh=3), "rh"),
        (poisoned(v5__options__sid__id=0), "id"),
        (poisoned(v5__start__sid=-1), "start"),
        (poisoned(v5__start__sid=2**63), "start"),
        (poisoned().replace(b'{"a.>":10,', b'{"a.>":99999999999999999999999,'), "start"),
        (poisoned(v5__draining={}), ""),
        (poisoned(v5__draining={"a": 1}), "draining is not a list"),
        (poisoned(v5__draining__0__name="x.>"), "draining"),
        (poisoned(v5__draining__0__qos=7), "qos"),
        (poisoned(v5__replay="x"), "replay"),
        (poisoned(v5__was=[1]), "was"),
        (poisoned(v5__was__sid=[1, 2]), "was"),
        (poisoned(v5__was__sid__qos=0), "qos"),
    ],
)
def test_poisoned_records(data: bytes, text: str) -> None:
    if data == poisoned(v5__draining={}):
        assert decode(data).v5 is not None  # an empty value of any type reads as "none"
        return
    with pytest.raises(PoisonedRecord, match=text.replace(".", r"\.")):
        decode(data, client_id="sub-1")


@pytest.mark.parametrize(
    "data",
    [
        poisoned(v5__version=5),
        poisoned(v5__version=2**62),
        poisoned(v5={"version": 5}),
        poisoned(v5={"version": 5, "kind": ["new"]}, subs={"a": "as never before"}),
    ],
)
def test_a_newer_version_is_told_from_a_poisoned_record(data: bytes) -> None:
    with pytest.raises(NewerRecord, match=r"v5: version \d+ was written by a newer"):
        decode(data, client_id="sub-1")
    with pytest.raises(PoisonedRecord, match="another client"):
        decode(data, client_id="other")


def test_the_first_record_of_a_session_says_so() -> None:
    """Another gateway that does not know the key writes it back, with a nonce of its own: then nothing is known."""
    record = SessionRecord("a", v5=V5(nonce="one", first=FIRST))
    body = record.encode()
    assert decode(body).v5 == record.v5
    later = decode(body.replace(b'"nonce":"one"', b'"nonce":"two"')).v5
    assert later is not None
    assert later.first == 0
    assert decode(SessionRecord("a", v5=V5(first=7)).encode()).v5 == V5(first=7)


@pytest.mark.parametrize("value", [b"true", b"-2", b"1.5", b"[]"])
def test_a_first_record_that_is_no_sequence(value: bytes) -> None:
    body = SessionRecord("a", v5=V5(first=7)).encode()
    with pytest.raises(PoisonedRecord, match="first"):
        decode(body.replace(b'"first":7', b'"first":' + value))


def test_keys_of_v5_that_are_not_known_are_kept() -> None:
    data = orjson.loads(poisoned(v5__mood={"since": [1]}))
    record = decode(orjson.dumps(data))
    assert record.v5 is not None
    assert record.v5.extra == {"mood": {"since": [1]}}
    assert orjson.loads(record.encode()) == data


words = st.one_of(st.text("a.>* \n\0é", max_size=4), st.sampled_from(["durable_name", "version", "kind", "options"]))
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=10,
)
known_keys = st.sampled_from(["origin", "id", "clean", "subs", "cons", "pubrel", "v5"])


@given(st.dictionaries(known_keys, json_values))
def test_any_json_is_a_record_or_poisoned(value: dict[str, object]) -> None:
    text = ""
    try:
        decode(orjson.dumps(value))
    except PoisonedRecord as error:
        text = str(error)
    assert "\n" not in text


@given(st.binary(max_size=60))
def test_any_bytes_are_a_record_or_poisoned(data: bytes) -> None:
    try:
        decode(data)
    except PoisonedRecord:
        pass


async def test_save_load_delete(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    store = SessionStore(js)
    client_hash = name_hash("sub-1")
    assert store.subject(client_hash) == "$MQTT.sess.A4a1Bsn5"
    assert await store.load(client_hash) is None
    record = captured_record()
    record.v5 = full_v5()
    seq = await store.save(record, expected=0)
    assert await store.load(client_hash, "sub-1") == (record, seq)
    record.v5.nonce = "n2"
    second = await store.save(record, expected=seq)
    assert second > seq
    for wrong in (0, seq, second + 1):
        with pytest.raises(Conflict):
            await store.save(record, expected=wrong)
    third = await store.save(record, expected=None)
    assert await store.delete(client_hash, second) is False
    assert await store.delete(client_hash, third) is True
    assert await store.delete(client_hash, third) is False
    assert await store.load(client_hash) is None
    assert await store.save(record, expected=0) > third


async def test_only_one_of_many_writers_wins(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    store = SessionStore(js)
    seq = await store.save(captured_record(), expected=0)
    results = await asyncio.gather(
        *(store.save(captured_record(), expected=seq) for _ in range(20)), return_exceptions=True
    )
    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, Conflict) for result in results) == 19


async def test_the_reply_subject_announces_the_takeover(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    signals = await js.client.subscribe("$MQTT.JSA.*.SP.*.*")
    await fence(js.client)
    seq = await SessionStore(js).save(captured_record(), expected=None, reply="$MQTT.JSA.gw000001.SP.A4a1Bsn5." + ONE)
    signal = await signals.next_msg(5)
    assert orjson.loads(signal.data) == {"stream": "$MQTT_sess", "seq": seq}
    assert signal.subject == "$MQTT.JSA.gw000001.SP.A4a1Bsn5." + ONE


async def test_a_poisoned_record_says_its_sequence(js: NatsPyJetStream) -> None:
    await ensure_streams(js)
    store = SessionStore(js)
    seq = await publish(js, store.subject("A4a1Bsn5"), b'{"id":')
    with pytest.raises(PoisonedRecord) as caught:
        await store.load("A4a1Bsn5", "sub-1")
    assert caught.value.seq == seq
    assert await store.save(captured_record(), expected=seq) == seq + 1


def test_domain_is_part_of_the_subject() -> None:
    store = SessionStore(NatsPyJetStream(Client()), "hub")
    assert store.subject("FLbZLiJC") == "$MQTT.sess.hub.FLbZLiJC"


def test_keys_of_the_second_subject() -> None:
    assert sessions.second_sid("a") == "a fwc"


def test_consumers_keep_settings_that_we_do_not_know() -> None:
    consumer = ConsumerRef(
        name_hash("x") + "_d", "$MQTT.sub.x", "", 10, start_seq=7, extra={"filter_subjects": ["$MQTT.msgs.a"]}
    )
    data = orjson.dumps({"id": "x", "cons": {"a": consumer.to_config()}})
    assert decode(data).cons["a"] == consumer
