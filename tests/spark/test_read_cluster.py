# SPDX-License-Identifier: Apache-2.0
"""Reading from a cluster of nats-servers, one of which goes away."""

import pytest

from pyspark_mqtt_nats.errors import SourceError
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.nats.jetstream import PubAck, Publish, api, publish_all, stream_info
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.reading import read
from pyspark_mqtt_nats.reading.ranges import snapshot, split
from pyspark_mqtt_nats.reading.read import ReadReport, read_range
from tests.conftest import NatsFactory
from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually, free_port
from tests.spark.storing import sequences

MANY = 3000


@pytest.fixture
def servers(nats_factory: NatsFactory) -> list[NatsServer]:
    """Three servers of one cluster, with a leader."""
    ports = [free_port() for _ in range(3)]
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
    return [
        nats_factory(
            config=f'server_name: "n{number}"\ncluster {{ name: "c", listen: "127.0.0.1:{port}", routes: [{routes}] }}'
        )
        for number, port in enumerate(ports)
    ]


@pytest.mark.timeout(360)
@pytest.mark.parametrize("way", ["pull", "direct"])
def test_another_server_goes_on(servers: list[NatsServer], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that we are connected to is killed: every message once, in order, through one of the others."""
    used: list[Connection] = []

    class Noting(Connection):
        def __enter__(self) -> "Noting":
            used.append(self)
            return self

    monkeypatch.setattr(read, "Connection", Noting)
    urls = ",".join(server.url for server in servers)
    options = Options.parse(
        {"servers": urls, "stream": "S", "subjectPrefix": "s.", "readMode": way, "batchSize": 100, "requestTimeout": 3}
    )
    config = {"name": "S", "subjects": ["s.>"], "num_replicas": 3, "allow_direct": True}
    with Connection(options.access) as connection:

        def created() -> bool:
            try:
                api(connection, "STREAM.CREATE.S", config)
            except SourceError as error:
                raise AssertionError(error) from None
            return True

        eventually(created, 40, what="a leader")
        messages = [Publish(b"s.a", b"", b"%d" % number) for number in range(MANY)]
        assert all(isinstance(outcome, PubAck) for outcome in publish_all(connection, messages))
        found = snapshot(options, connection)
        assert stream_info(connection, "S")["cluster"]["replicas"]
    report = ReadReport()
    (part,) = split(found, 1)
    batches = read_range(options, found, part, ["sequence"], report)
    got = sequences(iter([next(batches)]))
    (server,) = (one for one in servers if str(one.port) == str(used[0].server).rpartition(":")[2])
    server.kill()
    got += sequences(batches)
    assert got == list(range(1, MANY + 1))
    assert report.interruptions >= 1
    assert used[-1].server != used[0].server
