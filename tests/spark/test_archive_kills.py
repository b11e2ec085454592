# SPDX-License-Identifier: Apache-2.0
"""The job `archive` while its driver, its workers and nats-server are killed: every message once.

`make kill-spark KIND=archive` is the long form.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pyspark_mqtt_nats.lakehouse.batches import read_files
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.spark.kills import MASTER, TOPICS, Job, kill_often, stored

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_BATCH = 2000  # messages of a micro-batch


class Archive(Job):
    """The job as a user runs it, two tasks of which write into one directory."""

    def __init__(self, url: str, directory: Path, format: str) -> None:
        self.format = format
        self.output = directory / "archive"
        arguments = ["-m", "pyspark_mqtt_nats.jobs", "archive", "--servers", url, "--master", MASTER]
        arguments += ["--format", format, "--output", str(self.output), "--topics", TOPICS, "--num-partitions", "2"]
        more = ("--every", "0.5", "--max-messages-per-trigger", f"{_BATCH}")
        super().__init__(directory, self.output / "_checkpoint", arguments, *more)


@pytest.fixture
def server(nats_factory: NatsFactory) -> NatsServer:
    return nats_factory()


@pytest.fixture
def gateway(server: NatsServer, gateway_factory: GatewayFactory) -> Gateway:
    return gateway_factory(server)


@pytest.fixture(params=["parquet", "delta", "iceberg"])
def archive(server: NatsServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Archive]:
    found = Archive(server.url, tmp_path, request.param)
    yield found
    found.process.discard()


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_every_message_is_archived_once(
    archive: Archive,
    server: NatsServer,
    gateway: Gateway,
    spark: "SparkSession",
    pytestconfig: pytest.Config,
) -> None:
    published = kill_often(archive, server, gateway, pytestconfig.getoption("--kills"))
    archive.run()  # what has come meanwhile, all at once
    expected = Counter((row.sequence, row.payload) for row in stored(server, TOPICS))
    rows = read_files(spark, str(archive.output), archive.format).select("sequence", "payload").collect()
    assert Counter((row.sequence, row.payload) for row in rows) == expected
    assert {int(bytes(row.payload)) for row in rows} >= set(range(1, published + 1))
