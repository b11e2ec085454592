# SPDX-License-Identifier: Apache-2.0
"""Views of an SQL query: `messages`, `retained`, `sessions`, and one for each named stream.

A view is made for each query anew, so each query sees what is stored when it begins. It has only the columns that the
query needs, since Spark asks a Python source for all of them, and takes the query's filters where it is safe.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

from pyspark_mqtt_nats import projection, sessions
from pyspark_mqtt_nats.options import BY_NAME, Options
from pyspark_mqtt_nats.queries.pruning import VIEW, Need, is_command, needs, planned

FORMAT: Final = "mqtt_nats"
FIXED: Final = ("messages", "retained", "sessions")
"""Names of the views that are always there."""

_PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
_LOOKING: Final = ("Show", "Describe", "Explain")
"""How the names of statements begin that make nothing."""

_CONNECTION: Final = frozenset(name for name, one in BY_NAME.items() if one.use == "all")
"""Options of the connection, in lower case."""

_RETAINED: Final = frozenset(("topics", "decoders", "includeheaders", "batchsize"))
"""Options of reads, in lower case, that mean something for retained messages."""


@dataclass(frozen=True)
class View:
    """A view: its name, the options of the source, its columns, and whether it is a stream."""

    name: str
    options: Mapping[str, str]
    schema: StructType
    streaming: bool = False

    def load(self, spark: SparkSession, need: Need | None = None) -> DataFrame:
        """Return the view as a DataFrame, with the columns that are needed; None: with all.

        The query's filters go to NATS only where the view occurs once: Spark keeps what was planned with the filters of
        one occurrence for the others.
        """
        reader = (spark.readStream if self.streaming else spark.read).format(FORMAT).options(**self.options)
        fields = self.schema.fields
        if need is not None:
            fields = [field for field in fields if field.name in need.columns] or fields[:1]
            if need.times == 1 and not self.streaming and self.name != "sessions":
                reader = reader.option("pushdown", "true")
        return reader.schema(StructType(fields)).load()


def make_views(source: Mapping[str, str], streams: Mapping[str, str], follow: bool = False) -> dict[str, View]:
    """Return the views by name.

    Args:
        source: options of the source, for messages.
        streams: name of a stream -> what its subjects begin with.
        follow: messages and named streams are read as streams.
    """
    messages = dict(source)
    connection = {name: value for name, value in source.items() if name.lower() in _CONNECTION}
    read = {name: value for name, value in source.items() if name.lower() in _RETAINED}
    found = {
        "messages": _view("messages", messages, follow),
        "retained": _view("retained", connection | read | {"mode": "retained"}, False),
        "sessions": View("sessions", connection | {"mode": "sessions"}, sessions.spark_schema()),
    }
    for name, prefix in streams.items():
        found[name] = _view(name, messages | {"stream": name, "subjectPrefix": prefix}, follow)
    return found


def _view(name: str, options: Mapping[str, str], streaming: bool) -> View:
    parsed = Options.parse(options)
    return View(name, options, projection.spark_schema(parsed.decoders, parsed.include_headers), streaming)


class Views:
    """Views in a session of Spark, and the queries over them.

    Args:
        whole: every column is read and no filter goes to NATS, since the results of queries are filtered further: Spark
            keeps what was planned with the filters of one query for others over the same result.
    """

    def __init__(self, spark: SparkSession, views: Iterable[View], *, whole: bool = False) -> None:
        self._spark = spark
        self._views = {view.name: view for view in views}
        self._whole = whole
        spark.conf.set(_PUSHDOWN, "true")

    def query(self, text: str) -> DataFrame:
        """Return the result of a statement; raises what Spark raises, and what the source raises.

        A statement that is no query, such as DESCRIBE or CREATE TABLE, is run at once, with whole views. When it may
        have made something over the views, such as another view, they stay whole.
        """
        found = self._needs(text)
        for name, view in self._views.items():
            if found is None or name in found:
                whole = self._whole or found is None
                register(self._spark, name, view.load(self._spark, None if whole or found is None else found[name]))
            else:
                self._spark.catalog.dropTempView(name)  # the empty one of the plan
        return self._spark.sql(text)

    def _needs(self, text: str) -> Mapping[str, Need] | None:
        """Return the views that a query uses and the columns that it needs; None for a statement that is no query."""
        for name, view in self._views.items():
            register(self._spark, name, _empty(self._spark, view))
        plan: Any = planned(self._spark, text)
        if not is_command(self._spark, plan):
            return needs(plan)
        self._whole = self._whole or not plan.analyzed().nodeName().startswith(_LOOKING)
        return None


def register(spark: SparkSession, name: str, frame: DataFrame) -> None:
    """Make a DataFrame the temporary view of this name, which may have any characters."""
    frame.createOrReplaceTempView(f"`{name.replace('`', '``')}`")


def _empty(spark: SparkSession, view: View) -> DataFrame:
    """Return a DataFrame that stands for a view where a query is only planned: no server is asked.

    Each column says, in its metadata, of which view it is.
    """
    fields = [StructField(field.name, field.dataType, True, {VIEW: view.name}) for field in view.schema.fields]
    return spark.createDataFrame(spark.sparkContext.emptyRDD(), StructType(fields))
