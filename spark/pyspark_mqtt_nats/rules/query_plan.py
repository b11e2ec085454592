# SPDX-License-Identifier: Apache-2.0
"""A rule as a DataFrame whose rows are messages; whatever is wrong with the rule shows here, before it is started."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.jobs.failures import explain
from pyspark_mqtt_nats.jobs.storage import Place
from pyspark_mqtt_nats.options import BY_NAME, STARTS
from pyspark_mqtt_nats.queries.views import Views, make_views, register
from pyspark_mqtt_nats.rules import stateful, templates
from pyspark_mqtt_nats.rules.definitions import Definitions, Rule, Table

OBSERVED: Final = "published"
"""Name under which the progress of a query has the number of its messages, `rows`."""

TABLE_MOST: Final = 100_000
"""Rows of a static table; they are in the plan of each micro-batch."""

BATCH: Final = 100_000
"""Most messages of a micro-batch when no limit is given."""

_CSV: Final = {"header": "true", "inferSchema": "true"}

RETAINED_BATCHES: Final = 10
"""Micro-batches of which a checkpoint keeps offsets and states; Spark's own default is 100, and one is needed."""

SETTINGS: Final = {
    # A value that cannot be converted is null: what a stranger has published must not stop a rule.
    "spark.sql.ansi.enabled": "false",
    "spark.sql.streaming.minBatchesToRetain": str(RETAINED_BATCHES),
    **stateful.STATE_STORE,
}
"""Settings of the session of a rule."""


@dataclass(frozen=True)
class Reads:
    """Options of the source, and streams by name with the prefixes of their subjects, for all rules."""

    source: Mapping[str, str]
    streams: Mapping[str, str] = field(default_factory=dict)


def plan(spark: SparkSession, definitions: Definitions, rule: Rule, reads: Reads) -> DataFrame:
    """Return the messages of a rule as a streaming DataFrame in a session of its own.

    Raises JobError, one line that names the key to change.
    """
    key = f"rules[{rule.name}]"
    named = "checkpoint" if rule.checkpoint is None else f"{key}.checkpoint"
    Place(spark, definitions.checkpoint(rule), named).require_writable()
    session = spark.newSession()
    for name, value in SETTINGS.items():
        session.conf.set(name, value)
    for name, table in definitions.shared.tables.items():
        register(session, name, _table(session, definitions, table, f"tables.{name}.path"))
    views = Views(session, make_views(source_options(definitions, rule, reads), reads.streams, follow=True).values())
    try:
        found = views.query(rule.query)
    except Exception as error:
        raise JobError(f"{key}.query: {explain(error)}") from None
    if not found.isStreaming:
        raise JobError(f"{key}.query: it reads no stream: use the view messages, or a stream of --stream")
    made = messages(stateful.apply(found, rule, key), rule, key)
    _check(made, rule.mode, key)
    return made.observe(OBSERVED, F.count(F.lit(1)).alias("rows"))


def source_options(definitions: Definitions, rule: Rule, reads: Reads) -> dict[str, str]:
    """Return the options of the source: what is given for all rules, what the file says, and defaults.

    One task reads unless more are asked for: tasks publish side by side, so several would change the order of a topic.
    """
    found = dict(reads.source) | {"topics": orjson.dumps(rule.topics).decode()}
    if definitions.shared.decoders:
        found["decoders"] = orjson.dumps(definitions.shared.decoders).decode()
    given = {name.lower() for name in found}
    if not {"maxmessagespertrigger", "maxbytespertrigger"} & given:
        found["maxMessagesPerTrigger"] = str(BATCH)
    if not STARTS & given:
        # The first batch is planned some seconds later, and later still after a failure.
        found["startingTimestamp"] = str(int(time.time() * 1000))
    if "numpartitions" not in given:
        found["numPartitions"] = "1"
    return found


def sink_options(definitions: Definitions, rule: Rule, source: Mapping[str, str]) -> dict[str, str]:
    """Return the options of the sink: those of the source's connection, and those of the file."""
    found = {name: value for name, value in source.items() if BY_NAME[name.lower()].use == "all"}
    if (topic := rule.dead_letter or definitions.shared.dead_letter) is not None:
        found["deadLetterTopic"] = topic
    if definitions.shared.duplicate_window is not None:
        found["duplicateWindow"] = str(definitions.shared.duplicate_window)
    return found


def messages(frame: DataFrame, rule: Rule, key: str) -> DataFrame:
    """Return rows with the columns that the sink writes; raises JobError for a column that is not there."""

    def expand(name: str, text: str) -> Column:
        return _expand(frame, text, f"{key}.{name}")

    columns = [expand("topic", rule.topic).alias("topic"), _payload(frame, rule, key).alias("payload")]
    columns += [F.lit(rule.qos).alias("qos"), F.lit(rule.retain).alias("retain")]
    for name in ("content_type", "response_topic"):
        if (text := getattr(rule, name)) is not None:
            columns.append(expand(name, text).alias(name))
    if rule.message_expiry is not None:
        columns.append(F.lit(rule.message_expiry).cast("bigint").alias("message_expiry"))
    if rule.user_properties:
        pairs = [
            F.struct(F.lit(name).alias("key"), expand(f"user_properties.{name}", text).alias("value"))
            for name, text in rule.user_properties.items()
        ]
        columns.append(F.array(*pairs).alias("user_properties"))
    return frame.select(*columns)


def _payload(frame: DataFrame, rule: Rule, key: str) -> Column:
    """Return the payload: the template, or the column `payload`, or all columns as a JSON object."""
    if rule.payload is not None:
        return _expand(frame, rule.payload, f"{key}.payload")
    if "payload" not in frame.columns:
        return F.to_json(F.struct("*"), {"ignoreNullFields": "false"})
    kind = frame.schema["payload"].dataType.simpleString()
    return F.col("payload") if kind == "binary" else F.col("payload").cast("string")


def _expand(frame: DataFrame, text: str, key: str) -> Column:
    """Return the values of a template as a column, null where one of its columns is null or no UTF-8.

    Raises JobError, which begins with `key`, for a column that the frame does not have.
    """
    found = []
    for plain, column in templates.parse(text):
        if not column:
            found.append(F.lit(plain))
        elif column in frame.columns:
            found.append(F.try_validate_utf8(F.col(f"`{column.replace('`', '``')}`").cast("string")))
        else:
            raise JobError(f"{key}: the query has no column {column}; it has {', '.join(frame.columns)}")
    return F.concat(*found) if found else F.lit("")


def _table(session: SparkSession, definitions: Definitions, table: Table, key: str) -> DataFrame:
    """Return a static table from the driver's memory: a file that is replaced changes no rule that runs."""
    options = (_CSV if table.kind == "csv" else {}) | table.options
    try:
        rows = session.read.format(table.kind).options(**options).load(definitions.place(table.path))
        found = rows.limit(TABLE_MOST + 1).toArrow()
    except Exception as error:
        raise JobError(f"{key}: {explain(error)}") from None
    if found.num_rows > TABLE_MOST:
        raise JobError(f"{key}: {table.path} has more than {TABLE_MOST:,} rows")
    return session.createDataFrame(found)


def _check(frame: DataFrame, mode: str, key: str) -> None:
    """Raise JobError for a query that Spark cannot run as a stream in this output mode."""
    jvm: Any = frame.sparkSession._jvm
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    wanted = modes.Append() if mode == "append" else modes.Complete()
    checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
    try:
        checker.checkForStreaming(frame._jdf.queryExecution().analyzed(), wanted)
    except Exception as error:
        advice = 'give messages a WATERMARK, or mode = "complete"' if mode == "append" else 'change mode = "complete"'
        raise JobError(f"{key}.query: {explain(error)}; {advice}") from None
