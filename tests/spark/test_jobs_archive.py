# SPDX-License-Identifier: Apache-2.0
"""What clients publish, through an archive and a report, and back to clients."""

import io
import json
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_mqtt_nats.jobs import JobError, archive, replay, report, storage
from pyspark_mqtt_nats.jobs.archive import Archive, Archived, add_roots, arranged, directory, first_levels
from pyspark_mqtt_nats.jobs.figures import Figures, Gap, Ranked
from pyspark_mqtt_nats.jobs.progress import Progress
from pyspark_mqtt_nats.jobs.replay import Replay
from pyspark_mqtt_nats.jobs.report import Report
from pyspark_mqtt_nats.jobs.storage import Place
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
from tests.harness.raw5 import CONTENT_TYPE, PUBACK, Raw5, prop, publish
from tests.spark.storing import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(480)

TOPICS = ("home/kitchen/temp", "home/hall", "$devices/1", "/hall", "a b/c", "bürö/x", "quiet/1")


def quiet() -> Progress:
    return Progress("job", io.StringIO())


def clients_publish(gateway: Gateway, numbers: range) -> list[tuple[str, bytes]]:
    """Numbers on TOPICS in turn, the last one rarely; what was published, in order."""
    sent = []
    with Raw5.open(gateway.port, "sensor") as client:
        for number in numbers:
            topic = TOPICS[-1] if number % 20 == 0 else TOPICS[number % 6]
            client.send(publish(topic, b"%d" % number, prop(CONTENT_TYPE, "text/plain"), qos=1))
            client.answer(PUBACK, 1)
            sent.append((topic, b"%d" % number))
    return sent


def rows(spark: "SparkSession", path: Path) -> list[tuple[str, bytes]]:
    found = spark.read.parquet(str(path)).orderBy("sequence").select("sequence", "topic", "payload").collect()
    assert len({row[0] for row in found}) == len(found)
    return [(row[1], bytes(row[2])) for row in found]


def roots(path: Path) -> set[str]:
    return {one.name.removeprefix("root=") for one in path.glob("date=*/root=*")}


def test_there_and_back_again(spark: "SparkSession", nats_server: NatsServer, gateway: Gateway, tmp_path: Path) -> None:
    sent = clients_publish(gateway, range(120))
    source = {"servers": nats_server.url, "maxMessagesPerTrigger": "50"}
    output = tmp_path / "archive"
    job = Archive(str(output), source, roots=5)
    first = archive.run(spark, job, quiet())
    assert (first.messages, first.first, first.last) == (120, 1, 120)
    assert first.batches >= 3
    assert rows(spark, output) == sent
    # The quietest first level is one too many; names are good for directories.
    assert roots(output) == {"home", "_devices", "_empty", "a_b", "bürö", "_other"}
    assert "120 messages archived in" in first.text()
    assert "sequences 1 to 120" in first.text()

    # The next run has what is new, and nothing else; there is room for one more directory.
    sent += clients_publish(gateway, range(120, 140))
    again = Archive(str(output), source, roots=6, files=2)
    second = archive.run(spark, again, quiet())
    assert (second.messages, second.first, second.last) == (20, 121, 140)
    assert rows(spark, output) == sent
    assert roots(output) == {"home", "_devices", "_empty", "a_b", "bürö", "_other", "quiet"}
    third = archive.run(spark, again, quiet())
    assert (third.messages, third.first, third.last) == (0, 0, 0)
    assert third.text().startswith(f"nothing new to archive in {output} (")

    belongs(spark, job, tmp_path)
    reports(spark, job, tmp_path, sent)
    replays(spark, gateway, job, sent)


@pytest.mark.parametrize(("levels", "files", "expected"), [(4, None, 3), (5, None, 1), (0, None, 3), (1, 1, 1)])
def test_tasks_that_write_a_directory(
    spark: "SparkSession", tmp_path: Path, levels: int, files: int | None, expected: int
) -> None:
    """Of few directories each task that reads writes its own files; else rows are brought together."""
    read = spark.range(0, 300, 1, 3).selectExpr("id AS sequence", "timestamp_seconds(0) AS timestamp", "'a/b' AS topic")
    roots = {one: one for one in "abcde"[:levels]}
    arranged(read, roots, files).write.partitionBy("date", "root").parquet(str(tmp_path / "out"))
    (where,) = (tmp_path / "out").glob("date=*/root=*")
    assert len(list(where.glob("*.parquet"))) == expected
    assert spark.read.parquet(str(tmp_path / "out")).count() == 300


def test_a_replay_holds_little_of_large_messages(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's JVM has a gigabyte, and messages may have a megabyte each."""
    large = spark.range(300).selectExpr(
        "300 - id AS sequence",
        "timestamp_seconds(id) AS timestamp",
        "'a' AS topic",
        "CAST(repeat('x', 10000) AS BINARY) AS payload",
    )
    large.write.parquet(str(tmp_path / "large"))
    messages = replay.selected(spark.read.parquet(str(tmp_path / "large")), Replay("", {}))
    assert replay.measured(messages) == (300, 3_000_000)
    assert replay.measured(messages.limit(0)) == (0, 0)
    monkeypatch.setattr(replay, "_PART_BYTES", 250_000)
    batches = list(replay.in_order(messages, 300, 3_000_000))
    assert [number for batch in batches for number in batch.column("sequence").to_pylist()] == list(range(1, 301))
    assert max(batch.num_rows for batch in batches) <= 60
    monkeypatch.setattr(replay, "_PART", 30)
    assert len(list(replay.in_order(messages, 300, 0))) == 10
    assert not list(replay.in_order(messages.limit(0), 0, 0))


@pytest.mark.parametrize("format", ["parquet", "delta", "iceberg"])
def test_a_column_of_another_type_is_refused_before_anything_is_written(
    spark: "SparkSession", nats_server: NatsServer, tmp_path: Path, format: str
) -> None:
    """The archive stays readable, and goes on with the former type or with new columns."""
    output = tmp_path / "archive"

    def run(columns: str) -> Archived:
        decoders = json.dumps({"#": {"format": "json", "columns": columns}})
        return archive.run(spark, Archive(str(output), store.given(decoders=decoders), format=format), quiet())

    def files() -> set[Path]:
        return {one for one in output.rglob("*") if "_checkpoint" not in one.parts}

    with Store(nats_server.url) as store:
        store.put_payloads([("007.a", b'{"v": 1}'), ("1e3.a", b'{"v": 2}')])
        assert run("v BIGINT").messages == 2
        before = files()
        store.put_payloads([("007.a", b'{"v": 3.5, "w": "x"}')])
        text = (
            f"^--output {output}: column 'v' is bigint there, and would be double; give it .* another name, or another"
        )
        with pytest.raises(JobError, match=text):
            run("v DOUBLE")
        assert files() == before
        assert run("v BIGINT, w STRING").messages == 1
        found = report.run(spark, Report({}, str(output), format), quiet()).figures
        assert (found.messages, found.missing) == (3, 0)


@pytest.mark.parametrize(
    ("format", "name"),
    [("parquet", "date"), ("parquet", "ROOT"), ("delta", "root"), ("iceberg", "Date"), ("iceberg", "_root")],
)
def test_a_column_with_a_name_of_the_archive_is_refused(tmp_path: Path, format: str, name: str) -> None:
    output = tmp_path / "archive"
    decoders = json.dumps({"#": f"{name} STRING"})
    source = {"servers": "nats://127.0.0.1:1", "connectTimeout": "1", "decoders": decoders}
    spark: Any = None  # nothing is asked of it
    with pytest.raises(JobError, match=f"^decoders: '{name}' is a column that the archive adds by itself"):
        archive.run(spark, Archive(str(output), source, format=format), quiet())
    assert not output.exists()


def belongs(spark: "SparkSession", job: Archive, tmp_path: Path) -> None:
    """Messages would be lost silently where output and checkpoint are not those of one archive."""
    output = Path(job.output)
    moved = tmp_path / "moved"
    for changes, text in (
        ({"checkpoint": str(tmp_path / "new")}, "do not belong together: give those of one run"),
        ({"output": str(moved), "checkpoint": str(output / "_checkpoint")}, "do not belong together"),
        ({"format": "orc"}, "was begun with --format parquet, not orc; give that, or another --checkpoint"),
    ):
        with pytest.raises(JobError, match=text):
            archive.run(spark, Archive(**{**vars(job), **changes}), quiet())
    # Both together can be anywhere.
    shutil.copytree(output, moved)
    assert archive.run(spark, Archive(**{**vars(job), "output": str(moved)}), quiet()).messages == 0
    (moved / "_checkpoint" / "mqtt-nats.json").write_text("[]", encoding="utf-8")
    with pytest.raises(JobError, match=r"mqtt-nats.json there belongs to another program"):
        archive.run(spark, Archive(**{**vars(job), "output": str(moved)}), quiet())
    with pytest.raises(JobError, match=r"^--checkpoint nowhere://x: "):
        archive.run(spark, Archive(**{**vars(job), "checkpoint": "nowhere://x"}), quiet())


def test_an_archive_with_one_batch_needs_the_checkpoint_that_has_planned_it(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """Spark leaves out the first batch of a new checkpoint, since the archive has a batch of its number."""
    output, checkpoint = tmp_path / "out", tmp_path / "checkpoint"

    def compare() -> None:
        storage.Checkpoint(spark, str(checkpoint), str(output), {"job": "archive", "--format": "parquet"})

    def number(directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / "0").touch()

    compare()
    number(output / "_spark_metadata")
    with pytest.raises(JobError, match="do not belong together"):
        compare()
    number(checkpoint / "offsets")  # it was killed before Spark has noted the batch
    compare()
    number(checkpoint / "commits")
    compare()


def reports(spark: "SparkSession", job: Archive, tmp_path: Path, sent: list[tuple[str, bytes]]) -> None:
    """The store and the archive have the same to tell."""
    source = {"servers": job.source["servers"]}
    page = tmp_path / "report.html"
    stored = report.run(spark, Report(source, output=page, most=3), quiet()).figures
    archived = report.run(spark, Report({}, job.output, most=3), quiet()).figures
    for figures in (stored, archived):
        assert (figures.messages, figures.topics, figures.publishers) == (140, len(TOPICS), 1)
        assert (figures.bytes, figures.median) == (sum(len(payload) for _, payload in sent), 2)
        assert figures.busiest[0].messages == max(sum(topic == one for topic, _ in sent) for one in TOPICS)
        assert figures.senders == [Ranked("sensor", 140, figures.bytes)]
        assert figures.qos == [Ranked("1", 140, figures.bytes)]
        assert (figures.whole, figures.missing, figures.gaps) == (True, 0, [])
        assert sum(bar.messages for bar in figures.bars) == 140
    assert stored.busiest == archived.busiest
    assert all(one.name and one.name in page.read_text(encoding="utf-8") for one in stored.busiest)
    some = report.run(spark, Report({**source, "topics": "home/#"}), quiet())
    assert not some.figures.whole
    assert some.figures.topics == 2
    assert "gaps unknown" in some.text()
    spark.range(1).write.parquet(str(tmp_path / "other"))
    with pytest.raises(JobError, match="no column 'sequence'"):
        report.run(spark, Report({}, str(tmp_path / "other")), quiet())
    with pytest.raises(JobError, match=r"^--output .*: Is a directory"):
        report.run(spark, Report(source, output=tmp_path), quiet())


def replays(spark: "SparkSession", gateway: Gateway, job: Archive, sent: list[tuple[str, bytes]]) -> None:
    """Subscribers get what was recorded, in its order."""
    sink = {"servers": job.source["servers"]}
    with Raw5.open(gateway.port) as client:
        client.subscribed(("again/#", 1))
        found = replay.run(spark, Replay(job.output, sink, speed=0, prefix="again/"), quiet())
        assert (found.messages, found.total) == (140, 140)
        received = [client.receive_message() for _ in sent]
        assert [(one.topic, one.payload) for one in received] == [
            (f"again/{topic}", payload) for topic, payload in sent
        ]
        assert {one.get(CONTENT_TYPE) for one in received} == {"text/plain"}
        some = Replay(job.output, sink, speed=0, prefix="again/", filters=("home/#", "+/1"), start=11, end=60)
        found = replay.run(spark, some, quiet())
        only = [(topic, payload) for topic, payload in sent[10:60] if topic.startswith("home/") or topic == "quiet/1"]
        assert found.messages == len(only)
        assert [client.receive_message().payload for _ in only] == [payload for _, payload in only]
        client.quiet()
    stored = spark.read.parquet(job.output)
    middle = stored.selectExpr("unix_micros(timestamp) * 1000 at").orderBy("at").collect()[70].at
    before = replay.selected(stored, Replay("", sink, until=middle)).count()
    after = replay.selected(stored, Replay("", sink, since=middle, retain=False))
    assert before > 60
    assert before + after.count() == 140
    assert "retain" not in after.columns
    with pytest.raises(JobError, match="payloads are text"):
        replay.selected(stored.withColumn("payload", stored.payload.cast("string")), Replay("x", sink))
    with pytest.raises(JobError, match="--input x: column 'qos' is STRING; it must be INT"):
        replay.selected(stored.withColumn("qos", stored.qos.cast("string")), Replay("x", sink))


@pytest.mark.parametrize("kind", ["file", "store", "viewfs"])
def test_a_small_file_is_written_again(
    spark: "SparkSession", tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: Any = spark._jsc
    context.hadoopConfiguration().set(f"fs.viewfs.mounttable.{kind}.link./data", tmp_path.as_uri())
    if kind == "store":
        monkeypatch.setattr(storage, "_OBJECT_STORES", ("viewfs",))
    place = Place(spark, str(tmp_path) if kind == "file" else f"viewfs://{kind}/data", "--checkpoint")
    for content in (b"one", b"two"):
        place.write("below/state.json", content)
        assert place.read("below/state.json") == content
    assert place.names("below") == ["state.json"]


def test_a_small_file_is_there_while_it_is_written_again(spark: "SparkSession", tmp_path: Path) -> None:
    """Whatever ends a run, its next one finds the former content or the new one, and no checksum of another."""
    place = Place(spark, str(tmp_path), "--checkpoint")
    file = tmp_path / "state.json"
    contents = [b"%d" % number * 1000 for number in range(10)]
    (tmp_path / ".state.json.crc").write_bytes(b"of a former version")
    place.write("state.json", contents[0])
    ended = threading.Event()

    def look() -> set[bytes]:
        found = set()
        while not ended.is_set():
            found.add(file.read_bytes())
        return found

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            for content in contents * 10:
                place.write("state.json", content)
                assert place.read("state.json") == content
        finally:
            ended.set()
        assert looking.result() <= set(contents)
    assert [one.name for one in tmp_path.iterdir()] == ["state.json"]


def test_gaps_are_those_of_the_sequences(spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a plain scan, with blocks so small that gaps are in them, between them and over them."""
    monkeypatch.setattr(report, "_BLOCK", 50)
    missing = {*range(13, 16), 40, *range(95, 105), *range(140, 320), *range(350, 400), 499}
    there = [number for number in range(7, 501) if number not in missing]
    columns = ["sequence", "IF(sequence % 7 = 0, NULL, 'lamp') publisher", "IF(sequence % 2 = 0, 'a', 'b') topic"]
    columns += ["CAST(repeat('x', sequence % 10) AS BINARY) payload", "CAST(sequence % 3 AS INT) qos"]
    columns += ["sequence % 5 = 0 retain", "timestamp_seconds(1000000000 + sequence * 10) timestamp"]
    messages = spark.createDataFrame([(number,) for number in there], "sequence BIGINT").selectExpr(*columns)
    found = report.figures(spark, messages, quiet(), name="x", whole=True, most=4)
    gaps = [Gap(13, 3), Gap(40, 1), Gap(95, 10), Gap(140, 180), Gap(350, 50), Gap(499, 1)]
    assert found.gaps == [gaps[0], *gaps[2:5]]
    assert (found.gap_count, found.missing) == (len(gaps), len(missing))
    assert (found.first_sequence, found.last_sequence, found.messages) == (7, 500, len(there))
    assert len(found.coverage) == 200
    length = 500 - 7 + 1
    for piece, part in enumerate(found.coverage):
        inside = range(7 + length * piece // 200, 7 + length * (piece + 1) // 200)
        assert part == pytest.approx(sum(number not in missing for number in inside) / len(inside)), piece
    assert found.retained == sum(number % 5 == 0 for number in there)
    assert (found.smallest, found.largest) == (0, 9)
    assert {one.name: one.messages for one in found.senders} == {
        "lamp": sum(number % 7 > 0 for number in there),
        None: sum(number % 7 == 0 for number in there),
    }
    assert {one.name: one.bytes for one in found.qos} == {
        str(qos): sum(number % 10 for number in there if number % 3 == qos) for qos in range(3)
    }
    counts = {int(bar.start.timestamp()): bar.messages for bar in found.bars}
    assert found.width == 300
    wanted: dict[int, int] = {}
    for number in there:
        start = (1_000_000_000 + number * 10) // 300 * 300
        wanted[start] = wanted.get(start, 0) + 1
    assert counts == wanted


def test_the_first_read_of_the_page(
    spark: "SparkSession", nats_server: NatsServer, gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    with Raw5.open(gateway.port, "lamp") as client:
        client.deliver("first/lamp", b"on")
    page = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    assert '"home/#"' in code  # of which other tests have published many
    code = code.replace("home/#", "first/#").replace("nats://127.0.0.1:4222", nats_server.url)
    exec(compile(code, "docs/spark.md", "exec"), {})
    assert re.search(r"\|first/lamp *\|20\d\d-[^|]*\| *1 *\| *lamp *\| *on *\|", capsys.readouterr().out)


def test_nothing_to_report(spark: "SparkSession", nats_server: NatsServer) -> None:
    with Store(nats_server.url) as store:
        found = report.run(spark, Report(store.given()), quiet())
        assert found.text() == f"stream {store.stream}: no messages"


@given(st.text(max_size=100))
def test_a_directory_has_a_name_that_every_file_system_takes(level: str) -> None:
    name = directory(level)
    assert 0 < len(name) <= 48
    assert len(f"root={name}".encode(errors="replace")) <= 255
    assert not set(name) & set("/\\:*?\"<>|=%# \t\n\0{}[]'")


@given(st.lists(st.dictionaries(st.text("ab$ /", max_size=3), st.integers(1, 9)), max_size=5), st.integers(0, 5))
def test_who_has_a_directory_keeps_it_and_there_are_never_too_many(runs: list[dict[str, int]], most: int) -> None:
    roots: dict[str, str] = {}
    for levels in runs:
        before = dict(roots)
        add_roots(roots, levels, most)
        assert len(roots) <= most
        assert before.items() <= roots.items()
        outside = [levels[level] for level in levels if level not in roots]
        new = [levels[level] for level in roots if level not in before]
        assert not outside or len(roots) == most
        assert max(outside, default=0) <= min(new, default=9)


def test_first_levels_are_those_of_topics(nats_server: NatsServer) -> None:
    with Store(nats_server.url) as store:
        store.put(range(3), lambda number: "a.b")
        store.put(range(2), lambda number: "/.x")
        store.put(range(1), lambda number: "v1//2/_y.x")
        assert first_levels(store.options()) == {"a": 3, "": 2, "v1.2 y": 1}
        assert first_levels(store.options(topics="a/#,nothing/+")) == {"a": 3}
        many: dict[str, Any] = {"topics": "+/x"}
        assert first_levels(store.options(**many)) == {"": 2, "v1.2 y": 1}


def test_summaries() -> None:
    job = Archive("/a", {})
    lines = Archived(job, 5, 1, 2.0, 11, 20).text().splitlines()
    assert lines == [
        "5 messages archived in 2.0 s, 2/s, in 1 batch",
        "  sequences 11 to 20",
        "  5 sequences between them: other topics, expired or deleted",
        "  in /a: parquet, by date and root",
    ]
    figures = Figures(source="x", made=None)  # type: ignore[arg-type]
    assert report.Reported(Report({}, output=Path("p.html")), figures, 1.0).text().endswith("p.html has the charts")
