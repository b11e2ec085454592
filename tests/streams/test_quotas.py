# SPDX-License-Identifier: Apache-2.0
"""Notes of quotas, read back from a real server."""

import asyncio

import pytest

from mqtt_streams.consumers import consumer_names
from mqtt_streams.definitions import ensure_streams
from mqtt_streams.pages import PAGE_FIRST, PAGE_MESSAGES
from mqtt_streams.quotas import QuotaStore, Totals, note_subject, quota_of
from mqtt_streams.shared import STREAM
from tests.streams.support import NatsPyJetStream


@pytest.mark.long
async def test_all_notes_of_a_quota_count(js: NatsPyJetStream) -> None:
    """Also those beyond the first page; the consumer that reads these is removed."""
    await ensure_streams(js)
    quota, other, store = quota_of("ann", ""), quota_of("bob", ""), QuotaStore(js)
    assert await store.totals(quota, 2) == Totals(0, 0, {})
    for number in (0, 1, 2):
        await js.request(note_subject(quota, f"key{number}"), b"%d" % number)
    await js.request(note_subject(other, "key"), b"100")
    assert await store.totals(quota, 2) == Totals(3, 3, {"key0": 0, "key1": 1})
    many = PAGE_FIRST + PAGE_MESSAGES + 1
    for start in range(3, many, 100):
        numbers = range(start, min(start + 100, many))
        await asyncio.gather(*(js.request(note_subject(quota, f"key{number}"), b"1") for number in numbers))
    assert await store.totals(quota, 1) == Totals(many, many, {"key0": 0})
    assert await consumer_names(js, STREAM) == []
