# SPDX-License-Identifier: Apache-2.0
"""What tests of Spark's connection to NATS share."""

import re
import time
from typing import Any

import pytest

from pyspark_mqtt_nats.errors import ConnectError
from pyspark_mqtt_nats.nats.connection import Connection
from tests.spark.servers import connect

NEWS = re.compile(rb"\AINFO .*\r\n")


def lost(connection: Connection) -> ConnectError:
    """How a connection says that it has ended."""
    with pytest.raises(ConnectError) as caught:
        receive(connection, 1 << 40)
    return caught.value


def receive(connection: Connection, size: int, timeout: float = 10.0) -> bytes:
    """At least `size` bytes, after whatever news the server has."""
    data = b""
    deadline = time.monotonic() + timeout
    while len(data) < size:
        assert time.monotonic() < deadline, f"only {len(data)} of {size} bytes came: {data[-200:]!r}"
        data = NEWS.sub(b"", data + connection.receive(0.2))
    return data


def round_trip(connection: Connection, payload: bytes = b"hello") -> None:
    """Publish to ourselves."""
    subject = b"%b.own" % connection.inbox
    connection.send(b"SUB %b 1\r\nPUB %b %d\r\n%b\r\nUNSUB 1\r\n" % (subject, subject, len(payload), payload))
    frame = b"MSG %b 1 %d\r\n%b\r\n" % (subject, len(payload), payload)
    assert receive(connection, len(frame)) == frame


def refusal(servers: str, **options: Any) -> ConnectError:
    with pytest.raises(ConnectError) as caught:
        connect(servers, **options).close()
    assert "\n" not in str(caught.value)
    assert f"option {caught.value.option})" in str(caught.value)
    return caught.value


def at_once(servers: str, **options: Any) -> ConnectError:
    """A refusal that does not wait for the time limit."""
    started = time.monotonic()
    error = refusal(servers, connectTimeout=60, **options)
    assert time.monotonic() - started < 20
    return error
