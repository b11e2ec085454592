# SPDX-License-Identifier: Apache-2.0
"""Acknowledgements without a consumer that answers, leaders that do not answer, messages stored before an outage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from mqtt_nats.backbone import doubtful_stores
from mqtt_nats.backbone.connect import NatsLinks
from mqtt_nats.backbone.doubtful_stores import DoubtfulStores, find_stored
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from tests.backbone.bench import ACK, NO_RESPONDERS, Bench
from tests.sessions.fakes import FakeInbox, FakeLink, FakeRound, FakeTasks, as_inbox, as_link, as_tasks

pytestmark = pytest.mark.sources

MESSAGES = "$MQTT_msgs"
INFO = "$JS.API.CONSUMER.INFO.$MQTT_msgs.C"
STEP_DOWN = "$JS.API.STREAM.LEADER.STEPDOWN.$MQTT_msgs"


class Round(FakeRound):
    """Counts how often the bytes for clients are to leave."""

    def __init__(self) -> None:
        self.fake_started = 0

    def start(self) -> None:
        self.fake_started += 1


class Doubt:
    """A publisher whose acknowledgements find nobody, and a JetStream that knows why."""

    def __init__(self) -> None:
        self.bench, self.js = Bench(), FakeInbox()
        self.round, self.tasks = Round(), FakeTasks()
        link = as_link(FakeLink())
        self.nats = NatsLinks(link, link, link, as_inbox(self.js), self.bench.store)
        self.doubtful = DoubtfulStores(self.nats, as_tasks(self.tasks), self.round)
        self.bench.store.on_absent = self.doubtful.absent

    def absent(self, name: str, subject: bytes = ACK) -> bytes:
        """Send an acknowledgement, and have it find nobody; returns its token."""
        token = self.bench.acknowledge(name, subject)
        self.bench.sent()
        self.bench.answer(name, b"", NO_RESPONDERS)
        return token


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other without a pause."""
    monkeypatch.setattr(doubtful_stores, "DOUBTFUL_RETRY_S", 0.001)
    monkeypatch.setattr(doubtful_stores, "REPLICA_CATCH_UP_S", 0.05)


def failing(subject: str, *errors: Exception) -> Callable[[str], None]:
    """Requests on a subject fail with these errors, one after the other."""
    left = list(errors)

    def fail(asked: str) -> None:
        if asked == subject and left:
            raise left.pop(0)

    return fail


# -- acknowledgements -----------------------------------------------------------------------------------


async def test_an_acknowledgement_is_sent_again_when_its_consumer_exists() -> None:
    doubt = Doubt()
    doubt.js.consumers[MESSAGES]["C"] = {"config": {}}
    doubt.absent("one")
    await doubt.tasks.fake_settle()
    assert (doubt.bench.sent(), doubt.bench.log) == (["one"], [])
    assert doubt.round.fake_started == 1


async def test_an_acknowledgement_whose_consumer_is_gone_has_ended() -> None:
    doubt = Doubt()
    doubt.absent("one")
    await doubt.tasks.fake_settle()
    assert (doubt.bench.sent(), doubt.bench.log) == ([], [("one", b"")])
    assert doubt.round.fake_started == 1


async def test_an_acknowledgement_whose_stream_is_gone_has_ended() -> None:
    doubt = Doubt()
    doubt.js.before = failing(INFO, ApiError(404, STREAM_NOT_FOUND, "stream not found"))
    doubt.js.consumers[MESSAGES]["C"] = {"config": {}}
    doubt.absent("one")
    await doubt.tasks.fake_settle()
    assert doubt.bench.log == [("one", b"")]


@pytest.mark.parametrize(
    "error", [NoResponders("no leader"), RequestTimeout("no answer"), ApiError(503, 10008, "temporarily unavailable")]
)
async def test_as_long_as_nobody_knows_the_consumer_nothing_is_assumed(error: Exception) -> None:
    doubt = Doubt()
    doubt.js.before = failing(INFO, error, error)
    doubt.js.consumers[MESSAGES]["C"] = {"config": {}}
    doubt.absent("one")
    await doubt.tasks.fake_settle()
    assert doubt.js.asked == [INFO] * 3
    assert (doubt.bench.sent(), doubt.bench.log) == (["one"], [])


async def test_without_nats_the_consumer_is_asked_for_later() -> None:
    doubt = Doubt()
    doubt.nats.online.clear()
    online: list[bool] = []
    doubt.js.before = lambda subject: online.append(doubt.nats.online.is_set())
    doubt.absent("one")
    asyncio.get_running_loop().call_later(0.01, doubt.nats.online.set)
    await doubt.tasks.fake_settle()
    assert (doubt.js.asked, online) == ([INFO], [True])


async def test_acknowledgements_of_a_consumer_wait_for_one_answer() -> None:
    doubt = Doubt()
    doubt.js.consumers[MESSAGES]["C"] = {"config": {}}
    for name in ("one", "two"):
        doubt.absent(name)
    doubt.absent("other", ACK.replace(b".C.", b".D."))
    await doubt.tasks.fake_settle()
    assert sorted(doubt.js.asked) == [INFO, INFO[:-1] + "D"]
    assert (doubt.bench.sent(), doubt.bench.log) == (["one", "two"], [("other", b"")])
    doubt.absent("three")
    await doubt.tasks.fake_settle()
    assert doubt.js.asked.count(INFO) == 2, "an answer counts once"


async def test_what_is_no_acknowledgement_of_a_consumer_is_not_waited_for() -> None:
    doubt = Doubt()
    doubt.absent("strange", b"$JS.ACK.strange")
    assert doubt.bench.log == [("strange", b"")]
    doubt.doubtful.absent(b"no such token")
    assert doubt.tasks.fake_spawned == []


# -- leaders that do not answer -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "replicas", "replaced"),
    [
        ({"leader": "one"}, 3, True),
        ({"leader": "one"}, 1, False),  # no other server has the messages
        ({"replicas": []}, 3, False),  # an election is under way
        (None, 3, False),
    ],
)
async def test_another_leader_is_asked_for_where_there_may_be_one(
    cluster: dict[str, object] | None, replicas: int, replaced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    doubt = Doubt()
    doubt.js.cluster, doubt.js.replicas = cluster, replicas
    doubt.doubtful.silent(MESSAGES)
    await doubt.tasks.fake_settle()
    assert (STEP_DOWN in doubt.js.asked) is replaced
    assert ("one, the leader of stream $MQTT_msgs, does not answer requests" in caplog.text) is replaced


@pytest.mark.parametrize("error", [NoResponders("a test"), RequestTimeout("a test"), ApiError(503, 10008, "a test")])
async def test_a_refused_change_of_the_leader_is_not_repeated(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "mqtt_nats.broker")
    doubt = Doubt()
    doubt.js.before = failing(STEP_DOWN, error)
    doubt.js.cluster, doubt.js.replicas = {"leader": "one"}, 3
    doubt.doubtful.silent(MESSAGES)
    await doubt.tasks.fake_settle()
    assert doubt.js.asked.count(STEP_DOWN) == 1
    assert "the leader of stream $MQTT_msgs stays: a test" in caplog.text


# -- messages that were sent before an outage -----------------------------------------------------------


def store(js: FakeInbox, *names: str) -> None:
    for name in names:
        js.put("$MQTT.msgs.a", b"x", b"NATS/1.0\r\nNats-Msg-Id:%b\r\n\r\n" % name.encode())


async def test_messages_are_found_by_their_ids(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mqtt_nats.broker")
    js = FakeInbox()
    store(js, "a", "b", "c")
    assert await find_stored(as_inbox(js), {b"a", b"c", b"lost"}, 0.0) == {b"a": 1, b"c": 3}
    assert "2 of 3 messages without an acknowledgement were stored" in caplog.text


async def test_a_replica_that_lags_is_asked_again() -> None:
    js = FakeInbox()
    js.replicas = 3
    store(js, "a", "b")
    late = js.messages[MESSAGES].pop()

    def catch_up(subject: str) -> None:
        if len(js.asked) > 3:  # two requests are one look
            js.messages[MESSAGES] = [*js.messages[MESSAGES][:1], late]

    js.before = catch_up
    assert await find_stored(as_inbox(js), {b"b"}, 0.0) == {b"b": 2}
    assert len(js.asked) == 4


@pytest.mark.parametrize("replicas", [1, 3])
async def test_a_message_that_was_removed_from_the_end_is_not_waited_for_without_end(replicas: int) -> None:
    """Where there are no replicas, none lags."""
    js = FakeInbox()
    js.replicas = replicas
    store(js, "a", "b")
    js.messages[MESSAGES].pop()
    assert await find_stored(as_inbox(js), {b"a", b"b"}, 0.0) == {b"a": 1}
    assert (len(js.asked) > 2) is (replicas > 1)


async def test_who_asked_learns_that_jetstream_does_not_answer() -> None:
    js = FakeInbox()
    js.before = failing("$JS.API.STREAM.INFO.$MQTT_msgs", RequestTimeout("a test"))
    with pytest.raises(RequestTimeout):
        await find_stored(as_inbox(js), {b"a"}, 0.0)
