# SPDX-License-Identifier: Apache-2.0
"""Job ``compact``: the files of an archive's finished days become fewer and larger."""

from dataclasses import dataclass
from datetime import UTC, date, datetime

from pyspark.sql import SparkSession

from pyspark_mqtt_nats.jobs.progress import Progress, duration, plural
from pyspark_mqtt_nats.jobs.queries import Tally, watch
from pyspark_mqtt_nats.jobs.storage import Place
from pyspark_mqtt_nats.lakehouse.batches import prepare
from pyspark_mqtt_nats.lakehouse.compaction import compact
from pyspark_mqtt_nats.lakehouse.sink_log import SinkLog
from pyspark_mqtt_nats.lakehouse.tables import Target, exists, missing


@dataclass(frozen=True)
class Compact:
    """Settings of the job that compacts an archive.

    `size`: approximate size of files in bytes. `before`: days before this one are compacted; None: before today in UTC.
    """

    input: str
    format: str = "parquet"
    size: int = 128 << 20
    before: date | None = None
    catalog: str | None = None
    table: str = "mqtt.messages"


@dataclass(frozen=True)
class Compacted:
    """Numbers of the files that count no more, and of those that count in their place."""

    job: Compact
    gone: int
    come: int
    seconds: float

    def text(self) -> str:
        """Return the summary."""
        if not self.gone:
            return f"nothing to compact in {self.job.input} ({duration(self.seconds)})"
        done = f"{plural(self.gone, 'file')} in {self.job.input} became {plural(self.come, 'file')}"
        return f"{done} ({duration(self.seconds)})"


def run(spark: SparkSession, job: Compact, progress: Progress) -> Compacted:
    """Compact the archive; raises JobError, and what Spark raises."""
    prepare(spark)
    tally = Tally()
    gone, come = watch(spark, progress, "compacting", lambda: _compact(spark, job))
    return Compacted(job, gone, come, tally.seconds)


def _compact(spark: SparkSession, job: Compact) -> tuple[int, int]:
    before = (job.before or datetime.now(UTC).date()).isoformat()
    place = Place(spark, job.input, "--input")
    if job.format == "parquet":
        log = SinkLog(place)
        place.require_writable()
        return compact(spark, place, log, before, job.size)
    target = Target(job.format, job.input, job.catalog, job.table, "--input")
    if not exists(target):
        raise missing(target)
    place.require_writable()
    if job.format == "delta":
        from pyspark_mqtt_nats.lakehouse.delta import DeltaLake

        return DeltaLake(target, "", None).compact(before, job.size)
    from pyspark_mqtt_nats.lakehouse.iceberg import Iceberg

    return compact(spark, place, Iceberg(target, "", None), before, job.size)
