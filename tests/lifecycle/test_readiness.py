# SPDX-License-Identifier: Apache-2.0
"""Readiness: when JetStream is asked, what its answers mean, and what the log says of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest

from mqtt_nats.backbone.acked_publisher import AckedPublisher
from mqtt_nats.backbone.connect import NatsLinks
from mqtt_nats.lifecycle import readiness
from mqtt_nats.lifecycle.lease import Lease
from mqtt_nats.lifecycle.readiness import PROBE, Readiness, explain
from mqtt_streams.api import ApiError, NoLeader, NoResponders, RequestTimeout
from tests.harness.doubles import stands_for
from tests.harness.waiting import aeventually
from tests.sessions.fakes import FakeInbox, FakeLink, FakeStore, as_inbox, as_link

pytestmark = pytest.mark.sources

PURGE = "$JS.API.STREAM.PURGE.KV_MQTT_gateways"
MESSAGES = "$MQTT_msgs"
NO_LEADER = {"replicas": [{"name": "b"}]}


@stands_for(Lease)
class FakeLease:
    """Stands for `Lease`: when it was renewed, and why it is not renewed."""

    def __init__(self) -> None:
        self.proven = -math.inf
        self.fake_obstacle = ""
        self.fake_looks = 0

    @property
    def obstacle(self) -> str:
        self.fake_looks += 1
        return self.fake_obstacle


@stands_for(AckedPublisher)
class FakeOutages(FakeStore):
    """Stands for `AckedPublisher`: which streams do not store."""

    def __init__(self) -> None:
        super().__init__()
        self.outages: list[str] = []
        self.full = ""


class Gateway:
    """The readiness of a gateway, with what it depends on."""

    def __init__(self) -> None:
        self.js, self.store, self.lease = FakeInbox(), FakeOutages(), FakeLease()
        link = as_link(FakeLink())
        self.nats = NatsLinks(link, link, link, as_inbox(self.js), cast("AckedPublisher", self.store))
        self.readiness = Readiness(self.nats, cast("Lease", self.lease))

    @property
    def reason(self) -> str:
        return self.readiness.reason

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Look at JetStream again and again."""
        task = asyncio.create_task(self.readiness.watch_jetstream())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def looked(self, times: int = 3) -> None:
        """Wait for a few more probes."""
        count = self.js.asked.count(PURGE)
        await aeventually(lambda: self.js.asked.count(PURGE) >= count + times)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer counts for no time, so that each look is a probe."""
    monkeypatch.setattr(readiness, "ANSWER_COUNTS_S", -1e-9)
    monkeypatch.setattr(readiness, "READINESS_CHECK_S", 0.0)


def fail(error: Exception, of: str = PURGE) -> Callable[[str], None]:
    """Requests on a subject fail."""

    def failing(subject: str) -> None:
        if subject == of:
            raise error

    return failing


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NoLeader("no leader"), "JetStream has no leader: that takes a majority of its nats-servers"),
        (NoResponders("nobody"), "JetStream is not there"),
        (RequestTimeout("no answer"), "JetStream does not answer"),
        (ApiError(503, 10008, "temporarily unavailable"), "temporarily unavailable (JetStream error 10008)"),
    ],
)
async def test_without_jetstream_the_gateway_is_not_ready(
    error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = Gateway()
    gateway.js.before = fail(error)
    async with gateway.kept():
        await aeventually(lambda: gateway.reason == reason)
        await gateway.looked()
        gateway.js.before = lambda subject: None
        await aeventually(lambda: gateway.reason == "")
    assert [one.getMessage() for one in caplog.records] == [
        f"not ready: {reason}; publishes are not acknowledged",
        "ready again",
    ], "a reason is logged once"


async def test_a_stream_without_a_leader() -> None:
    gateway = Gateway()
    gateway.js.cluster = dict(NO_LEADER)
    async with gateway.kept():
        await aeventually(lambda: gateway.reason == "stream $MQTT_msgs has no leader")
        gateway.js.cluster["leader"] = "b"
        await aeventually(lambda: gateway.reason == "")


async def test_a_probe_changes_nothing() -> None:
    """A leader that is cut off answers queries, and carries out no change: so a change is asked for."""
    gateway = Gateway()
    gateway.js.put("$KV.MQTT_gateways.lease", b"{}")
    async with gateway.kept():
        await gateway.looked()
    assert gateway.js.subjects("KV_MQTT_gateways") == ["$KV.MQTT_gateways.lease"]
    assert PROBE.startswith("$KV.MQTT_gateways.")


async def test_a_lease_that_was_renewed_needs_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe costs a majority of the servers as much as a store."""
    monkeypatch.setattr(readiness, "ANSWER_COUNTS_S", 60.0)
    gateway = Gateway()
    gateway.lease.proven = asyncio.get_running_loop().time()
    async with gateway.kept():
        await aeventually(lambda: gateway.lease.fake_looks > 3)
        assert gateway.js.asked == []
        gateway.store.outages = [MESSAGES]
        await gateway.looked(1)


async def test_a_renewed_lease_ends_what_the_last_probe_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "ANSWER_COUNTS_S", 60.0)
    gateway = Gateway()
    gateway.js.before = fail(NoResponders("nobody"))
    async with gateway.kept():
        await aeventually(lambda: gateway.reason == "JetStream is not there")
        gateway.lease.proven = asyncio.get_running_loop().time()
        await aeventually(lambda: gateway.reason == "")


async def test_streams_that_do_not_store_are_probed_too() -> None:
    gateway = Gateway()
    gateway.store.outages = [MESSAGES, "$MQTT_out"]
    async with gateway.kept():
        await aeventually(lambda: gateway.reason == "JetStream does not store to $MQTT_msgs, $MQTT_out")
        await aeventually(lambda: "$JS.API.STREAM.PURGE.$MQTT_out" in gateway.js.asked)
        gateway.store.full = "JetStream storage is full: a test"
        await aeventually(lambda: gateway.reason == "JetStream storage is full: a test")
        gateway.store.full, gateway.store.outages = "", []
        await aeventually(lambda: gateway.reason == "")


async def test_while_a_probe_is_not_answered_an_outage_is_known() -> None:
    """The answer may take as long as an election."""
    gateway = Gateway()
    gateway.store.outages = [MESSAGES]
    seen: list[str] = []
    gateway.js.before = lambda subject: seen.append(gateway.reason)
    async with gateway.kept():
        await aeventually(lambda: bool(seen))
    assert seen[0] == "JetStream does not store to $MQTT_msgs"


async def test_without_nats_nothing_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    """The lost connection is a warning of its own, so this is none."""
    caplog.set_level("INFO")
    gateway = Gateway()
    gateway.nats.online.clear()
    gateway.store.outages = [MESSAGES]
    async with gateway.kept():
        await aeventually(lambda: gateway.reason == "not connected to NATS")
        assert gateway.js.asked == []
        gateway.store.outages = []
        gateway.nats.online.set()
        await aeventually(lambda: gateway.reason == "")
    assert [(one.levelname, one.getMessage()) for one in caplog.records if "ready" in one.getMessage()] == [
        ("INFO", "not ready: not connected to NATS; publishes are not acknowledged"),
        ("INFO", "ready again"),
    ]


async def test_a_lease_that_is_not_renewed_refuses_new_clients(caplog: pytest.LogCaptureFixture) -> None:
    gateway = Gateway()
    gateway.lease.fake_obstacle = "the lease is not renewed: a test"
    async with gateway.kept():
        await aeventually(lambda: gateway.reason == "the lease is not renewed: a test")
        gateway.js.before = fail(NoResponders("nobody"))
        await aeventually(lambda: gateway.reason == "JetStream is not there")
    assert [one.getMessage() for one in caplog.records] == [
        "not ready: the lease is not renewed: a test; new clients are refused",
        "not ready: JetStream is not there; publishes are not acknowledged",
    ]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            ApiError(500, 10077, "write /data/1.blk:\n no space left on device"),
            "JetStream storage is full: no space left on the disk; restart nats-server when there is room",
        ),
        (
            ApiError(503, 10023, "insufficient resources"),
            "JetStream storage is full: insufficient resources (JetStream error 10023)",
        ),
        (ApiError(400, 10071, "wrong  last\nsequence"), "wrong last sequence (JetStream error 10071)"),
        (RequestTimeout("no answer in 5 s"), "no answer in 5 s"),
        (NoResponders("nobody"), "no server answers, on nobody"),
    ],
)
def test_an_error_is_one_line_that_says_what_to_do(error: ApiError | NoResponders | RequestTimeout, text: str) -> None:
    assert explain(error) == text
