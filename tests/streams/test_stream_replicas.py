# SPDX-License-Identifier: Apache-2.0
"""Replicas of the streams follow the size of the cluster, and a stream that is being made is waited for."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.config.nats_connect import connect_link
from mqtt_nats.config.settings import Settings
from mqtt_streams.api import Reply, call
from mqtt_streams.definitions import (
    STREAMS,
    EnsureReport,
    NotAnswering,
    StreamConflict,
    StreamSetupError,
    ensure_streams,
)
from tests.harness.cluster import Cluster
from tests.harness.nats import make_server

pytestmark = pytest.mark.processes


@contextlib.contextmanager
def cluster_of(directory: Path, size: int) -> Iterator[Cluster]:
    """A cluster that runs; JetStream may have no leader yet."""
    cluster = Cluster(directory, size=size)
    try:
        for server in cluster.servers:
            server.start()
        yield cluster
    finally:
        cluster.discard()


@contextlib.asynccontextmanager
async def inbox_at(cluster: Cluster) -> AsyncIterator[RequestInbox]:
    """Requests as a gateway makes them."""

    async def nothing() -> None:
        pass

    link = await connect_link(
        Settings(nats=(cluster.servers[0].url,)), name="test", no_echo=False, on_online=nothing, on_offline=nothing
    )
    try:
        yield RequestInbox(link)
    finally:
        await link.close()


async def replicas(js: RequestInbox) -> set[int]:
    return {(await call(js, f"STREAM.INFO.{stream}"))["config"]["num_replicas"] for stream in STREAMS}


async def until_ready(js: RequestInbox, **options: Any) -> EnsureReport:
    """A leader may have to be elected."""
    for _ in range(80):
        try:
            return await ensure_streams(js, **options)
        except NotAnswering:
            await asyncio.sleep(0.5)
    return await ensure_streams(js, **options)


@pytest.mark.long
async def test_replicas_by_the_size_of_the_cluster(tmp_path: Path) -> None:
    with cluster_of(tmp_path, 3) as cluster:
        async with inbox_at(cluster) as js:
            report = await until_ready(js)
            assert set(report.created) == set(STREAMS)
            assert await replicas(js) == {3}
            # What there is of fewer gets more, unless fewer are asked for; none loses any.
            await call(js, "STREAM.UPDATE.$MQTT_sess", report.configs["$MQTT_sess"] | {"num_replicas": 1})
            report = await until_ready(js, replicas=1)
            assert not report.upgraded
            assert f"stream {STREAMS[1]}: num_replicas is 3, stream_replicas says 1" in report.kept
            assert await replicas(js) == {1, 3}
            report = await until_ready(js)
            assert report.upgraded == {"$MQTT_sess": ["num_replicas"]}
            assert report.kept == []
            assert await replicas(js) == {3}
            with pytest.raises(StreamConflict, match=r"num_replicas is 3 but must be 5; .*too few JetStream servers"):
                await until_ready(js, replicas=5)


@pytest.mark.long
async def test_a_cluster_that_grows(tmp_path: Path) -> None:
    """Two servers cannot have three replicas. The third one comes."""
    with cluster_of(tmp_path, 2) as cluster:
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in cluster.routes)
        third = make_server(
            "process",
            tmp_path / "n2",
            config=f'server_name: "n2"\ncluster {{ name: "c", listen: "127.0.0.1:-1", routes: [{routes}] }}',
        )
        cluster.servers.append(third)
        async with inbox_at(cluster) as js:
            with pytest.raises(StreamSetupError, match=r"cannot be created: no suitable peers.*too few JetStream"):
                await until_ready(js, replicas=3)
            report = await until_ready(js)
            assert set(report.created) == set(STREAMS)
            assert await replicas(js) == {1}
            assert (report.kept, report.upgraded) == ([], {})
            report = await until_ready(js)
            assert (report.kept, report.upgraded, report.created) == ([], {}, [])
            third.start()
            for _ in range(80):
                report = await until_ready(js)
                if report.upgraded:
                    break
                await asyncio.sleep(0.5)
            assert report.upgraded == {stream: ["num_replicas"] for stream in STREAMS}
            assert await replicas(js) == {3}


@pytest.mark.long
async def test_gateways_that_begin_together_in_a_cluster(tmp_path: Path) -> None:
    """Each wants a stream of its own making, and takes the one that is being made."""
    with cluster_of(tmp_path, 3) as cluster:
        async with inbox_at(cluster) as one, inbox_at(cluster) as two, inbox_at(cluster) as three:
            reports = await asyncio.gather(*(until_ready(js) for js in (one, two, three)))
            assert set(STREAMS) <= set().union(*(report.created for report in reports))
            assert len({report.configs["$MQTT_sess"]["first_seq"] for report in reports}) == 1


class UnderWay:
    """JetStream while another gateway's request for a stream is on its way: the name is taken, the stream not there."""

    api_prefix = "$JS.API"
    max_ack_pending = 0

    async def request(
        self, subject: str, payload: bytes = b"", headers: bytes = b"", *, timeout: float = 5.0, reply: str = ""
    ) -> Reply:
        error = {"code": 400, "err_code": 10058} if ".CREATE." in subject else {"code": 404, "err_code": 10059}
        return Reply("", b"", orjson.dumps({} if subject.endswith(".INFO") else {"error": error}))

    def stream(self, subject: str, payload: bytes = b"", *, timeout: float = 5.0) -> AsyncGenerator[Reply, None]:
        raise AssertionError(subject)


async def test_a_stream_that_is_being_made_is_waited_for() -> None:
    with pytest.raises(NotAnswering, match="is being created"):
        await ensure_streams(UnderWay())
