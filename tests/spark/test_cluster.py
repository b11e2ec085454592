# SPDX-License-Identifier: Apache-2.0
"""A Spark cluster: a standalone master with two workers, whose executors read by themselves."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from pyspark_mqtt_nats.java import ensure
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
from tests.harness.process import LoggedProcess, wait_ready
from tests.harness.raw5 import PUBACK, Raw5, publish

HOME = Path(pyspark.__file__).parent
TOTAL = 4000
BURST = 500  # within the Receive Maximum
CORES = "spark.cores.max=2"

DRIVER = """
import os, sys
from pyspark.sql import SparkSession

def where(batches):
    import pyarrow
    for batch in batches:
        size = batch.num_rows
        yield pyarrow.RecordBatch.from_pydict({"executor": [os.getppid()] * size, "payload": batch.column("payload")})

spark = SparkSession.builder.getOrCreate()
read = spark.read.format("mqtt_nats").option("servers", sys.argv[1]).option("numPartitions", "8")
found = read.load().select("payload").mapInArrow(where, "executor long, payload binary").collect()
print("ROWS", len(found), len({bytes(row.payload) for row in found}), len({row.executor for row in found}))
"""


@pytest.fixture
def env() -> dict[str, str]:
    """The environment of every process of the cluster."""
    found = {
        **os.environ,
        "SPARK_HOME": str(HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("", "streams", "spark")),
    }
    ensure(found)
    return found


@pytest.fixture
def cluster(env: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The URL of a master with two workers of one core each."""
    spark_class = str(HOME / "bin" / "spark-class")
    master = LoggedProcess("master", tmp_path / "master.log")
    workers = [LoggedProcess(f"worker {number}", tmp_path / f"worker{number}.log") for number in range(2)]
    deploy = "org.apache.spark.deploy"
    at = ["--host", "127.0.0.1", "--webui-port", "0"]
    try:
        master.start([spark_class, f"{deploy}.master.Master", *at, "--port", "0"], env)
        url = wait_ready(master, r"Starting Spark master at (spark://\S+)", 60.0)
        for number, worker in enumerate(workers):
            directory = ["--work-dir", str(tmp_path / f"work{number}")]
            worker.start(
                [spark_class, f"{deploy}.worker.Worker", *at, "--cores", "1", "--memory", "1g", *directory, url], env
            )
        for worker in workers:
            wait_ready(worker, "(Successfully registered with master)", 60.0)
        yield url
    finally:
        for process in (*workers, master):
            process.discard()


@pytest.mark.soak
@pytest.mark.timeout(360)
def test_executors_read_by_themselves(
    nats_server: NatsServer, gateway: Gateway, cluster: str, env: dict[str, str], tmp_path: Path
) -> None:
    with Raw5.open(gateway.port) as publisher:
        for first in range(0, TOTAL, BURST):
            burst = range(first, first + BURST)
            publisher.send(b"".join(publish("cluster/test", b"%d" % n, qos=1, id=n % BURST + 1) for n in burst))
            for _ in burst:
                publisher.expect(PUBACK)
    script = tmp_path / "driver.py"
    script.write_text(DRIVER, encoding="utf-8")
    settings = ["spark.driver.host=127.0.0.1", "spark.ui.enabled=false", "spark.executor.memory=512m", CORES]
    flags = [word for setting in settings for word in ("--conf", setting)]
    done = subprocess.run(
        [str(HOME / "bin" / "spark-submit"), "--master", cluster, *flags, str(script), nats_server.url],
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    found = re.search(r"ROWS (\d+) (\d+) (\d+)", done.stdout)
    assert found, done.stderr[-3000:]
    assert found.groups() == (f"{TOTAL}", f"{TOTAL}", "2")
