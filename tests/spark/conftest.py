# SPDX-License-Identifier: Apache-2.0
"""One Spark session for all tests that need one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pyspark_mqtt_nats import java
from pyspark_mqtt_nats.worker_python import worker_python
from tests.harness.nats import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE_ROOTS = (ROOT, ROOT / "streams", ROOT / "spark")

_ENDING = 20.0  # seconds for the JVM to end

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For JVMs that live for seconds: optimising their code costs more than it brings."""


@pytest.fixture(scope="session", autouse=True)
def quick_java() -> Iterator[None]:
    """Every JVM that is started here, also by other processes, takes a third less of the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if "JDK_JAVA_OPTIONS" not in os.environ:
            patch.setenv("JDK_JAVA_OPTIONS", QUICK)
        yield


@pytest.fixture(scope="session")
def spark(quick_java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator["SparkSession"]:
    """A session of two threads on loopback, which leaves neither a process nor a file behind.

    Sources are registered by Spark itself, by what it finds on the path of its Python workers.
    """
    from pyspark.sql import SparkSession

    directory = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _environment(directory).items():
            patch.setenv(name, value)
        builder = SparkSession.builder.master("local[2,2]").appName("mqtt-nats tests")
        for key, setting in _settings(directory).items():
            builder = builder.config(key, setting)
        session = builder.getOrCreate()
    gateway = session.sparkContext._gateway
    assert gateway is not None
    jvm: subprocess.Popen[bytes] = gateway.proc
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()
        gateway.shutdown()
        assert jvm.stdin is not None
        jvm.stdin.close()  # the JVM ends when its input does
        try:
            jvm.wait(_ENDING)
        finally:
            jvm.kill()
            jvm.wait()


def _environment(directory: Path) -> dict[str, str]:
    found = dict(os.environ)
    java.ensure(found)
    return {
        **({"JAVA_HOME": found["JAVA_HOME"]} if "JAVA_HOME" in found else {}),
        "PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS)),
        "PYSPARK_PYTHON": worker_python(),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(directory / "local"),
    }


def _settings(directory: Path) -> dict[str, str]:
    return {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.default.parallelism": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.sql.streaming.metricsEnabled": "false",
        "spark.sql.python.filterPushdown.enabled": "true",
    }
