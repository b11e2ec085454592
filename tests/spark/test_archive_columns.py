# SPDX-License-Identifier: Apache-2.0
"""Columns of archives: types that change, and types that do not depend on values."""

import io
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyarrow import parquet
from pyiceberg.catalog.sql import SqlCatalog
from pyspark.sql import SparkSession

from pyspark_mqtt_nats.decoders.types import columns_of
from pyspark_mqtt_nats.jobs import JobError, archive, compact
from pyspark_mqtt_nats.jobs.compact import Compact
from pyspark_mqtt_nats.jobs.progress import Progress
from pyspark_mqtt_nats.jobs.storage import Place
from pyspark_mqtt_nats.lakehouse import batches, iceberg
from pyspark_mqtt_nats.lakehouse.batches import compare_files, read_files
from pyspark_mqtt_nats.lakehouse.columns import compare
from pyspark_mqtt_nats.lakehouse.tables import DataFile, Target, open_table

pytestmark = pytest.mark.timeout(480)

PARTS = {"date": pa.array([0], pa.date32()), "root": ["007"]}
NESTED = pa.struct([("a", pa.list_(pa.int64()))])


def quiet() -> Progress:
    return Progress("job", io.StringIO())


def added(output: Path, format: str, value: pa.Array, batch: int, name: str = "v") -> None:
    """Commit a file with one row; open_table is what checks the columns."""
    rows = pa.table({name: value, **PARTS})
    table = open_table(Target(format, str(output)), "writer", rows.schema)
    (output / "data").mkdir(exist_ok=True)
    path = output / "data" / f"{batch}.parquet"
    parquet.write_table(rows if format == "iceberg" else rows.drop(list(PARTS)), path)
    partition = {"date": "1970-01-01", "root": "007"}
    table.add([DataFile(f"data/{batch}.parquet", path.stat().st_size, 0, partition)], batch)


def values(output: Path, format: str, **scan: Any) -> list[Any]:
    """Column v, as readers of others see it."""
    if format == "delta":
        found = DeltaTable(str(output)).to_pyarrow_table()
    else:
        catalog = SqlCatalog("mqtt-nats", uri=f"sqlite:///{output}/catalog.db", warehouse=str(output))
        found = catalog.load_table("mqtt.messages").scan(**scan).to_arrow()
    assert set(found["root"].to_pylist()) <= {"007"}
    return sorted(found["v"].to_pylist())


@pytest.mark.parametrize("format", ["delta", "iceberg"])
@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (pa.array([1]), pa.array([1.5]), "column 'v' is bigint there, and would be double; give it the same type"),
        (pa.array([1]), pa.array(["x"]), "column 'v' is bigint there, and would be string; give it the same type"),
        (pa.array([1]), pa.array([2], pa.int32()), "column 'v' is bigint there, and would be int; "),
        (pa.array(["x"]), pa.array([b"x"]), "column 'v' is string there, and would be binary; "),
    ],
)
def test_a_table_is_not_changed(tmp_path: Path, format: str, old: pa.Array, new: pa.Array, text: str) -> None:
    added(tmp_path, format, old, 0)
    logs = {one for one in tmp_path.rglob("*") if one.is_file()}
    with pytest.raises(JobError, match=f"^--output {tmp_path}: {text}.*, or another --output and --checkpoint$"):
        added(tmp_path, format, new, 1)
    assert {one for one in tmp_path.rglob("*") if one.is_file()} == logs
    with pytest.raises(JobError, match="column 'V' has the name 'v' there; give it the same name"):
        added(tmp_path, format, old, 1, "V")
    added(tmp_path, format, old, 1)
    assert values(tmp_path, format) == old.to_pylist() * 2


@pytest.mark.parametrize("format", ["delta", "iceberg"])
def test_what_is_nested_is_compared_as_a_whole(tmp_path: Path, format: str) -> None:
    added(tmp_path, format, pa.array([{"a": [1]}], NESTED), 0)
    text = "column 'v' is struct<a:array<bigint>> there, and would be struct<a:array<bigint>,b:bigint>;"
    with pytest.raises(JobError, match=text):
        added(tmp_path, format, pa.array([{"a": [1], "b": 2}]), 1)
    with pytest.raises(JobError, match="would be struct<a:array<double>>;"):
        added(tmp_path, format, pa.array([{"a": [1.5]}]), 1)
    with pytest.raises(JobError, match="would be struct<a:array<int>>;"):  # wider types only as types of columns
        added(tmp_path, format, pa.array([{"a": [1]}], pa.struct([("a", pa.list_(pa.int32()))])), 1)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (pa.array([1], pa.int32()), pa.array([2**40]), [1, 2**40]),
        (pa.array([1], pa.int8()), pa.array([2], pa.int8()), [1, 2]),
        (pa.array([1], pa.int16()), pa.array([2**40]), [1, 2**40]),
        (pa.array([1.0], pa.float32()), pa.array([1e300]), [1.0, 1e300]),
        (pa.array([1], pa.decimal128(9, 2)), pa.array([10**20], pa.decimal128(30, 2)), [1, 10**20]),
    ],
)
def test_a_column_of_iceberg_becomes_wider(
    spark: SparkSession, tmp_path: Path, old: pa.Array, new: pa.Array, found: list[Any]
) -> None:
    """For readers of others, for reports, and in what is compacted."""
    added(tmp_path, "iceberg", old, 0)
    added(tmp_path, "iceberg", new, 1)
    assert values(tmp_path, "iceberg") == found
    assert values(tmp_path, "iceberg", row_filter="v > 1") == found[1:]
    back = read_files(spark, str(tmp_path), "iceberg")
    assert back.columns == ["v", "date", "root"]
    assert sorted(row.v for row in back.collect()) == found


def test_an_iceberg_table_of_a_catalog_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = SqlCatalog("house", uri=f"sqlite:///{tmp_path}/house.db")
    monkeypatch.setattr(iceberg, "load_catalog", lambda name: catalog)
    target = Target("iceberg", str(tmp_path), "house", "mqtt.other")
    columns = pa.schema([("v", pa.int64()), ("date", pa.date32()), ("root", pa.string())])
    open_table(target, "writer", columns)
    text = "--table mqtt.other: column 'v' is bigint there, and would be string; .*, or another --table, --output and"
    with pytest.raises(JobError, match=f"^{text} --checkpoint$"):
        open_table(target, "writer", columns.set(0, pa.field("v", pa.string())))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (pa.int32(), pa.int64()),
        (pa.float32(), pa.float64()),
        (pa.decimal128(9, 2), pa.decimal128(30, 2)),
    ],
)
def test_a_column_of_delta_does_not_become_wider(tmp_path: Path, old: pa.DataType, new: pa.DataType) -> None:
    added(tmp_path, "delta", pa.array([1], old), 0)
    with pytest.raises(JobError, match=r"column 'v' is .* there, and would be"):
        added(tmp_path, "delta", pa.array([1], new), 1)


def test_a_decimal_with_more_places_is_another_type(tmp_path: Path) -> None:
    added(tmp_path, "iceberg", pa.array([1], pa.decimal128(9, 2)), 0)
    with pytest.raises(JobError, match=r"is decimal\(9,2\) there, and would be decimal\(30,4\);"):
        added(tmp_path, "iceberg", pa.array([1], pa.decimal128(30, 4)), 1)


def test_files_of_two_widths_are_compacted(spark: SparkSession, tmp_path: Path) -> None:
    output = tmp_path / "lake"
    arrange = partial(archive.arranged, roots={"007": "007"}, files=1)
    batches.prepare(spark)
    for number, kind in enumerate(("INT", "BIGINT")):
        frame = spark.range(number * 10, number * 10 + 10, 1, 1).selectExpr(
            "id AS sequence", "timestamp_seconds(0) AS timestamp", "'007/a' AS topic", f"CAST(id AS {kind}) AS v"
        )
        table = open_table(Target("iceberg", str(output)), "writer", batches.arrow_schema(arrange(frame)))
        batches.Batches(table, Place(spark, str(output), "--output"), "writer", arrange, keep=True).write(frame, number)
    done = compact.run(spark, Compact(str(output), "iceberg", before=date(1970, 1, 2)), quiet())
    assert (done.gone, done.come) == (2, 1)
    assert values(output, "iceberg") == list(range(20))


def test_a_renamed_column_is_not_read_as_null(tmp_path: Path) -> None:
    """Its files have the former name: compaction would put rows without its values in their place."""
    added(tmp_path, "iceberg", pa.array([1], pa.int64()), 0)
    table = open_table(Target("iceberg", str(tmp_path), flag="--input"))
    assert isinstance(table, iceberg.Iceberg)
    assert "v" in table.columns().names
    with table.table.update_schema() as update:
        update.rename_column("v", "w")
    with pytest.raises(JobError, match=f"^--input {tmp_path}: column 'v' was renamed to 'w'; rename it back$"):
        table.columns()


def written(
    spark: SparkSession,
    output: Path,
    roots: tuple[str, ...],
    column: str = "id AS v",
    rows: int = 10,
    format: str = "parquet",
) -> None:
    """One more batch of an archive of files, written and logged by a stream."""
    source = output.parent / "in"
    spark.range(0, rows, 1, 1).write.mode("append").parquet(str(source))
    levels = ", ".join(f"'{one}'" for one in roots)
    root = f"element_at(array({levels}), CAST(id % {len(roots)} AS INT) + 1) AS root"
    frame = (
        spark.readStream.schema("id BIGINT").parquet(str(source)).selectExpr("DATE'2026-01-02' AS date", root, column)
    )
    writer = (
        frame.writeStream.format(format)
        .partitionBy("date", "root")
        .option("checkpointLocation", f"{output}.checkpoint")
    )
    writer.trigger(availableNow=True).start(str(output)).awaitTermination()


@pytest.mark.parametrize("roots", [("007",), ("1e3", "007"), ("2026-01-02",), ("a", "7")])
def test_root_is_text_whatever_its_values_look_like(
    spark: SparkSession, tmp_path: Path, roots: tuple[str, ...]
) -> None:
    written(spark, tmp_path / "archive", roots)
    found = read_files(spark, str(tmp_path / "archive"), "parquet")
    assert found.dtypes == [("v", "bigint"), ("date", "date"), ("root", "string")]
    assert {row.root for row in found.collect()} == set(roots)
    assert found.where("date = DATE'2026-01-02'").count() == 10
    assert spark.conf.get("spark.sql.sources.partitionColumnTypeInference.enabled") == "true"


@pytest.mark.parametrize("format", ["parquet", "orc"])
def test_types_of_files_are_compared(spark: SparkSession, tmp_path: Path, format: str) -> None:
    output = tmp_path / "archive"
    place = Place(spark, str(output), "--output")

    def check(columns: str, format: str = format) -> None:
        compare_files(spark, place, format, columns_of(columns))

    check("v STRING")  # there is no archive yet
    written(spark, output, ("007",), rows=0, format=format)
    check("v STRING")  # and no message
    written(spark, output, ("007",), format=format)
    for fits in ("v BIGINT", "w STRING", "v BIGINT, w ARRAY<TIMESTAMP>"):
        check(fits)
    with pytest.raises(JobError, match=f"^--output {output}: column 'v' is bigint there, and would be string;"):
        check("w STRING, v STRING")
    check("v STRING", "json")  # its files have no types
    written(spark, output, ("007",), "id AS w", format=format)
    with pytest.raises(JobError, match="column 'v' is bigint there"):  # whichever file comes first
        check("v STRING")
    written(spark, output, ("007",), "CAST(id AS STRING) AS v", format=format)
    with pytest.raises(JobError, match="files there have one column in several types already; give another --output"):
        check("v BIGINT")


def test_new_columns_are_no_change() -> None:
    there = pa.schema([("b", pa.string())])
    assert not compare("--output x", there, pa.schema([("a", pa.int32()), ("b", pa.large_string())]))
    assert not compare("--output x", there, pa.schema([]))
    assert compare("--output x", there, pa.schema([("b", pa.int64())]), wider=lambda old, new: True)
