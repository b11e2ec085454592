# SPDX-License-Identifier: Apache-2.0
"""Archives as the connectors of Delta Lake and Iceberg for Spark read them, by the code of the page.

The connectors are jars, which Spark takes from the local Maven cache or from Maven Central. Each runs in an environment
with a version of PySpark that it is made for, and without mqtt-nats.
"""

import io
import json
import os
import re
import subprocess
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, Final

import pytest
from pyspark.sql import SparkSession

from pyspark_mqtt_nats.jobs import archive, compact
from pyspark_mqtt_nats.jobs.archive import Archive
from pyspark_mqtt_nats.jobs.compact import Compact
from pyspark_mqtt_nats.jobs.progress import Progress
from tests.harness.nats import ROOT, NatsServer
from tests.harness.shell import find_pyspark
from tests.spark.storing import Store

PAGE: Final = (ROOT / "docs" / "spark-lakehouse.md").read_text(encoding="utf-8")
AFTER: Final = date(2999, 1, 1)
OF_SPARK: Final = (
    *("org.slf4j", "org.apache.logging.log4j", "org.apache.hadoop", "org.apache.parquet", "org.xerial.snappy"),
    *("io.airlift", "com.github.luben", "commons-pool", "commons-logging", "com.fasterxml.jackson.core"),
    "org.roaringbitmap",
)
"""Groups of jars that Spark has itself: a local cache need not have the versions that a connector names."""

OPTIONS: Final = (
    "--master local[2] --driver-memory 1g --conf spark.ui.enabled=false --conf spark.driver.bindAddress=127.0.0.1 "
    f"--conf spark.driver.host=127.0.0.1 --conf spark.jars.excludes={','.join(f'{one}:*' for one in OF_SPARK)} "
    "pyspark-shell"
)
FIGURES: Final = """
import json
row = table.selectExpr(
    "count(*) AS rows", "count(DISTINCT payload) AS payloads", "sum(number) AS total", "count(DISTINCT date) AS days",
    "max(size(topic_levels)) AS levels", "max(try_element_at(user_properties, 1).value) AS last").first()
print("FIGURES", json.dumps(row.asDict()))
"""


class Connector:
    """Spark with a connector, as the page makes it for a format, and a table in a directory."""

    def __init__(self, format: str, output: Path) -> None:
        blocks = re.findall(r"```python\n(from pyspark.*?)```", PAGE, re.DOTALL)
        (self._made,) = (one for one in blocks if f"/data/{format}" in one)
        (version,) = re.findall(rf"^{format}, after `pip install 'pyspark==(.*)\.\*'`", PAGE, re.M | re.I)
        self._interpreter = find_pyspark(version)
        self._format = format
        self._output = output
        (shown,) = re.findall(r"^(spark\.\w.*)\.groupBy\(.*\)\.count\(\)\.show\(\)$", self._made, re.MULTILINE)
        self._table = f"table = {shown}\n"

    def run(self, more: str = "") -> str:
        """Run the code of the page, and more; return what it prints."""
        program = (self._made + self._table + more).replace(f"/data/{self._format}", str(self._output))
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK", "PYTHON"))
        }
        done = subprocess.run(
            [self._interpreter, "-c", program],
            env={**environ, "PYSPARK_SUBMIT_ARGS": OPTIONS, "SPARK_LOCAL_IP": "127.0.0.1"},
            cwd=self._output,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def figures(self) -> dict[str, Any]:
        """Return some figures of the table."""
        found: dict[str, Any] = json.loads(self.run(FIGURES).partition("FIGURES ")[2])
        return found


@pytest.fixture
def store(nats_server: NatsServer) -> Iterator[Store]:
    with Store(nats_server.url) as found:
        found.put(range(300))
        yield found


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("format", ["delta", "iceberg"])
def test_the_connector_reads_an_archive(spark: SparkSession, store: Store, tmp_path: Path, format: str) -> None:
    output = tmp_path / "lake"
    connector = Connector(format, output)
    quiet = Progress("archive", io.StringIO())

    def put(begin: int, end: int) -> None:
        store.put(range(begin, end))
        source = store.given(maxMessagesPerTrigger=100, decoders='{"#": "number"}')
        archive.run(spark, Archive(str(output), source, format=format), quiet)

    def check(number: int) -> None:
        figures = connector.figures()
        days = figures.pop("days")
        assert days in (1, 2)
        total = float(sum(range(300, number)))
        assert figures == {"rows": number, "payloads": number, "total": total, "levels": 2, "last": None}

    archive.run(spark, Archive(str(output), store.given(maxMessagesPerTrigger=100), format=format), quiet)
    put(300, 310)  # with the column of a decoder, which older files do not have
    shown = re.findall(r"^\|(\d{4}-\d\d-\d\d)\| +a\| +(\d+)\|$", connector.run(), re.MULTILINE)
    assert sum(int(number) for _, number in shown) == 310
    check(310)
    assert compact.run(spark, Compact(str(output), format, before=AFTER), quiet).come >= 1
    put(310, 320)
    check(320)
