# SPDX-License-Identifier: Apache-2.0
"""Reading a subject ends early, by an answer or an error: nothing of the reading is left."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mqtt_streams.api import RequestTimeout
from mqtt_streams.qos2 import Qos2Store, held_subject
from mqtt_streams.retained import PREFIX as RETAINED
from mqtt_streams.retained import RetainedStore, set_block
from mqtt_streams.shared import ASSIGNED, SharedStore, assigned_block
from mqtt_streams.stored import rfc3339
from mqtt_streams.wills import WillStore, will_subject
from tests.harness.generators import all_closed
from tests.harness.jetstream import MemoryJetStream

CLIENT = "A" * 22
SHARE = "$share/a group/x/#"
ACK = b"$JS.ACK.$MQTT_msgs.share_group.1.5.9.1764102000000000000.0"


def assignment(number: int) -> bytes:
    return assigned_block(1, "group", number, SHARE, int(time.time() * 1e9), ACK)


async def acknowledged_up_to_a_sequence(js: MemoryJetStream) -> None:
    for number in (1, 2):
        js.put(f"{ASSIGNED}{CLIENT}.group-{number}", b"", assignment(number))
    js.now = int(time.time() * 1e9)
    await SharedStore(js).acknowledge(CLIENT, 1)


async def found_all_before_a_later_one(js: MemoryJetStream) -> None:
    """The leader of a replicated stream is asked for what replicas may lack, up to the newest message at the start."""
    store = RetainedStore(js)

    async def info() -> dict[str, Any]:
        last_seq = js.put(f"{RETAINED}a.one", b"x", set_block("a/one", 1, "origin00"))
        js.put(f"{RETAINED}a.two", b"x", set_block("a/two", 1, "origin00"))
        return {
            "ts": rfc3339(0),
            "state": {"messages": 2, "num_subjects": 2, "last_seq": last_seq, "last_ts": rfc3339(0)},
        }

    store.read_info_by(info)
    store.read_replicas(True)
    pages = [page async for page in store.matching("a.*")]
    assert [one.subject for page in pages for one in page] == ["a.one"]


async def refused_to_delete_a_will(js: MemoryJetStream) -> None:
    js.put(will_subject("gateway0", "client00"), b"no will")
    await fails(js, lambda: WillStore(js).of_gateway("gateway0"))


async def refused_to_delete_a_held_publish(js: MemoryJetStream) -> None:
    js.put(held_subject("client", 1), b"nothing")
    await fails(js, lambda: Qos2Store(js).held("client"))


async def fails(js: MemoryJetStream, read: Callable[[], Awaitable[object]]) -> None:
    """Read while no message can be removed."""

    def silent(subject: str) -> None:
        if ".STREAM.PURGE." in subject:
            raise RequestTimeout("no leader")

    js.before = silent
    with pytest.raises(RequestTimeout):
        await read()


@pytest.mark.parametrize(
    "read",
    [
        acknowledged_up_to_a_sequence,
        found_all_before_a_later_one,
        refused_to_delete_a_will,
        refused_to_delete_a_held_publish,
    ],
)
async def test_an_early_end(read: Callable[[MemoryJetStream], Awaitable[None]]) -> None:
    with all_closed():
        await read(MemoryJetStream())
