# SPDX-License-Identifier: Apache-2.0
"""Jobs of Spark that are killed while MQTT clients publish: the driver, the workers, and nats-server."""

import itertools
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.reading.ranges import Range, snapshot
from pyspark_mqtt_nats.reading.read import read_range
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer
from tests.harness.process import LoggedProcess
from tests.harness.raw import PUBACK, Raw, publish
from tests.harness.waiting import eventually

TOPICS: Final = "kills/#"
"""Filter of what the publisher publishes: consecutive numbers from 1 on, in five topics."""

PATIENCE: Final = 300.0  # seconds; a busy machine takes minutes for a start of Spark

MASTER: Final = "local[2,8]"
"""Two tasks at a time. One that is lost with its worker is run again: as on a cluster, and not as local[2] does."""

_BURST: Final = 200  # messages that are published at once
_PACE: Final = 0.2  # seconds from one burst to the next


class Stored(NamedTuple):
    """Message in the stream."""

    sequence: int
    timestamp: datetime
    topic: str
    payload: bytes


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
                while not self._ending.wait(_PACE):
                    first = self.acknowledged
                    topic = f"kills/{first // _BURST % 5}"
                    ids = range(1, _BURST + 1)
                    client.send(b"".join(publish(topic, b"%d" % (first + id), qos=1, id=id) for id in ids))
                    for id in ids:
                        assert client.expect(PUBACK).id == id
                    self.acknowledged = first + _BURST
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


class Job:
    """A program with a streaming query, in a process of its own. `more`: arguments with which it does not end."""

    def __init__(self, directory: Path, checkpoint: Path, arguments: list[str], *more: str) -> None:
        self.process = LoggedProcess("job", directory / "job.log")
        self._checkpoint = checkpoint
        self._command = [sys.executable, *arguments]
        self._more = more

    def run(self) -> None:
        """Run it until it ends by itself."""
        self.stop()
        self.process.start(self._command, cwd=ROOT)
        assert self.process.wait(PATIENCE) == 0, self.process.text

    def stop(self) -> None:
        """Stop it as a scheduler does, if it runs."""
        if self.process.alive:
            self.process.send(signal.SIGTERM)
            self.process.wait(PATIENCE)

    @property
    def committed(self) -> int:
        """Batches that are complete."""
        return self._batches("commits")

    @property
    def begun(self) -> int:
        """Batches that were planned."""
        return self._batches("offsets")

    def _batches(self, log: str) -> int:
        """Return the number of the last batch in a log of the checkpoint, which keeps only so many; -1 without one."""
        directory = self._checkpoint / log
        names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def wait(self, *, begun: int = -2, committed: int = -2) -> None:
        """Wait for a batch later than these; a job that has failed is started again, as a scheduler does."""

        def reached() -> bool:
            if not self.process.alive:
                self.process.start([*self._command, *self._more], cwd=ROOT)
            return self.begun > begun and self.committed > committed

        try:
            eventually(reached, PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.process.text}") from None

    def children(self, word: str, program: str = "") -> list[psutil.Process]:
        """Return the processes below the job with a word in their command line; a parent comes before its children.

        `program`: part of the name. A process that the JVM is about to start is for a moment a copy of the JVM.
        """
        found = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if program in one.name() and any(word in argument for argument in one.cmdline()):
                    found.append(one)
            except psutil.NoSuchProcess:
                continue
        return found


def stored(server: NatsServer, topics: str) -> list[Stored]:
    """Return the stored messages of a topic filter, read without Spark."""
    options = Options.parse({"servers": server.url, "topics": topics})
    with Connection(options.access) as connection:
        found = snapshot(options, connection)
    batches = read_range(options, found, Range(found.start, found.end), Stored._fields)
    return [Stored(**row) for batch in batches for row in batch.to_pylist()]


def kill_driver(job: Job, server: NatsServer) -> None:
    """Kill Spark's JVM, which is the driver; the job then ends with an error."""
    jvm, *_ = job.children("SparkSubmit", "java")
    jvm.kill()
    assert job.process.wait(PATIENCE) != 0


def kill_worker(job: Job, server: NatsServer) -> None:
    """Kill the Python processes that plan, read and write."""
    eventually(lambda: job.children("pyspark.daemon"), PATIENCE)
    for one in job.children("pyspark.daemon"):
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue


def kill_server(job: Job, server: NatsServer) -> None:
    """Kill nats-server, which is back a moment later."""
    server.kill()
    server.start()


def kill_program(job: Job, server: NatsServer) -> None:
    """Kill the Python program that has made the session; its JVM ends by itself when it notices."""
    job.process.send(signal.SIGKILL)
    job.process.wait(PATIENCE)


KILLS: Final[list[Callable[[Job, NatsServer], None]]] = [kill_driver, kill_worker, kill_server, kill_program]


def kill_often(job: Job, server: NatsServer, gateway: Gateway, kills: int) -> int:
    """Kill so many times while a client publishes; return how many messages were acknowledged, each a number from 1 on.

    Each kind of kill comes in turn, after the plan of a batch was written and after a batch was complete.
    """
    done: Counter[str] = Counter()
    publisher = Publisher(gateway.port)
    publisher.start()
    try:
        for number, kill in enumerate(itertools.islice(itertools.cycle(KILLS), kills)):
            if number // len(KILLS) % 2:
                job.wait(committed=job.committed)
            else:
                job.wait(begun=job.begun)
            kill(job, server)
            done[kill.__name__] += 1
            job.wait(committed=job.committed)
    finally:
        published = publisher.finish()
    assert sum(done.values()) == kills
    print(f"{published} messages, {dict(done)}, {job.committed + 1} batches")
    return published
