# SPDX-License-Identifier: Apache-2.0
"""Archives as tables of Delta Lake and Iceberg: what readers of others find, once, whatever ends a run."""

import io
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyarrow import parquet
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyspark.sql import DataFrame, SparkSession

from pyspark_mqtt_nats.jobs import JobError, archive, compact
from pyspark_mqtt_nats.jobs.archive import Archive
from pyspark_mqtt_nats.jobs.compact import Compact
from pyspark_mqtt_nats.jobs.failures import explain
from pyspark_mqtt_nats.jobs.progress import Progress
from pyspark_mqtt_nats.jobs.storage import Place
from pyspark_mqtt_nats.lakehouse import batches, delta, iceberg, require
from pyspark_mqtt_nats.lakehouse.batches import read_files
from pyspark_mqtt_nats.lakehouse.tables import DataFile, Target, open_table
from tests.harness.nats import NatsServer
from tests.spark.storing import Store

pytestmark = pytest.mark.timeout(480)

FORMATS = ("delta", "iceberg")
AFTER = date(2999, 1, 1)
"""A day after that of all messages."""


@pytest.fixture
def store(nats_server: NatsServer) -> Iterator[Store]:
    with Store(nats_server.url) as found:
        found.put(range(300), lambda number: f"{('a', 'bürö', 'c d')[number % 3].replace(' ', '_')}.{number % 7}")
        yield found


def quiet() -> Progress:
    return Progress("archive", io.StringIO())


def job(store: Store, output: Path, format: str, **options: str) -> Archive:
    source = store.given(maxMessagesPerTrigger=100, **options)
    return Archive(str(output), source, format=format, roots=2)


def table(output: Path, format: str) -> pa.Table:
    """The table as readers of others see it."""
    if format == "delta":
        return DeltaTable(str(output)).to_pyarrow_table()
    catalog = SqlCatalog("mqtt-nats", uri=f"sqlite:///{output}/catalog.db", warehouse=str(output))
    return catalog.load_table("mqtt.messages").scan().to_arrow()


def numbers(output: Path, format: str) -> list[int]:
    return sorted(int(one.as_py()) for one in table(output, format)["payload"])


def batch(spark: SparkSession, first: int, more: str = "") -> DataFrame:
    """Hundred rows as those of messages, made without a worker of Python."""
    return spark.range(first, first + 100, 1, 2).selectExpr(
        "id AS sequence",
        "timestamp_seconds(1790000000 + id * 2000) AS timestamp",
        "concat(element_at(array('a', 'bürö', 'c d'), CAST(id % 3 + 1 AS INT)), '/', id) AS topic",
        "CAST(CAST(id AS STRING) AS BINARY) AS payload",
        "array(named_struct('key', 'k', 'value', CAST(id AS STRING))) AS user_properties",
        *filter(None, [more]),
    )


@pytest.mark.parametrize("format", FORMATS)
def test_a_batch_is_committed_once(spark: SparkSession, tmp_path: Path, format: str) -> None:
    output = tmp_path / "lake"
    place = Place(spark, str(output), "--output")
    arrange = partial(archive.arranged, roots={"a": "a", "bürö": "bürö"}, files=1)
    batches.prepare(spark)

    def write(frame: DataFrame, number: int) -> None:
        opened = open_table(Target(format, str(output)), "writer", batches.arrow_schema(arrange(frame)))
        batches.Batches(opened, place, "writer", arrange, keep=format == "iceberg").write(frame, number)
        assert opened.last_batch() == number

    for number in (0, 1, 1):
        write(batch(spark, number * 100), number)
    write(batch(spark, 0).limit(0), 2)
    write(batch(spark, 200, "CAST(id AS DOUBLE) AS number"), 3)
    assert numbers(output, format) == list(range(300))
    rows = sorted(table(output, format).to_pylist(), key=lambda row: int(row["sequence"]))
    assert Counter(row["root"] for row in rows) == {"a": 100, "bürö": 100, "_other": 100}
    assert {str(row["date"]) for row in rows} == {str(row["timestamp"].date()) for row in rows}
    assert [row["number"] for row in rows[199:202]] == [None, 200.0, 201.0]
    assert rows[7]["user_properties"] == [{"key": "k", "value": "7"}]
    assert open_table(Target(format, str(output)), "another").last_batch() == -1

    days = sorted({str(row["date"]) for row in rows})
    before = Counter(read_files(spark, str(output), format).inputFiles())
    assert compact.run(spark, Compact(str(output), format, before=date.fromisoformat(days[0])), quiet()).gone == 0
    done = compact.run(spark, Compact(str(output), format, before=date.fromisoformat(days[-1])), quiet())
    assert done.gone > done.come > 0
    assert f"{done.gone} files in {output} became {done.come} files" in done.text()
    after = Counter(read_files(spark, str(output), format).inputFiles())
    assert sum(after.values()) == sum(before.values()) - done.gone + done.come
    assert numbers(output, format) == list(range(300))
    write(batch(spark, 300), 4)
    assert numbers(output, format) == list(range(400))
    again = compact.run(spark, Compact(str(output), format, before=date.fromisoformat(days[-2])), quiet())
    assert again.text().startswith("nothing to compact in ")


class LocalPlace:
    """A directory of this machine, without Spark."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rename(self, name: str, other: str) -> None:
        (self.path / name).rename(self.path / other)

    def files(self, name: str) -> list[tuple[str, int, int]]:
        return [(one.name, one.stat().st_size, 0) for one in (self.path / name).iterdir()]


def lake(output: Path, *batches: int) -> iceberg.Iceberg:
    """A table of Iceberg with one row for each batch."""
    rows = pa.table({"sequence": [0], "date": pa.array([0], pa.date32()), "root": ["a"]})
    made = iceberg.Iceberg(Target("iceberg", str(output)), "writer", rows.schema)
    (output / "data").mkdir(exist_ok=True)
    for number in batches:
        parquet.write_table(rows.set_column(0, "sequence", [[number]]), output / "data" / f"{number}.parquet")
        made.add([DataFile(f"data/{number}.parquet", 0, 0, {})], number)
    return made


def sequences(output: Path) -> list[int]:
    return sorted(table(output, "iceberg")["sequence"].to_pylist())


def test_a_commit_whose_answer_is_lost_is_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a catalog over HTTP whose client has asked again by itself. PyIceberg before 0.12 does not see that."""
    made = lake(tmp_path, 0)
    commit = SqlCatalog.commit_table
    lost: list[Any] = []

    def loses(self: SqlCatalog, *arguments: Any) -> Any:
        done = commit(self, *arguments)
        if not lost:
            lost.append(done)
            raise CommitFailedException("it has changed")
        return done

    monkeypatch.setattr(SqlCatalog, "commit_table", loses)
    parquet.write_table(pa.table({"sequence": [1], "date": pa.array([0], pa.date32()), "root": ["a"]}), tmp_path / "1")
    made.add([DataFile("1", 0, 0, {})], 1)
    assert lost
    assert sequences(tmp_path) == [0, 1]
    assert made.last_batch() == 1


def test_two_compactions_at_once_double_nothing(tmp_path: Path) -> None:
    lake(tmp_path, 0, 1)
    one, other = lake(tmp_path), lake(tmp_path)
    ((mine,), (theirs,)) = (each.groups("2026-01-01") for each in (one, other))
    assert len(mine.paths) == 2
    place: Any = LocalPlace(tmp_path)
    for name in ("_one", "_other"):
        (tmp_path / name).mkdir()
        rows = {"sequence": [0, 1], "date": pa.array([0, 0], pa.date32()), "root": ["a", "a"]}
        parquet.write_table(pa.table(rows), tmp_path / name / f"{name}.parquet")
    assert one.replace(mine, place, "_one") == 1
    with pytest.raises(JobError, match="another compaction has replaced files; run it again"):
        other.replace(theirs, place, "_other")
    assert sequences(tmp_path) == [0, 1]


def test_a_batch_that_is_committed_during_a_compaction(tmp_path: Path) -> None:
    """Neither ends the other."""
    made = lake(tmp_path, 0, 1)
    (group,) = made.groups("2026-01-01")
    lake(tmp_path, 2)
    (tmp_path / "_made").mkdir()
    rows = {"sequence": [0, 1], "date": pa.array([0, 0], pa.date32()), "root": ["a", "a"]}
    parquet.write_table(pa.table(rows), tmp_path / "_made" / "made.parquet")
    place: Any = LocalPlace(tmp_path)
    assert made.replace(group, place, "_made") == 1
    assert sequences(tmp_path) == [0, 1, 2]
    assert len(made.files()) == 2


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("format", FORMATS)
def test_each_message_is_in_the_table_once(
    spark: SparkSession, store: Store, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "lake"
    found = archive.run(spark, job(store, output, format), quiet())
    assert (found.messages, found.first, found.last) == (300, 1, 300)
    assert numbers(output, format) == list(range(300))
    rows = table(output, format).to_pylist()
    assert Counter(row["root"] for row in rows) == {"a": 100, "bürö": 100, "_other": 100}
    assert {str(row["date"]) for row in rows} == {str(row["timestamp"].date()) for row in rows}
    assert {row["timestamp"].utcoffset().total_seconds() for row in rows} == {0}

    # A run that ends after the commit of a batch and before Spark has noted it; and one before the commit.
    target = delta.DeltaLake if format == "delta" else iceberg.Iceberg
    add: Any = target.add

    def dies_late(self: Any, files: list[DataFile], batch: int) -> None:
        add(self, files, batch)
        raise KeyError("on purpose")

    def dies_early(self: Any, files: list[DataFile], batch: int) -> None:
        raise KeyError("on purpose")

    for begin, dies in ((300, dies_late), (400, dies_early)):
        store.put(range(begin, begin + 100))
        monkeypatch.setattr(target, "add", dies)
        with pytest.raises(Exception, match="on purpose"):
            archive.run(spark, job(store, output, format), quiet())
        monkeypatch.setattr(target, "add", add)
        archive.run(spark, job(store, output, format), quiet())
        assert numbers(output, format) == list(range(begin + 100))

    # Columns of decoders are added to the table.
    store.put(range(500, 510))
    archive.run(spark, job(store, output, format, decoders='{"#": "number"}'), quiet())
    rows = sorted(table(output, format).to_pylist(), key=lambda row: int(row["sequence"]))
    assert [row["number"] for row in rows[-12:]] == [None, None, *map(float, range(500, 510))]

    back = read_files(spark, str(output), format)
    assert back.count() == 510
    belongs(spark, store, output, format)

    files = len(back.inputFiles())
    done = compact.run(spark, Compact(str(output), format, before=AFTER), quiet())
    assert (done.gone, done.come) == (files, 3)
    assert f"{files} files in {output} became 3 files" in done.text()
    assert numbers(output, format) == list(range(510))
    assert len(read_files(spark, str(output), format).inputFiles()) == 3
    store.put(range(510, 520))
    archive.run(spark, job(store, output, format, decoders='{"#": "number"}'), quiet())
    assert numbers(output, format) == list(range(520))
    today = compact.run(spark, Compact(str(output), format), quiet())
    assert today.text().startswith("nothing to compact in ")


@pytest.fixture
def short_log(spark: SparkSession) -> Iterator[None]:
    """Every second file of the log of Spark's file sink names all files."""
    setting = "spark.sql.streaming.fileSink.log.compactInterval"
    spark.conf.set(setting, "2")
    yield
    spark.conf.unset(setting)


def test_files_of_an_archive_are_compacted_beside_its_log(
    spark: SparkSession, store: Store, short_log: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "archive"
    archive.run(spark, job(store, output, "parquet"), quiet())

    def rows() -> list[tuple[str, int]]:
        found = spark.read.parquet(str(output)).select("root", "payload").collect()
        return sorted((row.root, int(bytes(row.payload))) for row in found)

    before, files = rows(), spark.read.parquet(str(output)).inputFiles()
    assert [number for _, number in sorted(before, key=lambda row: row[1])] == list(range(300))
    assert compact.run(spark, Compact(str(output)), quiet()).gone == 0  # today is not over

    def fail(*_: object) -> None:
        raise KeyError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(Place, "write", fail)
        with pytest.raises(KeyError):
            compact.run(spark, Compact(str(output), before=AFTER), quiet())
    assert rows() == before
    done = compact.run(spark, Compact(str(output), before=AFTER), quiet())
    # Two of the three batches are in the log's file that names all.
    assert (done.gone, done.come) == (6, 3)
    assert rows() == before
    assert len(spark.read.parquet(str(output)).inputFiles()) == len(files) - 3
    # Batches that come are added to it.
    for begin in (300, 400):
        store.put(range(begin, begin + 100))
        archive.run(spark, job(store, output, "parquet"), quiet())
    assert sorted(number for _, number in rows()) == list(range(500))
    with pytest.raises(JobError, match="is no archive of files: it has no _spark_metadata"):
        compact.run(spark, Compact(str(tmp_path)), quiet())


def belongs(spark: SparkSession, store: Store, output: Path, format: str) -> None:
    """Messages would be doubled, or lost, where output and checkpoint are not those of one archive."""
    text = "do not belong together: give those of one run, or two new directories"
    for settings in (
        Archive(str(output), store.given(), format=format, checkpoint=str(output.parent / "new")),
        Archive(str(output.parent / "moved"), store.given(), format=format, checkpoint=str(output / "_checkpoint")),
    ):
        with pytest.raises(JobError, match=text):
            archive.run(spark, settings, quiet())


@pytest.mark.parametrize("format", FORMATS)
def test_places_that_cannot_be_used(spark: SparkSession, store: Store, tmp_path: Path, format: str) -> None:
    name = {"delta": "table", "iceberg": "table mqtt.messages"}[format]
    with pytest.raises(JobError, match=f"--input .*none: there is no {name} of {format}"):
        read_files(spark, str(tmp_path / "none"), format)
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match=r"--output|--checkpoint"):
        archive.run(spark, job(store, tmp_path / "file" / "x", format), quiet())


def test_an_iceberg_table_elsewhere_needs_a_catalog() -> None:
    with pytest.raises(JobError, match="--output s3a://bucket/x: give --catalog"):
        iceberg.exists(Target("iceberg", "s3a://bucket/x"))
    with pytest.raises(JobError, match="--input s3a://bucket/x: give --catalog"):
        iceberg.exists(Target("iceberg", "s3a://bucket/x", flag="--input"))
    with pytest.raises(JobError, match="--catalog nowhere: "):
        iceberg.exists(Target("iceberg", "s3a://bucket/x", "nowhere"))


@pytest.mark.parametrize(("format", "module"), [("delta", "deltalake"), ("iceberg", "pyiceberg")])
def test_a_package_that_is_missing(format: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require(format)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = rf"--format {format} needs the package {module}: pip install 'mqtt-nats\[{format}\]'"
    with pytest.raises(JobError, match=text) as missing:
        require(format)
    assert explain(missing.value).startswith("--format")
    require("parquet")


def test_values_of_partitions_are_in_the_names_of_directories() -> None:
    found = DataFile.of("data/w-0-1/_date=2026-01-02/_root=a%3Ab/part-0.parquet", 5, 7)
    assert found.partition == {"date": "2026-01-02", "root": "a:b"}
    assert (found.size, found.time) == (5, 7)
