# SPDX-License-Identifier: Apache-2.0
"""Directories that cannot be written, told by each job before it reads anything."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from pyspark.errors import PySparkException

from pyspark_mqtt_nats.jobs import JobError, aggregate, archive, compact, report, sql
from pyspark_mqtt_nats.jobs.aggregate import Aggregate
from pyspark_mqtt_nats.jobs.archive import Archive
from pyspark_mqtt_nats.jobs.compact import Compact
from pyspark_mqtt_nats.jobs.progress import Progress
from pyspark_mqtt_nats.jobs.report import Report
from pyspark_mqtt_nats.jobs.sql import Sql
from pyspark_mqtt_nats.jobs.storage import Place, parent
from pyspark_mqtt_nats.rules.definitions import load
from pyspark_mqtt_nats.rules.query_plan import Reads, plan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOWHERE: Final = {"servers": "nats://127.0.0.1:1", "connectTimeout": "1"}

RULES: Final = """
checkpoint = "file/state"
[[rules]]
name = "shared"
query = "SELECT topic FROM messages"
topic = "out/{topic}"
[[rules]]
name = "own"
query = "SELECT topic FROM messages"
topic = "out/{topic}"
checkpoint = "file/own"
"""


@pytest.fixture
def below(tmp_path: Path) -> str:
    """A directory that cannot be made: there is a file in its place, which stops root too."""
    (tmp_path / "file").touch()
    return f"{tmp_path}/file"


def quiet() -> Progress:
    return Progress("job", io.StringIO())


@pytest.mark.parametrize("blocked", ["--output", "--checkpoint"])
@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_of_an_archive(spark: "SparkSession", tmp_path: Path, below: str, blocked: str, format: str) -> None:
    places = {name: str(tmp_path / name[2:]) for name in ("--output", "--checkpoint")} | {blocked: f"{below}/x"}
    job = Archive(places["--output"], NOWHERE, places["--checkpoint"], format=format)
    with pytest.raises(JobError, match=f"^{blocked} {below}/x: .*{below}"):
        archive.run(spark, job, quiet())


@pytest.mark.parametrize("blocked", ["--output", "--checkpoint"])
def test_of_an_aggregate(spark: "SparkSession", tmp_path: Path, below: str, blocked: str) -> None:
    places = {name: str(tmp_path / name[2:]) for name in ("--output", "--checkpoint")} | {blocked: f"{below}/x"}
    job = Aggregate(NOWHERE, 60, output=places["--output"], checkpoint=places["--checkpoint"])
    with pytest.raises(JobError, match=f"^{blocked} {below}/x: .*{below}"):
        aggregate.run(spark, job, quiet())


def test_of_figures_and_results_that_are_written_once(spark: "SparkSession", below: str) -> None:
    with pytest.raises(JobError, match=f"^--output {below}: "):
        aggregate.run(spark, Aggregate(NOWHERE, 60, output=f"{below}/x"), quiet())
    with pytest.raises(JobError, match=f"^--output {below}: "):
        sql.run(spark, Sql("SELECT 1 AS one", NOWHERE, output=f"{below}/x.csv"), quiet())


def test_of_pages(spark: "SparkSession", below: str) -> None:
    page = Path(below, "page.html")
    with pytest.raises(JobError, match=f"^--output file:{below}: "):
        report.run(spark, Report(NOWHERE, output=page), quiet())
    query = "SELECT topic, count(*) AS messages FROM messages GROUP BY topic"
    with pytest.raises(JobError, match=f"^--plot file:{below}: "):
        sql.run(spark, Sql(query, NOWHERE, plot=page), quiet())


def test_a_user_of_an_object_store_need_not_write_beside_the_output(
    spark: "SparkSession", below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Place, "of_objects", True)
    with pytest.raises(PySparkException, match=f"cannot connect to {NOWHERE['servers']}: "):
        aggregate.run(spark, Aggregate(NOWHERE, 60, output=f"{below}/x"), quiet())


def test_a_store_that_keeps_all_files_is_written(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(spark, str(tmp_path), "--output")

    class AddOnly:
        """The files of the place, which nobody may delete."""

        def __getattr__(self, name: str) -> object:
            return getattr(files, name)

        def delete(self, *_: object) -> None:
            raise OSError("access denied")

    files = place._files
    monkeypatch.setattr(place, "_files", AddOnly())
    place.require_writable()
    (left,) = tmp_path.glob(".probe.????????")
    assert left.stat().st_size == 1


def test_a_look_at_a_full_disk_leaves_no_file(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(spark, str(tmp_path), "--output")

    def full(path: Any, content: bytes) -> None:
        place._files.create(path, True).close()
        assert list(tmp_path.glob(".probe.????????"))
        raise OSError("no space left on device")

    monkeypatch.setattr(place, "_create", full)
    with pytest.raises(JobError, match=f"^--output {tmp_path}: no space left on device$"):
        place.require_writable()
    assert list(tmp_path.iterdir()) == []


def test_of_a_query_that_is_followed(spark: "SparkSession", below: str) -> None:
    setting = "spark.sql.streaming.checkpointLocation"
    session = spark.newSession()
    session.conf.set(setting, f"{below}/x")
    with pytest.raises(JobError, match=f"^--conf {setting} {below}/x: "):
        sql.run(session, Sql("SELECT topic FROM messages", NOWHERE, follow=True), quiet())


@pytest.mark.parametrize(
    ("path", "directory"),
    [
        ("a", "."),
        ("/a", "/"),
        ("/", "/"),
        ("a/b/", "a"),
        ("/a/b", "/a"),
        ("file:/a", "file:/"),
        ("hdfs:///a", "hdfs:///"),
        ("s3a://c/d", "s3a://c/"),
        ("s3a://c/", "s3a://c/"),
        ("s3a://c/d/e", "s3a://c/d"),
    ],
)
def test_the_directory_of_a_file(path: str, directory: str) -> None:
    assert parent(path) == directory


def test_of_rules(spark: "SparkSession", tmp_path: Path, below: str) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(RULES, encoding="utf-8")
    definitions = load(file)
    for name, text in (
        ("shared", f"checkpoint {below}/state/shared"),
        ("own", rf"rules\[own\].checkpoint {below}/own"),
    ):
        with pytest.raises(JobError, match=f"^{text}: .*{below}"):
            plan(spark, definitions, definitions.rules[name], Reads(NOWHERE))


def test_of_a_compaction(spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive is there, on a file system for reading only."""

    def refused(place: Place) -> None:
        raise JobError(f"{place.option} {place.path}: read-only file system")

    monkeypatch.setattr(Place, "require_writable", refused)
    (tmp_path / "_spark_metadata").mkdir()
    with pytest.raises(JobError, match=f"^--input {tmp_path}: read-only file system"):
        compact.run(spark, Compact(str(tmp_path)), quiet())


def test_a_look_makes_the_directory_and_leaves_no_file(spark: "SparkSession", tmp_path: Path) -> None:
    output = tmp_path / "new" / "output"
    for _ in range(2):
        Place(spark, str(output), "--output").require_writable()
        assert list(output.iterdir()) == []
