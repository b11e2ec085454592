# SPDX-License-Identifier: Apache-2.0
"""One message, followed from its publisher through the gateway's log and the stream to a Parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mqtt_nats.config.settings import Settings
from pyspark_mqtt_nats.reading.batches import Batches
from pyspark_mqtt_nats.reading.decoding import message_id
from tests.harness.inprocess import running
from tests.harness.nats import NatsServer
from tests.harness.rawclient import RawClient
from tests.observability.records import of_messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ID = "0123456789abcdef0123456789abcdef"


@pytest.mark.timeout(480)
async def test_from_publisher_to_parquet(spark: SparkSession, nats_server: NatsServer, tmp_path: Path) -> None:
    settings = Settings(listen="127.0.0.1:0", nats=(nats_server.url,), sys_interval=0)
    with of_messages() as records, running(settings) as gateway:
        async with await RawClient.connect(gateway.port, "giver") as giver:
            for qos in (1, 2):
                await giver.deliver(f"followed/{qos}", b"x", qos)
        assert [one["client"] for one in records.lines] == ["giver", "giver"]
    read = spark.read.format("mqtt_nats").options(servers=nats_server.url, topics="followed/#").load()
    read.write.parquet(str(tmp_path / "archive"))
    rows = pq.read_table(tmp_path / "archive").sort_by("sequence").to_pylist()
    assert [(row["topic"], row["publisher"]) for row in rows] == [("followed/1", "giver"), ("followed/2", "giver")]
    assert [row["message_id"] for row in rows] == [one["message_id"] for one in records.lines]


BLOCKS: dict[str, tuple[bytes, str | None]] = {
    "usual": (b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:%b\r\n\r\n" % ID.encode(), ID),
    "QoS 2": (b"NATS/1.0\r\nNmqtt-Pub:2\r\nNats-Msg-Id:q2-7\r\nNmqtt-Id:%b\r\n\r\n" % ID.encode(), ID),
    "none": (b"NATS/1.0\r\nNmqtt-Pub:1\r\n\r\n", None),
    "empty": (b"", None),
    "no block": (b"hello", None),
    "too long": (b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:%bab\r\n\r\n" % ID.encode(), None),
    "no digits": (b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:%b\r\n\r\n" % (b"z" * 32), None),
    "no UTF-8": (b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:%b\r\n\r\n" % (b"\xff" * 32), None),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_the_id_in_a_block(case: str) -> None:
    block, expected = BLOCKS[case]
    assert message_id(block) == expected
    assert column([block]) == [expected]


def test_ids_of_blocks_of_every_kind() -> None:
    assert column([block for block, _ in BLOCKS.values()]) == [expected for _, expected in BLOCKS.values()]
    assert column([]) == []


def column(blocks: list[bytes]) -> list[str | None]:
    count = len(blocks)
    numbers = pa.array(range(count), pa.int64())
    found = Batches(["message_id"]).batch(
        numbers, numbers, *(pa.array(part, pa.binary()) for part in ([b"a"] * count, blocks, [b""] * count))
    )
    return [row["message_id"] for row in found.to_pylist()]
