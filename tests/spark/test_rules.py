# SPDX-License-Identifier: Apache-2.0
"""The job `rule`: the example file over real weather, with a change of the file and a restart."""

import contextlib
import io
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pytest
from pyspark.sql import SparkSession

from examples.weather import Reading, readings
from pyspark_mqtt_nats.jobs import rule
from pyspark_mqtt_nats.jobs.progress import Progress
from pyspark_mqtt_nats.jobs.rule import Ran, RuleJob
from pyspark_mqtt_nats.rules.query_plan import Reads
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
from tests.harness.waiting import eventually
from tests.spark.sinking import Sinker

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2400)]

PATIENCE = 500.0  # seconds; Spark gives each of its workers ten to come up, and a busy machine needs several attempts
EXAMPLE = ROOT / "examples" / "rules"
SAN_FRANCISCO = "weather/san-francisco/temperature"


class Output(io.StringIO):
    """What the job says on stderr."""


class Job:
    """The job in a thread, as the command line runs it."""

    def __init__(self, spark: SparkSession, file: Path, url: str, **source: str) -> None:
        self.output = Output()
        self.ran: Ran | None = None
        self.failure: Exception | None = None
        self._progress = Progress("rule", self.output)
        source = {"servers": url, "startingSequence": "1", **source}
        self._job = RuleJob(file, Reads(source), 0)
        self._thread = threading.Thread(target=self._run, args=(spark,))
        self._thread.start()

    def _run(self, spark: SparkSession) -> None:
        try:
            self.ran = rule.run(spark, self._job, self._progress)
        except Exception as error:
            self.failure = error

    def stop(self) -> None:
        """Stop the job as SIGTERM does."""
        self._progress.stopping = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if self.failure is not None:
            raise self.failure

    def said(self, text: str) -> None:
        """Wait until the job has said this."""
        self.until(lambda: text in self.output.getvalue())

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition while the job runs."""
        with contextlib.suppress(AssertionError):
            eventually(lambda: condition() or not self._thread.is_alive(), PATIENCE)
        assert self.failure is None, self.failure
        assert condition(), self.output.getvalue() + self.metrics()

    def metrics(self, path: str = "/metrics") -> str:
        """Ask the port of the metrics."""
        found = re.search(r"metrics at (http://127\.0\.0\.1:\d+)", self.output.getvalue())
        assert found is not None
        with urllib.request.urlopen(found[1] + path, timeout=10) as answer:
            return str(answer.read().decode())

    def failures(self) -> list[str]:
        """Return what was said of failures, other than of workers that had too little of the CPU to come up in time."""
        said = [line for line in self.output.getvalue().splitlines() if "the rule is started again" in line]
        return [line for line in said if "Python worker failed to connect back" not in line]

    def metric(self, name: str, rule_name: str) -> float:
        """Return a figure of a rule, -1 without one."""
        found = re.search(rf'^mqtt_nats_rule_{name}{{rule="{rule_name}".*}} (\S+)$', self.metrics(), re.MULTILINE)
        return float(found[1]) if found else -1


@contextlib.contextmanager
def running(spark: SparkSession, file: Path, url: str, **source: str) -> Iterator[Job]:
    job = Job(spark, file, url, **source)
    try:
        job.said("metrics at ")
        yield job
    finally:
        job.stop()


def publish(url: str, given: list[Reading]) -> None:
    rows = [{"topic": one.topic, "payload": orjson.dumps({"time": one.time, "value": one.value})} for one in given]
    assert Sinker(url, rows).write() == (len(rows), 0)


def stored(spark: SparkSession, url: str, topics: str) -> list[Any]:
    """Return what is stored on topics, in order."""
    frame = spark.read.format("mqtt_nats").options(servers=url, topics=topics).load()
    return frame.orderBy("sequence").collect()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The example's files, where a checkpoint can be beside them, with a device whose topic cannot be published on."""
    shutil.copytree(EXAMPLE, tmp_path / "rules")
    with (tmp_path / "rules" / "devices.csv").open("a", encoding="utf-8") as file:
        file.write("weather/seattle/temp_max,no#topic,C,12\n")
    return tmp_path / "rules"


def changes(given: list[Reading]) -> list[dict[str, Any]]:
    """What a hysteresis from 54 to 65 makes of readings."""
    state, found = "", []
    for one in given:
        now = "high" if one.value > 65 else "low" if one.value < 54 else state
        if now != state:
            state = now
            found.append({"topic": one.topic, "state": now, "time": f"{one.time[:-1]}.000Z", "value": one.value})
    return found


def means(given: list[Reading]) -> dict[str, tuple[float, int]]:
    """The mean and the number of readings of each day."""
    days: dict[str, list[float]] = {}
    for one in given:
        days.setdefault(one.time[:10], []).append(one.value)
    return {day: (round(sum(found) / len(found), 2), len(found)) for day, found in days.items()}


def test_the_example_publishes_what_it_says(
    spark: SparkSession, nats_server: NatsServer, gateway: Gateway, directory: Path
) -> None:
    url, file = nats_server.url, directory / "weather.toml"
    weather = list(islice(readings(), 24 * 140, 24 * 150))
    tropical = Reading("weather/seattle/temp_max", "2012-07-01T12:00:00Z", 30.0)
    unreadable = Reading("weather/seattle/wind", "2012-07-01T12:00:00Z", "strong")  # type: ignore[arg-type]
    publish(url, [*weather, tropical, unreadable])
    with running(spark, file, url) as job:
        above = [one for one in weather if one.value > 66]
        job.until(lambda: job.metric("rows_published_total", "above-limit") == len(above) + 1)
        job.until(lambda: job.metric("rows_published_total", "warm") == len(changes(weather)))
        job.until(lambda: job.metric("rows_published_total", "daily-mean") == len(means(weather)))
        job.until(lambda: job.metric("rows_published_total", "silent") == 3)
        assert job.metric("rows_read_total", "warm") == len(weather)
        assert job.metric("up", "warm") == 1
        assert job.failures() == []
        with pytest.raises(urllib.error.HTTPError):
            job.metrics("/")
        hysteresis(spark, url, weather)
        daily_means(spark, url, weather)
        joined(spark, url, above)
        dead_letters(spark, url)
        assert silent(spark, url)[0] is True
        reloads(job, file)
        publish(url, [weather[-1]._replace(value=70.5)])
        job.until(lambda: job.metric("rows_published_total", "above-limit") == len(above) + 2)
        job.until(lambda: job.metric("rows_published_total", "silent") >= 4)
        assert silent(spark, url)[:2] == [True, False]
        assert orjson.loads(stored(spark, url, "too-much/roof")[0].payload)["value"] == 70.5
    assert job.ran is not None
    assert job.ran.text().endswith("by 4 rules")
    before = len(stored(spark, url, "#"))
    publish(url, [weather[-1]._replace(value=71.5)])
    with running(spark, file, url) as job:
        job.until(lambda: job.metric("rows_published_total", "above-limit") == 1)
        job.until(lambda: job.metric("rows_published_total", "silent") >= 1)
    found = stored(spark, url, "too-much/roof")
    assert [orjson.loads(one.payload)["value"] for one in found] == [70.5, 71.5]
    new = stored(spark, url, "#")[before:]
    assert {one.topic.partition("/")[0] for one in new} == {"weather", "too-much", "silent"}


def hysteresis(spark: SparkSession, url: str, weather: list[Reading]) -> None:
    found = stored(spark, url, "state/#")
    assert [orjson.loads(one.payload) for one in found] == changes(weather)
    assert {(one.topic, one.qos, one.retain) for one in found} == {(f"state/{SAN_FRANCISCO}", 1, True)}


def daily_means(spark: SparkSession, url: str, weather: list[Reading]) -> None:
    found = stored(spark, url, "daily/#")
    payloads = [orjson.loads(one.payload) for one in found]
    assert {one["day"]: (one["mean"], one["readings"]) for one in payloads} == means(weather)
    assert [[(pair.key, pair.value) for pair in one.user_properties] for one in found] == [
        [("day", one["day"])] for one in payloads
    ]


def joined(spark: SparkSession, url: str, above: list[Reading]) -> None:
    found = stored(spark, url, "above/#")
    assert [(one.topic, one.content_type) for one in found] == [("above/roof", "text/plain")] * len(above)
    texts = [one.payload.decode() for one in found]
    assert texts == [f"{one.value} F at {one.time[:-1].replace('T', ' ')}" for one in above]


def dead_letters(spark: SparkSession, url: str) -> None:
    (found,) = stored(spark, url, "rules/failed")
    letter = orjson.loads(found.payload)
    assert letter["column"] == "topic"
    assert letter["topic"] == "above/no#topic"
    assert "has a wildcard" in letter["error"]
    assert letter["payload"] == "30.0 C at 2012-07-01 12:00:00"


def silent(spark: SparkSession, url: str) -> list[bool]:
    """Return what was said of the device, which is silent again after ten seconds."""
    return [orjson.loads(one.payload)["silent"] for one in stored(spark, url, f"silent/{SAN_FRANCISCO}")]


def reloads(job: Job, file: Path) -> None:
    """A file with an error changes nothing; a change of one rule starts that one again, and no other."""
    good = file.read_text(encoding="utf-8")
    for wrong, text in (
        (good.replace("retain = true", "retained = true"), "rules[warm].retained: there is no such key"),
        (good.replace("m.value > d.most", "m.valu > d.most"), "rules[above-limit].query: A column"),
        (good.replace("WATERMARK time DELAY OF INTERVAL 1 HOUR", ""), "rules[daily-mean].query: "),
        (good.replace("devices.csv", "device.csv"), "tables.devices.path: "),
        (good.replace('"above/{place}"', '"above/{plac}"'), "rules[above-limit].topic: the query has no column plac"),
    ):
        file.write_text(wrong, encoding="utf-8")
        job.said(text)
        (line,) = [one for one in job.output.getvalue().splitlines() if text in one]
        assert line.endswith("; the rules in force stay")
    changed = good.replace("above/{place}", "too-much/{place}").replace('payload = "{value} {unit} at {time}"\n', "")
    file.write_text(changed, encoding="utf-8")
    job.said("weather.toml: started above-limit, stopped none")
