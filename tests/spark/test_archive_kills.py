# SPDX-License-Identifier: Apache-2.0
"""The job ``archive`` while its driver, its executors and nats-server are killed: every message once.

``pytest tests/spark/test_archive_kills.py --kills 20`` (``make kill-archive``) is the long form.
"""

import itertools
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from pyspark_mqtt_nats.lakehouse.batches import read_files
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
from tests.harness.process import LoggedProcess
from tests.harness.raw import PUBACK, Raw, publish
from tests.harness.waiting import eventually

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BURST = 200  # messages that are published at once
PACE = 0.2  # seconds from one burst to the next
BATCH = 2000  # messages of a micro-batch
PATIENCE = 90.0  # seconds


class Publisher(threading.Thread):
    """Publishes numbers at QoS 1 until told to stop."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.acknowledged = 0
        self.failure: Exception | None = None
        self._port = port
        self._ending = threading.Event()

    def run(self) -> None:
        """Publish."""
        try:
            with Raw.connected(self._port, "publisher", patience=PATIENCE) as client:
                while not self._ending.wait(PACE):
                    first = self.acknowledged
                    topic = f"kills/{first // BURST % 5}"
                    ids = range(1, BURST + 1)
                    client.send(b"".join(publish(topic, b"%d" % (first + id), qos=1, id=id) for id in ids))
                    for id in ids:
                        assert client.expect(PUBACK).id == id
                    self.acknowledged = first + BURST
        except Exception as error:
            self.failure = error

    def finish(self) -> int:
        """Stop when what is under way is acknowledged; how many there were."""
        self._ending.set()
        self.join(PATIENCE)
        assert not self.is_alive()
        if self.failure is not None:
            raise self.failure
        return self.acknowledged


class Archive:
    """The job as a user runs it, in a process of its own."""

    def __init__(self, url: str, directory: Path, format: str) -> None:
        self.format = format
        self.output = directory / "archive"
        self.process = LoggedProcess("archive", directory / "archive.log")
        self._command = [sys.executable, "-m", "pyspark_mqtt_nats.jobs", "archive", "--servers", url]
        self._command += ["--format", format, "--output", str(self.output), "--max-messages-per-trigger", f"{BATCH}"]
        self._command += ["--num-partitions", "2"]
        # Two tasks write into one directory. One that is lost with its worker is run again: as on a cluster, and not as
        # local[2] does.
        self._command += ["--master", "local[2,8]"]

    def start(self, *more: str) -> None:
        """Begin, or go on."""
        self.process.start([*self._command, *more], cwd=ROOT)

    @property
    def committed(self) -> int:
        """Batches that are complete."""
        commits = self.output / "_checkpoint" / "commits"
        return sum(path.name.isdigit() for path in commits.iterdir()) if commits.is_dir() else 0

    @property
    def begun(self) -> int:
        """Batches that were planned."""
        offsets = self.output / "_checkpoint" / "offsets"
        return sum(path.name.isdigit() for path in offsets.iterdir()) if offsets.is_dir() else 0

    def wait(self, *, begun: int = -1, committed: int = -1) -> None:
        """Until there are more batches than these; one that has failed is started again, as a scheduler does."""

        def reached() -> bool:
            if not self.process.alive:
                self.start("--every", "0.5")
            return self.begun > begun and self.committed > committed

        eventually(reached, PATIENCE)

    def children(self, name: str) -> list[psutil.Process]:
        """Processes below the job that have ``name`` in their command line."""
        found = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if any(name in word for word in one.cmdline()):
                    found.append(one)
            except psutil.NoSuchProcess:
                continue
        return found


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


def kill_driver(archive: Archive, server: NatsServer) -> None:
    """Spark's JVM, which is the driver, in the middle of a batch."""
    (jvm,) = [one for one in archive.children("SparkSubmit") if "java" in one.name()]
    jvm.kill()
    assert archive.process.wait(PATIENCE) != 0


def kill_executor(archive: Archive, server: NatsServer) -> None:
    """The Python processes in which tasks read."""
    eventually(lambda: archive.children("pyspark.daemon"), PATIENCE)
    for one in archive.children("pyspark.daemon"):
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue


def kill_server(archive: Archive, server: NatsServer) -> None:
    """nats-server, which is back a moment later."""
    server.kill()
    server.start()


KILLS: list[Callable[[Archive, NatsServer], None]] = [kill_driver, kill_executor, kill_server]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_every_message_is_archived_once(
    archive: Archive,
    server: NatsServer,
    gateway: Gateway,
    spark: "SparkSession",
    pytestconfig: pytest.Config,
) -> None:
    kills: int = pytestconfig.getoption("--kills")
    done: Counter[str] = Counter()
    publisher = Publisher(gateway.port)
    publisher.start()
    try:
        for kill in itertools.islice(itertools.cycle(KILLS), kills):
            archive.wait(begun=archive.begun)
            kill(archive, server)
            done[kill.__name__] += 1
            archive.wait(committed=archive.committed)
    finally:
        published = publisher.finish()
    if archive.process.alive:
        archive.process.send(signal.SIGTERM)
        archive.process.wait(PATIENCE)
    archive.start("--max-messages-per-trigger", "200000")  # what has come meanwhile, all at once
    assert archive.process.wait(PATIENCE) == 0, archive.process.text
    rows = read_files(spark, str(archive.output), archive.format).select("sequence", "payload").collect()
    sequences = Counter(row.sequence for row in rows)
    payloads = Counter(int(bytes(row.payload)) for row in rows)
    print(f"{published} messages, {dict(done)}, {archive.committed} batches, {len(rows)} rows")
    assert [one for one, times in sequences.items() if times > 1] == []
    assert sorted(sequences) == list(range(1, len(sequences) + 1))
    assert set(payloads) >= set(range(1, published + 1))
    assert sum(done.values()) == kills
