# SPDX-License-Identifier: Apache-2.0
"""Figures of numbers in payloads, against the same computed in plain Python."""

import io
import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pyspark_mqtt_nats.jobs import JobError, aggregate
from pyspark_mqtt_nats.jobs.aggregate import Aggregate, Aggregated, aligned, json_path, shown
from pyspark_mqtt_nats.jobs.progress import Progress
from tests.harness.nats import NatsServer
from tests.spark.storing import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(360)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HOUR = 3600
Key = tuple[str | None, ...]

# Payload, and the number in it.
PLAIN = [
    (b"21.5", 21.5), (b"-3", -3.0), (b"+.5", 0.5), (b"7.", 7.0), (b" 1e3\n", 1000.0), (b"\t2E-2", 0.02), (b"0", 0.0),
    *((text, None) for text in (
        b"", b"NaN", b"Infinity", b"-inf", b"1e999", b"1,5", b"0x10", b"1d", b"1f", b"12 13", b"\xff\xfe", b"true",
        b'"5"', b"null", "٣".encode(), b"1_000", b"9" * 400, b"--1", b".", b"e5",
    )),
]  # fmt: skip


def run(spark: "SparkSession", job: Aggregate) -> Aggregated:
    return aggregate.run(spark, job, Progress("aggregate", io.StringIO()))


def reading(at: datetime, value: Any) -> bytes:
    return json.dumps({"at": at.isoformat(), "sensor": {"temp": value}, "x": [1, {"y": 2}]}).encode()


def expected(
    values: Sequence[tuple[Key, float, float]], window: int, slide: int
) -> dict[tuple[Key, datetime], tuple[int, float, float, float]]:
    """Figures by key and start of the window, of (key, seconds since 1970, value)."""
    groups: dict[tuple[Key, int], list[float]] = {}
    for key, time, value in values:
        start = math.floor(time / slide) * slide
        while start > time - window:
            groups.setdefault((key, start), []).append(value)
            start -= slide
    return {
        (key, EPOCH + timedelta(seconds=start)): (len(found), min(found), max(found), sum(found) / len(found))
        for (key, start), found in groups.items()
    }


def assert_same(
    rows: list[Any], window: int, wanted: dict[tuple[Key, datetime], tuple[int, float, float, float]]
) -> None:
    found = {}
    for row in rows:
        *key, start, end, number, least, most, mean = row
        start = start.replace(tzinfo=UTC) if start.tzinfo is None else start
        end = end.replace(tzinfo=UTC) if end.tzinfo is None else end
        assert end - start == timedelta(seconds=window)
        found[tuple(key), start] = (number, least, most, mean)
    assert len(found) == len(rows)
    assert found.keys() == wanted.keys()
    for key, figures in found.items():
        assert figures == pytest.approx(wanted[key], rel=1e-12), key


@pytest.fixture
def store(nats_server: NatsServer) -> Iterator[Store]:
    with Store(nats_server.url) as found:
        yield found


def read(spark: "SparkSession", path: Path) -> list[Any]:
    """What Spark finds there; times in UTC, whatever the zone of this machine is."""
    times = ("start", "end")
    found = spark.read.parquet(str(path))
    names = [
        f"date_format({name}, \"yyyy-MM-dd'T'HH:mm:ssXXX\") {name}" if name in times else name for name in found.columns
    ]
    return [
        tuple(datetime.fromisoformat(value) if name in times else value for name, value in row.asDict().items())
        for row in found.selectExpr(*names).collect()
    ]


def test_every_number_counts_and_nothing_else_does(spark: "SparkSession", store: Store, tmp_path: Path) -> None:
    store.put_payloads((f"kind.{index % 3}", payload) for index, (payload, _) in enumerate(PLAIN))
    output = tmp_path / "figures"
    found = run(spark, Aggregate(store.given(), window=7 * 86_400, output=str(output)))
    stored = datetime.now(UTC).timestamp()
    values = [((f"kind/{index % 3}",), stored, value) for index, (_, value) in enumerate(PLAIN) if value is not None]
    assert_same(read(spark, output), 7 * 86_400, expected(values, 7 * 86_400, 7 * 86_400))
    assert (found.messages, found.values, found.windows) == (len(PLAIN), 7, 3)
    assert found.example == "sequence 8, topic 'kind/1': ''"
    assert "3 figures in" in found.text()
    assert "20 messages with no number as payload, such as sequence 8, topic 'kind/1': ''" in found.text()


def test_windows_of_event_time_by_level(spark: "SparkSession", store: Store, tmp_path: Path) -> None:
    """Overlapping windows, times in several forms, values that are no numbers, topics of different length."""
    source = random.Random(5)
    begin = datetime(2010, 1, 1, tzinfo=UTC)
    values: list[tuple[Key, float, float]] = []
    messages: list[tuple[str, bytes]] = []
    for _ in range(3000):
        at = begin + timedelta(seconds=source.randrange(4 * 86_400), microseconds=source.randrange(10**6))
        levels = [source.choice("abc") for _ in range(source.randint(1, 3))]
        value = source.choice([round(source.gauss(20, 9), 3), source.randint(-5, 5), "19.25", "cold", None, True, [1]])
        body: dict[str, Any] = {"sensor": {"temp": value}, "at": at.isoformat()}
        form = source.randrange(5)
        if form == 1:
            body["at"] = at.timestamp()
        elif form == 2:
            body["at"] = at.timestamp() * 1000
        elif form == 3:
            body["at"] = at.astimezone(datetime.fromisoformat("2010-01-01T00:00:00+05:30").tzinfo).isoformat()
        elif form == 4:
            body["at"] = at.replace(tzinfo=None).isoformat(" ")
        messages.append((".".join(levels), json.dumps(body).encode()))
        if value is not None and not isinstance(value, bool | list) and value != "cold":
            key = tuple(levels[level] if level < len(levels) else None for level in (2, 0))
            values.append((key, at.timestamp(), float(value)))
    messages += [
        ("a", b'{"sensor": {"temp": 1}}'),
        ("a", b'{"sensor": {"temp": 1}, "at": "soon"}'),
        ("a", b"{"),
        ("a", b"5"),
    ]
    store.put_payloads(messages)
    output = tmp_path / "figures"
    job = Aggregate(store.given(), 6 * HOUR, 2 * HOUR, (3, 1), "sensor.temp", "at", output=str(output), overwrite=True)
    found = run(spark, job)
    wanted = expected(values, 6 * HOUR, 2 * HOUR)
    assert_same(read(spark, output), 6 * HOUR, wanted)
    assert (found.messages, found.values, found.windows) == (len(messages), len(values), len(wanted))
    # Again, printed, and only some topics.
    found = run(spark, Aggregate(store.given(topics="b/#"), 86_400, field="sensor.temp", time_field="at", rows=4))
    only = [((key[1],), time, value) for key, time, value in values if key[1] == "b"]
    assert found.values == len(only)
    heading, *lines = found.text().splitlines()
    assert heading.split() == ["topic", "start", "end", "count", "min", "max", "mean"]
    assert re.fullmatch(r"b\S* +2010-01-01 00:00:00  2010-01-02 00:00:00 +\d+ +\S+ +\S+ +\S+", lines[0])
    assert lines[4] == f"... and {found.windows - 4} more; --rows N shows more, --output all"
    # --overwrite replaces, without it nothing is touched.
    with pytest.raises(Exception, match="PATH_ALREADY_EXISTS"):
        run(spark, Aggregate(store.given(), HOUR, field="sensor.temp", output=str(output)))


def test_a_field_that_no_payload_has_is_an_error(spark: "SparkSession", store: Store) -> None:
    store.put_payloads([("a", b'{"temp": 5}'), ("a", b"x" * 100)])
    text = "all 2 messages have no number in humidity, such as sequence 1, topic 'a': '{\"temp\": 5}'; change --field"
    with pytest.raises(JobError, match=re.escape(text)):
        run(spark, Aggregate(store.given(), HOUR, field="humidity"))
    with pytest.raises(JobError, match=r"no number as payload, .*; name the number in JSON payloads by --field"):
        run(spark, Aggregate(store.given(), HOUR))
    found = run(spark, Aggregate(store.given(topics="none"), HOUR))
    assert found.text().startswith("topic  start  end  count  min  max  mean\n0 figures from 0 values (")


def test_runs_with_a_checkpoint_write_each_window_once(spark: "SparkSession", store: Store, tmp_path: Path) -> None:
    begin = datetime(2026, 3, 1, tzinfo=UTC)
    job = Aggregate(
        store.given(maxMessagesPerTrigger=100),
        HOUR,
        field="sensor.temp",
        time_field="at",
        watermark=600,
        output=str(tmp_path / "figures"),
        checkpoint=str(tmp_path / "checkpoint"),
    )
    values: list[tuple[Key, float, float]] = []

    def put(minutes: range, counted: bool = True) -> None:
        messages = []
        for minute in minutes:
            at, value = begin + timedelta(minutes=minute), minute / 8
            messages.append((f"t.{minute % 2}", reading(at, value)))
            if counted:
                values.append(((f"t/{minute % 2}",), at.timestamp(), value))
        store.put_payloads(messages)

    put(range(100))
    found = run(spark, job)
    assert (found.messages, found.values, found.windows, found.open, found.late) == (100, 100, 2, 2, 0)
    assert "2 figures of windows that are not over yet" in found.text()
    # Late, but the window is open; one that is over, which comes too late; and what closes windows.
    put(range(95, 75, -1))
    put(range(3), counted=False)
    put(range(120, 200))
    found = run(spark, job)
    assert (found.messages, found.windows, found.late) == (103, 4, 2)
    assert "2 or more values came after their window; --watermark waits longer" in found.text()
    over = [one for one in values if one[1] < (begin + timedelta(hours=3)).timestamp()]
    assert_same(read(spark, tmp_path / "figures"), HOUR, expected(over, HOUR, HOUR))
    found = run(spark, job)
    assert (found.messages, found.windows) == (0, 0)
    for flag, change in (("--window", {"window": 60}), ("--field", {"field": "x"}), ("--level", {"levels": (1,)})):
        with pytest.raises(JobError, match=f"--checkpoint .* was begun with {flag} "):
            run(spark, Aggregate(**{**vars(job), **change}))


@pytest.mark.parametrize(
    ("field", "path"),
    [
        ("temp", "$['temp']"),
        ("sensor.temp", "$['sensor']['temp']"),
        ("a b.c-d[0][2].e", "$['a b']['c-d'][0][2]['e']"),
        ("$.x.y", "$.x.y"),
    ],
)
def test_paths_of_fields(field: str, path: str) -> None:
    assert json_path(field) == path


@pytest.mark.parametrize("field", ["", "a..b", ".a", "a[x]", "a'b", "a[*]"])
def test_what_is_no_path_is_an_error(field: str) -> None:
    with pytest.raises(JobError, match="--field or --time-field"):
        json_path(field)


def test_a_table_in_a_terminal() -> None:
    assert aligned((("topic", "mean"), ("a", "1.5"), ("long/one", "12"))) == [
        "topic     mean",
        "a          1.5",
        "long/one    12",
    ]
    assert aligned(()) == []
    assert [shown(value) for value in (None, 1.23456789, 5, datetime(2026, 1, 2), "a\x1b[2J/b")] == [
        "-",
        "1.23457",
        "5",
        "2026-01-02 00:00:00",
        "a\ufffd[2J/b",
    ]
