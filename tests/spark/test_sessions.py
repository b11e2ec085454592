# SPDX-License-Identifier: Apache-2.0
"""`mode` sessions: sessions and their positions as a table."""

import pickle
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from mqtt_streams.positions import Position, position_subject
from mqtt_streams.sessions import V5, SessionRecord
from pyspark_mqtt_nats import schema, sessions
from pyspark_mqtt_nats.errors import OptionError
from pyspark_mqtt_nats.nats.jetstream import Publish, api
from pyspark_mqtt_nats.options import Options
from pyspark_mqtt_nats.source import MqttNatsSource
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.nats import ROOT, NatsServer
from tests.harness.raw5 import SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import eventually
from tests.spark.storing import SOURCE, Store


def table(url: str, *names: str, **options: str) -> dict[str, dict[str, Any]]:
    """The rows by client id, as a task reads them."""
    whole = sessions.spark_schema()
    wanted = StructType([whole[name] for name in dict.fromkeys(("client_id", *names))]) if names else whole
    source: MqttNatsSource = pickle.loads(pickle.dumps(MqttNatsSource({"servers": url, "mode": "sessions", **options})))
    reader = pickle.loads(pickle.dumps(source.reader(wanted)))
    (partition,) = reader.partitions()
    rows = [row for batch in reader.read(partition) for row in batch.to_pylist()]
    found = {row["client_id"] or "": row for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.timeout(300)
def test_sessions_of_a_gateway(spark: SparkSession, nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
    server = nats_factory()
    gateway = gateway_factory(server)
    begun = datetime.now(UTC) - timedelta(seconds=1)
    with Raw5.open(gateway.port, "lamp", prop(SESSION_EXPIRY, 3600)) as lamp:
        lamp.subscribed(("home/+", 1), ("$share/g/jobs/#", 1))
    with Raw5.open(gateway.port, "sender") as sender:
        for number in range(5):
            sender.deliver("home/x", b"%d" % number)
    eventually(lambda: table(server.url, "deadline")["lamp"]["deadline"], 30)
    read = spark.read.format(SOURCE).option("servers", server.url).option("mode", "sessions").load()
    assert read.schema == sessions.spark_schema()
    (row,) = read.where("client_id = 'lamp'").collect()
    assert (row.kind, row.user, row.expiry, row.error) == ("durable", None, 3600, None)
    assert [tuple(one) for one in row.subscriptions] == [("home/+", 1)]
    assert [tuple(one) for one in row.shared_subscriptions] == [("$share/g/jobs/#", 1)]
    assert row.written.astimezone(UTC) > begun
    assert row.deadline.astimezone(UTC) > begun + timedelta(seconds=3500)
    (consumer,) = row.consumers
    assert (consumer.in_flight, consumer.waiting) == (0, 5)
    with pytest.raises(Exception, match="mode has no effect for a write"):
        read.select("client_id").write.format(SOURCE).options(servers=server.url, mode="sessions").mode("append").save()


def put_record(store: Store, record: SessionRecord) -> None:
    store.publish(Publish(f"{store.prefix}{record.key}".encode(), b"", record.encode()))


def test_positions_and_records_that_cannot_be_read(nats_factory: NatsFactory) -> None:
    """A position counts while its id is that in the record; each session comes once, with its last record."""
    server = nats_factory()
    with Store(server.url, max_msgs_per_subject=1) as store:
        for client_id, position in (("a", "p1"), ("b", "p2"), ("c", "")):
            put_record(store, SessionRecord(client_id, v5=V5(pos=position, user="me" if client_id == "a" else None)))
        put_record(store, SessionRecord("d", clean=True, subs={"x.>": 1, "x": 1, "y.*": 0}))
        put_record(store, SessionRecord("c", v5=V5(kind="regular", expiry=0)))
        store.publish(Publish(f"{store.prefix}bad".encode(), b"", b"{"))
        api(store.connection, "STREAM.CREATE.$MQTT_pos", {"name": "$MQTT_pos", "subjects": ["$MQTT.pos.>"]})
        for client_id, position in (("a", "p1"), ("b", "other")):
            data = Position(position, reached=7, pending={8: 1, 9: 2}).encode()
            store.publish(Publish(position_subject(SessionRecord(client_id).key).encode(), b"", data))
        found = table(server.url, *[name for name in sessions.COLUMNS if name != "consumers"], **own(store))
    assert set(found) == {"a", "b", "c", "d", ""}
    assert (found["a"]["reached"], found["a"]["in_flight"], found["a"]["user"]) == (7, 2, "me")
    assert found["a"]["position_time"] is not None
    assert (found["b"]["reached"], found["b"]["position_time"], found["b"]["kind"]) == (None, None, "durable")
    assert found["c"]["kind"] == "regular"
    assert (found["d"]["kind"], found["d"]["deadline"]) == (None, None)
    assert "not JSON" in found[""]["error"]


def own(store: Store) -> dict[str, str]:
    return {"stream": store.stream, "subjectPrefix": store.prefix}


def test_without_positions(nats_factory: NatsFactory) -> None:
    """Without `$MQTT_pos`, and without `$MQTT_msgs`, whose consumers are listed for their column only."""
    with Store(nats_factory().url, max_msgs_per_subject=1) as store:
        put_record(store, SessionRecord("a"))
        assert table(store.url, "reached", **own(store))["a"]["reached"] is None


def test_the_schema_is_the_same_for_spark_and_on_the_page() -> None:
    assert to_arrow_schema(sessions.spark_schema(), timezone="UTC").equals(
        schema.arrow_schema(list(sessions.COLUMNS), sessions.COLUMNS)
    )
    page = (ROOT / "docs" / "spark.md").read_text(encoding="utf-8")
    section = page.partition("\n### Sessions\n")[2].partition("\n## ")[0]
    for column in sessions.COLUMNS.values():
        assert f"| `{column.name}` | `{column.ddl}` | {column.doc} |" in section


@pytest.mark.parametrize(
    "option", [{"topics": "a"}, {"startingSequence": "1"}, {"decoders": '{"a": "text"}'}, {"numPartitions": "2"}]
)
def test_options_that_mean_nothing_for_sessions(option: dict[str, str]) -> None:
    (name,) = option
    with pytest.raises(OptionError, match=f"{name} has no effect with mode sessions"):
        Options.parse({"mode": "sessions", **option})


@pytest.mark.parametrize("mode", ["retained", "sessions"])
@pytest.mark.parametrize("option", [{"numPartitions": "2"}, {"readMode": "pull"}, {"failOnDataLoss": "false"}])
def test_options_of_ranges_mean_nothing_for_the_present(mode: str, option: dict[str, str]) -> None:
    (name,) = option
    with pytest.raises(OptionError, match=f"{name} has no effect with mode {mode}"):
        Options.parse({"mode": mode, **option})


def test_a_column_that_there_is_not(nats_server: NatsServer) -> None:
    with Store(nats_server.url) as store, pytest.raises(OptionError, match="did you mean 'client_id'"):
        MqttNatsSource({"servers": store.url, "mode": "sessions", **own(store)}).reader(
            StructType().add("clientid", "string")
        )
