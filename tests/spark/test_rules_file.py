# SPDX-License-Identifier: Apache-2.0
"""Files of rules, templates and the metrics of rules; without Spark."""

import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, cast

import pytest
from pyspark.sql import DataFrame, SparkSession

from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.publishing.dead_letters import PAYLOAD_MOST, dead_letter
from pyspark_mqtt_nats.publishing.encoding import Encoder, Refused
from pyspark_mqtt_nats.rules import metrics, query, ruleset
from pyspark_mqtt_nats.rules.definitions import FILE_MOST, Rule, load
from pyspark_mqtt_nats.rules.query import Figures
from pyspark_mqtt_nats.rules.query_plan import Reads, sink_options, source_options
from pyspark_mqtt_nats.rules.stateful import HysteresisProcessor, SilenceProcessor
from pyspark_mqtt_nats.rules.templates import parse

GOOD = """
checkpoint = "state"
dead_letter = "rules/failed"
[decoders]
"site/+/temp" = "number"
[tables.devices]
path = "devices.csv"
[[rules]]
name = "hot"
query = "SELECT topic, number FROM messages WHERE number > 80"
topic = "alerts/{topic}"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "rules.toml"
    found.write_text(GOOD, encoding="utf-8")
    return found


def test_what_a_file_says(file: Path) -> None:
    found = load(file)
    rule = found.rules["hot"]
    assert (rule.qos, rule.retain, rule.mode, rule.every, rule.topics) == (1, False, "append", 1, ("#",))
    assert found.checkpoint(rule) == str(file.parent / "state" / "hot")
    assert found.place("s3a://bucket/devices.csv") == "s3a://bucket/devices.csv"
    assert found.place("/data/devices.csv") == "/data/devices.csv"
    source = {"servers": "nats://x", "user": "u", "password": "p", "topics": "a/#", "startingSequence": "1"}
    assert sink_options(found, rule, source) == {
        "servers": "nats://x",
        "user": "u",
        "password": "p",
        "deadLetterTopic": "rules/failed",
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"numPartitions": "1", "maxMessagesPerTrigger": "100000"}),
        ({"numpartitions": "4", "MAXBYTESPERTRIGGER": "1m"}, {}),
    ],
)
def test_a_rule_reads_in_one_task(file: Path, given: dict[str, str], expected: dict[str, str]) -> None:
    """Tasks publish side by side, so with several a retained message could be replaced by an older one."""
    found = load(file)
    begin = {"servers": "nats://x", "STARTINGSEQUENCE": "1"}
    made = source_options(found, found.rules["hot"], Reads({**begin, **given}))
    read = {**begin, "topics": '["#"]', "decoders": '{"site/+/temp":"number"}'}
    assert made == {**read, **given, **expected}


def test_a_new_rule_begins_when_it_is_put_in_force(file: Path) -> None:
    """Its first batch is planned some seconds later: what comes in between is not left out."""
    found = load(file)
    before = time.time()
    made = source_options(found, found.rules["hot"], Reads({"servers": "nats://x"}))
    assert int(before * 1000) <= int(made["startingTimestamp"]) <= time.time() * 1000


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('checkpoint = "own"', 'checkpoint = "./own/"'),
        ('checkpoint = "state/warm"', ""),
        ('checkpoint = "state"', ""),
        ("", 'checkpoint = "x/../state/hot/in"'),
        ('checkpoint = "s3a://bucket/a"', 'checkpoint = "s3a://bucket/a/b"'),
    ],
)
def test_rules_that_would_share_a_checkpoint(file: Path, one: str, other: str) -> None:
    """Each would go on where the other was, and the state of one would be taken for that of the other."""
    first, second = (
        f"""[[rules]]\nname = "{name}"\nquery = "SELECT 1"\ntopic = "a"\n{more}\n"""
        for name, more in (("hot", one), ("warm", other))
    )
    file.write_text(f'checkpoint = "state"\n{first}{second}', encoding="utf-8")
    with pytest.raises(JobError, match=r"rules\[(hot|warm)\]\.checkpoint: it is that of rule (hot|warm), or one is in"):
        load(file)
    file.write_text(f'checkpoint = "state"\n{first}'.replace("state/warm", "state-warm"), encoding="utf-8")
    assert list(load(file).rules) == ["hot"]


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ('name = "hot"', 'name = "hot"\nqos = 3', "rules[hot].qos: Input should be less than or equal to 2"),
        ('name = "hot"', 'name = "hot"\nqos = "1"', "rules[hot].qos: Input should be a valid integer"),
        ('name = "hot"', 'name = "hot"\nretain = 1', "rules[hot].retain: Input should be a valid boolean"),
        ('name = "hot"', 'name = "hot"\nquality = 1', "rules[hot].quality: there is no such key"),
        ('name = "hot"', 'name = "a/b"', "rules[a/b].name: expected at most 64 letters, digits, _, . and -"),
        ('name = "hot"', "name = 1", "rules[0].name: Input should be a valid string"),
        ('name = "hot"', "", "rules[0].name: it is missing"),
        ('topic = "alerts/{topic}"', "", "rules[hot].topic: it is missing"),
        ("{topic}", "{topic", "rules[hot].topic: 'alerts/{topic' has a single {"),
        ("{topic}", "{topic}/#", "rules[hot].topic: expected a topic to publish on, without + and #"),
        ("topic =", 'response_topic = "+/{topic}"\ntopic =', "rules[hot].response_topic: expected a topic"),
        ("{topic}", "topic}", "rules[hot].topic: 'alerts/topic}' has a single }"),
        ("topic =", 'topics = ["a/#/b"]\ntopic =', "rules[hot].topics: 'a/#/b': a wildcard must be a whole level"),
        ("topic =", 'topics = "a"\ntopic =', "rules[hot].topics: expected a list of topic filters"),
        ("topic =", 'every = "soon"\ntopic =', "rules[hot].every: expected a time span such as '30 seconds'"),
        ("topic =", 'every = "0 s"\ntopic =', "rules[hot].every: expected a time span"),
        ("topic =", 'mode = "update"\ntopic =', "rules[hot].mode: Input should be 'append' or 'complete'"),
        ("topic =", 'function = "a.b"\ntopic =', "rules[hot].function: expected module:function"),
        ("topic =", "message_expiry = -1\ntopic =", "rules[hot].message_expiry: Input should be greater than"),
        (
            "topic =",
            'hysteresis = {key = ["topic"], value = "number", high = 1, low = 2}\ntopic =',
            "rules[hot].hysteresis: low must be less than high",
        ),
        (
            "topic =",
            'function = "a:b"\nsilence = {key = ["topic"], after = "1 minute"}\ntopic =',
            "rules[hot]: function and silence exclude each other",
        ),
        ("topic =", 'silence = {key = [], after = "1 minute"}\ntopic =', "rules[hot].silence.key: Tuple should have"),
        ('"number"', '"numbr"', "decoders: 'site/+/temp' has the format 'numbr': expected number"),
        (
            "devices.csv",
            "devices.xls",
            "tables.devices: give a format for devices.xls; .csv, .json, .parquet need none",
        ),
        ("tables.devices", "tables.messages", "tables: messages: expected a name of letters, digits and _ that is not"),
        ("rules/failed", "rules/#", "dead_letter: expected a topic to publish on, without + and #"),
        ('checkpoint = "state"', "", "checkpoint: it is missing"),
        ("[[rules]]", "[[rule]]", "rules: it is missing"),
        ("[[rules]]", "[[rules]", "not TOML: "),
        ("[[rules]]", GOOD[GOOD.index("[[rules]]") :] + "[[rules]]", "rules: two rules have the name hot"),
    ],
)
def test_each_mistake_is_one_line_that_names_the_key(file: Path, before: str, after: str, text: str) -> None:
    assert before in GOOD
    file.write_text(GOOD.replace(before, after, 1), encoding="utf-8")
    with pytest.raises(JobError) as refused:
        load(file)
    assert str(refused.value).startswith(f"{file}: {text}")
    assert "\n" not in str(refused.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"none\.toml: No such file or directory"):
        load(tmp_path / "none.toml")
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (FILE_MOST + 1))
    with pytest.raises(JobError, match="a file of rules has at most 1,048,576 bytes"):
        load(large)
    large.write_bytes(b"\xff")
    with pytest.raises(JobError, match="not TOML"):
        load(large)


def test_what_starts_a_rule_again(file: Path) -> None:
    first = load(file)
    assert load(file) == first
    file.write_text(GOOD + '[[rules]]\nname = "cold"\nquery = "SELECT 1"\ntopic = "cold"\n', encoding="utf-8")
    second = load(file)
    assert second.same(first, "hot")
    assert not second.same(first, "cold")
    (file.parent / "devices.csv").write_text("topic\n", encoding="utf-8")
    assert not load(file).same(second, "hot")
    file.write_text(GOOD.replace("rules/failed", "rules/refused"), encoding="utf-8")
    assert not load(file).same(first, "hot")


def test_a_file_is_tried_again_when_its_planning_has_failed_in_passing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[str] = []
    said: list[str] = []

    def plan(spark: object, definitions: object, rule: Rule, reads: Reads) -> object:
        if failures:
            raise JobError(failures.pop())
        return object()  # no query is started

    monkeypatch.setattr(ruleset, "plan", plan)
    rules = ruleset.Ruleset(cast(SparkSession, None), file, Reads({}), said.append)
    for pause, tries in ((ruleset.RETRY_S, 1), (0.0, 2)):
        monkeypatch.setattr(ruleset, "RETRY_S", pause)
        said.clear()
        failures.append(f"the table is away, {tries}")
        file.write_text(GOOD.replace("> 80", f"> 9{tries}"), encoding="utf-8")
        for _ in range(3):
            rules.reload()
        texts = [f"the table is away, {tries}; the rules in force stay", "started hot, stopped none"]
        assert said == [f"{file}: {text}" for text in texts[:tries]]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [("x = [", "not TOML: Invalid value (at end of document)"), (GOOD.replace("> 80", "> 90"), "no such column")],
)
def test_a_file_that_is_again_as_it_was_is_told(
    file: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, text: str
) -> None:
    """After an error of the file itself, and after one of the planning."""
    said: list[str] = []

    def plan(spark: object, definitions: object, rule: Rule, reads: Reads) -> object:
        if "> 90" in rule.query:
            raise JobError("no such column")
        return object()  # no query is started

    monkeypatch.setattr(ruleset, "plan", plan)
    rules = ruleset.Ruleset(cast(SparkSession, None), file, Reads({}), said.append)
    rules.reload()
    assert said == []
    file.write_text(wrong, encoding="utf-8")
    rules.reload()
    file.write_text(GOOD, encoding="utf-8")
    for _ in range(2):
        rules.reload()
    assert said == [f"{file}: {text}; the rules in force stay", f"{file}: it has the rules in force"]


class Query:
    """A streaming query in its first trigger, which has had no data."""

    lastProgress = None

    def __init__(self) -> None:
        self.isActive = True
        self.status: dict[str, Any] = {"message": "Initializing sources", "isTriggerActive": False}

    def exception(self) -> Exception:
        return JobError("there is no stream x")

    def waits(self) -> None:
        """The trigger is over."""
        self.status = {"message": "Waiting for next trigger", "isTriggerActive": False}


class Messages:
    """A streaming DataFrame; each query of it is a new one."""

    def __init__(self) -> None:
        self.query = Query()

    @property
    def writeStream(self) -> Self:
        return self

    def _same(self, *given: object, **options: object) -> Self:
        return self

    format = options = outputMode = option = queryName = trigger = _same

    def start(self) -> Query:
        self.query = Query()
        return self.query


def test_a_rule_runs_when_its_first_trigger_is_over(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when nothing comes: it is up again after a failure, and the user is told."""
    clock = [0.0]
    monkeypatch.setattr(query.time, "monotonic", lambda: clock[0])  # type: ignore[attr-defined]
    messages = Messages()
    rule = query.RunningRule(load(file).rules["hot"], cast(DataFrame, messages), {}, "checkpoint")
    for up in (1, 0):
        assert rule.check(may_start=True) == ""  # it is started
        messages.query.status["isTriggerActive"] = True
        assert rule.check(may_start=True) == ""
        assert rule.starting
        assert rule.figures.up == up
        messages.query.waits()
        assert [rule.check(may_start=True), rule.check(may_start=True)] == ["it runs", ""]
        assert (rule.told, rule.figures.up) == (True, 1)
        messages.query.isActive = False
        assert rule.check(may_start=True) == "there is no stream x; the rule is started again"
        assert (rule.told, rule.figures.up) == (False, 0)
        assert rule.check(may_start=True) == ""
        clock[0] += query.PAUSE_MOST


def test_parts_of_a_template() -> None:
    assert parse("a/{b}/{{c}}") == [("a/", ""), ("", "b"), ("/", ""), ("{", ""), ("c", ""), ("}", "")]
    assert parse("") == []


def test_metrics_in_the_text_format() -> None:
    text = metrics.text({"hot": Figures(5, 3, 2, 1, 7), "cold": Figures(error='a "b"\\\n')})
    assert 'mqtt_nats_rule_rows_read_total{rule="hot"} 5\n' in text
    assert 'mqtt_nats_rule_rows_published_total{rule="hot"} 3\n' in text
    assert 'mqtt_nats_rule_batches_total{rule="hot"} 2\n' in text
    assert 'mqtt_nats_rule_failures_total{rule="hot"} 1\n' in text
    assert 'mqtt_nats_rule_lag_messages{rule="hot"} 7\n' in text
    assert 'mqtt_nats_rule_up{rule="hot"} 1\n' in text
    assert 'mqtt_nats_rule_up{rule="cold"} 0\n' in text
    errors = [line for line in text.splitlines() if line.startswith("mqtt_nats_rule_error_info{")]
    assert errors == ['mqtt_nats_rule_error_info{rule="cold",error="a \\"b\\"\\\\\\n"} 1']
    assert all(line.startswith("# ") or line.count(" ") >= 1 for line in text.splitlines())


def test_a_silent_client_does_not_hold_up_others() -> None:
    with metrics.serving(0) as page, socket.create_connection((metrics.LOOPBACK, page.port)):
        page.set({"hot": Figures()})
        url = f"http://{metrics.LOOPBACK}:{page.port}/metrics"
        with urllib.request.urlopen(url, timeout=metrics.TIMEOUT_S / 2) as answer:
            assert b'mqtt_nats_rule_up{rule="hot"} 1' in answer.read()


def test_a_port_that_is_taken() -> None:
    with metrics.serving(0) as page:
        text = rf"--metrics-port {page.port}: Address already in use"
        with pytest.raises(JobError, match=text), metrics.serving(page.port):
            pass


class State:
    """A value state of Spark."""

    def __init__(self) -> None:
        self.value: Any = None

    def exists(self) -> bool:
        return self.value is not None

    def get(self) -> Any:
        return self.value

    def update(self, value: Any) -> None:
        self.value = value


class Handle:
    """What Spark gives a processor."""

    def __init__(self) -> None:
        self.state = State()
        self.timers: list[int] = []

    def getValueState(self, name: str, schema: str) -> State:
        return self.state

    def registerTimer(self, at: int) -> None:
        self.timers.append(at)


class Clock:
    """Time in milliseconds, as both a batch and a timer that has expired give it."""

    def __init__(self, now: int) -> None:
        self.now = now

    def getCurrentProcessingTimeInMs(self) -> int:
        return self.now

    def getExpiryTimeInMs(self) -> int:
        return self.now


def rows(*given: tuple[int | None, float | None]) -> Iterator[Any]:
    return iter([{"at": at, "value": value} for at, value in given])


def test_hysteresis_row_by_row() -> None:
    processor = HysteresisProcessor(["topic", "state", "value", "at"], "value", "at", 10.0, 5.0)
    processor.init(Handle())  # type: ignore[arg-type]

    def states(*given: tuple[int | None, float | None]) -> list[tuple[str, float]]:
        return [(row.state, row.value) for row in processor.handleInputRows(("a",), rows(*given), None)]

    assert states((1, 7.0), (2, 10.0), (3, None), (None, 99.0)) == []
    assert states((3, 4.0), (2, 12.0), (1, 11.0)) == [("high", 11.0), ("low", 4.0)]
    assert states((4, 7.0), (5, 3.0)) == []
    assert states((6, 10.5)) == [("high", 10.5)]


def test_silence_is_reported_once_and_ends() -> None:
    handle = Handle()
    processor = SilenceProcessor(["topic", "silent", "last"], "at", 1000)
    processor.init(handle)  # type: ignore[arg-type]

    def came(now: int, *given: tuple[int | None, float | None]) -> list[tuple[bool, int]]:
        found = processor.handleInputRows(("a",), rows(*given), Clock(now))
        return [(row.silent, row.last) for row in found]

    def expired(at: int) -> list[tuple[bool, int]]:
        found = processor.handleExpiredTimer(("a",), None, Clock(at))
        return [(row.silent, row.last) for row in found]

    assert came(0, (None, 1.0)) == []
    assert handle.timers == []
    assert came(0, (5, 1.0), (3, 1.0)) == []
    assert came(600, (7, 1.0)) == []
    assert handle.timers == [1000]
    assert expired(1000) == []  # it has moved
    assert handle.timers == [1000, 1600]
    assert expired(1600) == [(True, 7)]
    assert came(5000, (9, 1.0)) == [(False, 9)]
    assert handle.timers == [1000, 1600, 6000]


@pytest.mark.parametrize(
    ("payload", "found"),
    [
        (b"warm", b'"payload":"warm"'),
        ("warm", b'"payload":"warm"'),
        (None, b'"payload":null'),
        (b"\xff\x00", b'"payload_base64":"/wA="'),
        (b"x" * 100_000, b'"payload":"' + b"x" * PAYLOAD_MOST + b'"'),
    ],
)
def test_a_dead_letter_can_be_published(payload: Any, found: bytes) -> None:
    row = ("a/#" + "b" * 5000, payload, 7, True, "text/plain", 1, "r", b"c", 5, None)
    letter = dead_letter("failed/rows", row, Refused("topic", "it has a wildcard"))
    message = Encoder("$MQTT.msgs.", b"_INBOX.x.", 1 << 20).message(letter)
    assert message.target.topic == "failed/rows"
    assert (message.qos, message.retain) == (1, False)
    assert b'"error":"column topic: it has a wildcard","column":"topic","topic":"a/#bbb' in message.payload
    assert found in message.payload
    assert len(message.payload) < 50_000
