# SPDX-License-Identifier: Apache-2.0
"""Search for messages in `$MQTT_msgs` whose store was not acknowledged, before they are sent again."""

from collections.abc import Collection
from contextlib import aclosing
from typing import Final

from mqtt_streams import headers, stored
from mqtt_streams.api import JetStream
from mqtt_streams.messages import PREFIX, STREAM
from mqtt_streams.pages import pages_of

CLOCKS: Final = 10.0
"""Seconds by which the clocks of gateways and nats-servers may differ in this search."""


def search_key(block: bytes, subject: bytes) -> bytes:
    """Return the key of a message, or empty bytes: its `Nats-Msg-Id`, else its `Nmqtt-Id` and the subject.

    A copy that somebody else has stored under another subject has the same `Nmqtt-Id`.
    """
    known_by = headers.get(block, headers.MSG_ID)
    if known_by:
        return known_by.encode()
    identity = headers.get(block, headers.ID)
    return b"%b %b" % (identity.encode(), subject) if identity else b""


async def find_stored_keys(
    js: JetStream, keys: Collection[bytes], since: float, after: int = 0
) -> tuple[dict[bytes, int], bool]:
    """Return the sequences of the stream's messages by key (`search_key`), and whether the search is complete.

    Args:
        js: the connection.
        keys: keys of the messages.
        since: Unix time before which none of the messages was stored, by a clock that is at most `CLOCKS` off.
        after: sequence that the stream had when none of the messages was stored; 0 = not known, `since` counts.

    The search is incomplete when a replica has answered that lags behind the leader, or the end of a stream with
    replicas was removed. Raises ApiError, NoResponders, RequestTimeout: also while the stream has no leader.
    """
    begin = int((since - CLOCKS) * 1e9)
    info = await stored.settled_info(js, STREAM)
    state = info["state"]
    end = int(state["last_seq"])
    found: dict[bytes, int] = {}
    if end == after or not state["messages"] or stored.time_ns(state["last_ts"]) < begin:
        return found, True
    wanted = set(keys)
    last = 0
    start = {"seq": after + 1} if 0 < after < end else {"start_time": stored.rfc3339(begin)}
    async with aclosing(pages_of(js, STREAM, f"{PREFIX}>", start)) as pages:
        async for page in pages:
            for message in page:
                last = message.seq
                key = search_key(message.headers, message.subject.encode(errors="surrogateescape"))
                if key in wanted:
                    wanted.discard(key)
                    found[key] = last
            if not wanted or last >= end:
                break
    return found, not wanted or last >= end or info["config"]["num_replicas"] == 1
