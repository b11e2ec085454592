# SPDX-License-Identifier: Apache-2.0
"""Streams of a test's own, filled without a gateway, and what a user would write to read them."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import PubAck, Publish, api, get_message, publish_all, stream_info
from pyspark_mqtt_nats.options import Options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NAMES = itertools.count()
SOURCE = "mqtt_nats"
QOS1 = b"NATS/1.0\r\nNmqtt-Pub:1\r\n\r\n"


class Store:
    """A stream of its own, whose messages are numbers in decimal; ``with`` closes its connection."""

    def __init__(self, url: str, **config: Any) -> None:
        self.url = url
        self.stream = f"store{next(_NAMES)}"
        self.prefix = f"{self.stream}."
        self.closing = ExitStack()
        """Whatever ends with the store."""
        self.connection = self.closing.enter_context(Connection(Options.parse({"servers": url}).access))
        self.config = {"name": self.stream, "subjects": [f"{self.prefix}>"], "allow_direct": True, **config}
        self.create()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.closing.close()

    def api(self, verb: str, **body: Any) -> dict[str, Any]:
        """A request to JetStream about the stream."""
        return api(self.connection, f"{verb.partition(' ')[0]}.{self.stream}{verb.partition(' ')[2]}", body or None)

    def create(self) -> None:
        """Make the stream."""
        self.api("STREAM.CREATE", **self.config)

    def recreate(self) -> None:
        """Delete the stream and make it anew, empty."""
        while True:
            self.api("STREAM.DELETE")
            self.create()
            if not self.state["messages"]:
                return
            # nats-server was still removing the files of the former one, and has found some of them.

    def put(
        self, numbers: Iterable[int], subject: Callable[[int], str] = lambda number: f"a.{number % 3}"
    ) -> list[int]:
        """Store these numbers, each on the subject that is given for it; their sequences."""
        messages = (Publish((self.prefix + subject(one)).encode(), QOS1, b"%d" % one) for one in numbers)
        return [_sequence(outcome) for outcome in publish_all(self.connection, messages)]

    def publish(self, message: Publish) -> None:
        """Store a message, in whatever stream."""
        assert all(isinstance(outcome, PubAck) for outcome in publish_all(self.connection, [message]))

    def put_payloads(self, messages: Iterable[tuple[str, bytes]]) -> None:
        """Store (subject, payload)."""
        outcomes = publish_all(
            self.connection, (Publish((self.prefix + subject).encode(), QOS1, payload) for subject, payload in messages)
        )
        assert all(isinstance(outcome, PubAck) for outcome in outcomes)

    def delete(self, sequences: Iterable[int]) -> None:
        """Remove single messages."""
        for sequence in sequences:
            self.api("STREAM.MSG.DELETE", seq=sequence)

    def purge_before(self, sequence: int) -> None:
        """Remove all messages before this sequence."""
        self.api("STREAM.PURGE", seq=sequence)

    @property
    def state(self) -> dict[str, Any]:
        """The state of the stream."""
        found: dict[str, Any] = stream_info(self.connection, self.stream)["state"]
        return found

    def time_of(self, sequence: int) -> int:
        """When a message was stored, in nanoseconds since 1970."""
        message = get_message(self.connection, self.stream, seq=sequence)
        assert message is not None
        return message.time_ns

    def given(self, **options: Any) -> dict[str, str]:
        """Options as Spark gives them to a source."""
        where = {"servers": self.url, "stream": self.stream, "subjectPrefix": self.prefix}
        return {key: str(value) for key, value in {**where, **options}.items()}

    def options(self, **options: Any) -> Options:
        """Options, parsed."""
        return Options.parse(self.given(**options))

    def load(self, spark: "SparkSession", **options: Any) -> "DataFrame":
        """``spark.read`` of the stream."""
        return spark.read.format(SOURCE).options(**self.given(**options)).load()

    def load_stream(self, spark: "SparkSession", **options: Any) -> "DataFrame":
        """``spark.readStream`` of the stream."""
        return spark.readStream.format(SOURCE).options(**self.given(**options)).load()


def _sequence(outcome: object) -> int:
    assert isinstance(outcome, PubAck), outcome
    return outcome.seq


def sequences(batches: Iterator[pa.RecordBatch]) -> list[int]:
    """The column `sequence` of record batches."""
    return [number for batch in batches for number in batch.column("sequence").to_pylist()]


def complaint(error: BaseException) -> str:
    """The one line that tells a user of Spark what is wrong; a failure where there is none, or more than one."""
    lines = re.findall(r"^.*pyspark_mqtt_nats\.errors\.\w+: (.*)$", str(error), re.MULTILINE)
    assert len(set(lines)) == 1, str(error)
    return str(lines[0])
