# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.sink``: how fast Spark publishes rows as MQTT messages.

One nats-server with the streams that gateways make, one Spark session of ``local[N]``. Each figure is for a whole
``df.write``, until everything is acknowledged; ``one task`` is the writer alone, without Spark.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks import peers
from benchmarks.spark import TOPICS, session

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

PROPERTIES = "content_type, two user properties"
KINDS: dict[str, dict[str, Any]] = {
    "QoS 0": {"qos": 0},
    "QoS 1": {"qos": 1},
    "QoS 2": {"qos": 2},
    f"QoS 1, {PROPERTIES}": {"qos": 1},
    "QoS 1, retained": {"qos": 1, "retain": "true"},
}
BATCH = 10_000


def create(url: str) -> None:
    """Make the streams for stored and for retained messages."""
    from mqtt_streams import messages, retained
    from mqtt_streams.definitions import load_definition
    from pyspark_mqtt_nats.nats.connection import Connection
    from pyspark_mqtt_nats.nats.jetstream import api
    from pyspark_mqtt_nats.options import Options

    with Connection(Options.parse({"servers": url}).access) as connection:
        for stream in (messages.STREAM, retained.STREAM):
            api(connection, f"STREAM.CREATE.{stream}", load_definition(stream))


def frame(spark: SparkSession, rows: int, size: int, kind: str) -> DataFrame:
    """The rows, with properties where the kind says so."""
    from pyspark.sql import functions as F

    number = F.col("id").cast("string")
    topic = F.concat(F.lit("site/"), F.col("id") % TOPICS, F.lit("/temperature")).alias("topic")
    payload = F.lpad(number, size, "0").alias("payload")
    if PROPERTIES not in kind:
        return spark.range(rows).select(topic, payload)
    pair = "array(struct('unit' AS key, 'C' AS value), struct('n' AS key, cast(id % 10 AS string) AS value))"
    kind_column = F.lit("text/plain").alias("content_type")
    return spark.range(rows).select(topic, payload, kind_column, F.expr(pair).alias("user_properties"))


def one_task(url: str, batches: list[pa.RecordBatch], schema: Any, options: dict[str, Any]) -> float:
    """Messages per second of the writer alone."""
    from pyspark_mqtt_nats.options import Options
    from pyspark_mqtt_nats.sink import BatchWriter

    writer = BatchWriter(Options.parse({"servers": url, **options}), schema, False)
    began = time.perf_counter()
    done = writer.write(iter(batches))
    if done.duplicates:
        raise SystemExit(f"{done.duplicates} messages were taken for others")
    return done.messages / (time.perf_counter() - began)


def measure(url: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Every figure of every round."""
    spark = session(arguments.cores)
    found: dict[str, list[float]] = {}
    warm = frame(spark, 1000, arguments.payload, "").write.format("mqtt_nats").option("servers", url)
    warm.mode("append").save()
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
        for kind, options in KINDS.items():
            rows = arguments.messages // (10 if "retained" in kind else 1)
            made = frame(spark, rows, arguments.payload, kind).cache()
            if made.count() != rows:
                raise SystemExit("rows are missing")
            write = made.write.format("mqtt_nats").option("servers", url).options(**options)
            began = time.perf_counter()
            write.mode("append").save()
            rates = {"Spark": rows / (time.perf_counter() - began)}
            batches = made.toArrow().to_batches(max_chunksize=BATCH)
            rates["one task"] = one_task(url, batches, made.schema, options)
            made.unpersist()
            for name, rate in rates.items():
                found.setdefault(f"{kind} | {name}", []).append(rate)
                print(f"  {kind}, {name}: {rate:,.0f}", file=sys.stderr)
    spark.stop()
    return found


def table(found: dict[str, list[float]]) -> str:
    """The medians with their spread."""
    lines = ["| messages | by | median per second | lowest | highest |", "|---|---|---|---|---|"]
    for name, values in found.items():
        lines.append(f"| {name} | {statistics.median(values):,.0f} | {min(values):,.0f} | {max(values):,.0f} |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sink", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--messages", type=int, default=300_000, help="a write; a tenth when retained (%(default)s)")
    parser.add_argument("--payload", type=int, default=128, help="bytes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="the table has medians (%(default)s)")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 2, help="tasks at a time (%(default)s)")
    arguments = parser.parse_args()
    with peers.nats_server() as url:
        create(url)
        print(table(measure(url, arguments)))


if __name__ == "__main__":
    main()
