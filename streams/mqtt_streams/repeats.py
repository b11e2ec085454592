# SPDX-License-Identifier: Apache-2.0
"""Search for messages in `$MQTT_msgs` that were sent before its duplicate window, which recognises repetitions."""

from collections.abc import Collection
from contextlib import aclosing
from typing import Final

from mqtt_streams import headers, stored
from mqtt_streams.api import JetStream, call
from mqtt_streams.messages import PREFIX, STREAM
from mqtt_streams.pages import pages_of

CLOCKS: Final = 10.0
"""Seconds by which the clocks of gateways and nats-servers may differ in this search."""


async def find_ids(js: JetStream, since: float, ids: Collection[bytes]) -> tuple[dict[bytes, int], bool]:
    """Return the sequences of the stream's messages with `Nats-Msg-Id`s in `ids`; and whether the search is complete.

    `since`: Unix time before which no such message was stored, by a clock that is at most CLOCKS off. The search is
    incomplete when a replica has answered that lags behind the leader, or the end of the stream was removed. Raises
    ApiError, NoResponders, RequestTimeout.
    """
    begin = int((since - CLOCKS) * 1e9)
    state = (await call(js, f"STREAM.INFO.{STREAM}"))["state"]
    end = int(state["last_seq"])
    found: dict[bytes, int] = {}
    if not state["messages"] or stored.time_ns(state["last_ts"]) < begin:
        return found, True
    wanted = set(ids)
    last = 0
    async with aclosing(pages_of(js, STREAM, f"{PREFIX}>", {"start_time": stored.rfc3339(begin)})) as pages:
        async for page in pages:
            for message in page:
                last = message.seq
                identity = (headers.get(message.headers, headers.MSG_ID) or "").encode()
                if identity in wanted:
                    wanted.discard(identity)
                    found[identity] = last
            if not wanted or last >= end:
                break
    return found, not wanted or last >= end
