# SPDX-License-Identifier: Apache-2.0
"""The sink and a nats-server that is killed, stands still, has no stream, or does not allow everything."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client as NatsClient

from pyspark_mqtt_nats.errors import AccessError, ConnectError, RequestTimeout
from pyspark_mqtt_nats.options import Options
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.waiting import aeventually
from tests.spark.sinking import Row, Sinker, batch_of, run, stored


class TestServerThatIsAway:
    """Nothing is lost, nothing is stored twice, and the order is kept."""

    async def follow(self, url: str, name: str, count: int) -> list[bytes]:
        client: NatsClient = await nats.connect(url)
        try:
            found = await client.jetstream().subscribe(f"$MQTT.msgs.{name}.>", ordered_consumer=True)
            payloads = [(await found.next_msg(10)).data for _ in range(count)]
            assert (await found.consumer_info()).num_pending == 0
            return payloads
        finally:
            await client.close()

    @pytest.mark.parametrize("qos", [0, 1])
    async def test_killed_and_started_again(
        self, nats_factory: NatsFactory, gateway_factory: GatewayFactory, qos: int
    ) -> None:
        server = nats_factory()
        gateway_factory(server)
        rows = [{"topic": "t/a", "payload": b"%d" % number, "qos": 1} for number in range(4000)]
        extra = [{"topic": "u/a", "payload": b"%d" % number, "qos": qos} for number in range(4000)]
        mixed = [row for pair in zip(rows, extra, strict=True) for row in pair]
        sinker = Sinker(server.url, mixed, connectTimeout=20)

        def batches() -> Iterator[Any]:
            for start in range(0, 8000, 400):
                yield batch_of(mixed[start : start + 400], sinker.names)
                if start in (2000, 5200):
                    server.kill()
                    threading.Timer(0.3, server.start).start()

        found = await asyncio.to_thread(sinker.writer.write, batches())
        assert found.messages == 8000
        assert await self.follow(server.url, "t", 4000) == [row["payload"] for row in rows]
        if qos:
            assert await self.follow(server.url, "u", 4000) == [row["payload"] for row in extra]

    async def test_stream_that_is_away(self, nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
        """As while a stream has no leader: nobody answers, and later somebody does."""
        server = nats_factory()
        gateway_factory(server).term()
        rows = [{"topic": f"t/{number % 2}", "payload": b"%d" % number} for number in range(3000)]
        sinker = Sinker(server.url, rows, requestTimeout=3)
        client: NatsClient = await nats.connect(server.url)
        js = client.jetstream()
        config = (await js.stream_info("$MQTT_msgs")).config
        loop = asyncio.get_running_loop()

        def call(work: Any) -> None:
            asyncio.run_coroutine_threadsafe(work, loop).result(10)

        async def return_later() -> None:
            await asyncio.sleep(0.5)
            await js.add_stream(config)

        def batches() -> Iterator[Any]:
            yield batch_of(rows[:1000], sinker.names)
            call(aeventually(lambda: stored(js, "t")))
            call(js.delete_stream("$MQTT_msgs"))
            asyncio.run_coroutine_threadsafe(return_later(), loop)
            yield batch_of(rows[1000:], sinker.names)

        found = await asyncio.to_thread(sinker.writer.write, batches())
        assert found.messages == 3000
        payloads = await self.follow(server.url, "t", await stored(js, "t"))
        assert payloads == [row["payload"] for row in rows][-len(payloads) :]
        assert len(payloads) >= 2000
        await js.delete_stream("$MQTT_msgs")
        sinker.writer.options = Options.parse({"servers": server.url, "requestTimeout": "0.2"})
        with pytest.raises(RequestTimeout) as caught:
            await run(sinker, rows[:1])
        assert str(caught.value) == (
            "partition 0, row 0 is not stored: no stream takes it (option stream or requestTimeout)"
        )
        await client.close()

    def test_gone_for_good(self, nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
        server = nats_factory()
        gateway_factory(server)
        rows = [{"topic": "t/a", "payload": b"%d" % number} for number in range(2000)]
        sinker = Sinker(server.url, rows, connectTimeout=0.5)

        def batches() -> Iterator[Any]:
            yield batch_of(rows[:1000], sinker.names)
            server.kill()
            yield batch_of(rows[1000:], sinker.names)

        with pytest.raises(ConnectError, match=r"^the connection to \S+ was lost: .*; cannot connect to") as caught:
            sinker.writer.write(batches())
        assert "\n" not in str(caught.value)

    async def test_that_only_stands_still(self, nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
        server = nats_factory()
        gateway_factory(server)
        rows = [{"topic": "t/a", "payload": b"%d" % number, "qos": number % 2} for number in range(1000)]
        sinker = Sinker(server.url, rows, requestTimeout=0.5)

        def batches() -> Iterator[Any]:
            yield batch_of(rows[:500], sinker.names)
            server.pause()
            threading.Timer(1.0, server.resume).start()
            yield batch_of(rows[500:], sinker.names)

        assert (await asyncio.to_thread(sinker.writer.write, batches())).messages == 1000
        assert await self.follow(server.url, "t", 500) == [b"%d" % number for number in range(1, 1000, 2)]


class TestPermissions:
    CONFIG = """
    authorization { users [
      { user: admin, password: admin }
      { user: writer, password: secret, permissions { publish: ["$MQTT.msgs.>", "$JS.API.>"] } }
      { user: enough, password: secret, permissions {
        publish: ["$JS.API.STREAM.INFO.$MQTT_msgs", "$MQTT.msgs.site.>", "$MQTT.rmsgs.site.>", "site.>"
          "$JS.API.STREAM.MSG.DELETE.$MQTT_rmsgs"]
        subscribe: ["$MQTT.spark.>"]
      } }
    ] }
    """

    def test_refused_subject_is_named(self, nats_factory: NatsFactory, gateway_factory: GatewayFactory) -> None:
        server = nats_factory(config=self.CONFIG)
        gateway_factory(server.url.replace("//", "//admin:admin@"))
        sinker = Sinker(server.url, [{"topic": "t/a", "payload": b""}], user="writer", password="secret")
        with pytest.raises(AccessError) as caught:
            sinker.write()
        text = str(caught.value)
        assert 'Permissions Violation for Publish to "t.a"' in text
        assert "secret" not in text
        assert "\n" not in text
        assert caught.value.option == "user"

    def test_those_that_the_page_names_are_enough(
        self, nats_factory: NatsFactory, gateway_factory: GatewayFactory
    ) -> None:
        server = nats_factory(config=self.CONFIG)
        gateway_factory(server.url.replace("//", "//admin:admin@"))
        rows: list[Row] = [
            {"topic": "site/a", "payload": payload, "qos": qos, "retain": retain}
            for payload, qos, retain in ((b"x", 0, False), (b"x", 1, False), (b"x", 2, True), (b"", 1, True))
        ]
        assert Sinker(server.url, rows, user="enough", password="secret").write() == (4, 0)
