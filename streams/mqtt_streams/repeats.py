# SPDX-License-Identifier: Apache-2.0
"""Search for messages in `$MQTT_msgs` that were sent before its duplicate window, which recognises repetitions."""

from collections.abc import Collection
from typing import Any, Final

from mqtt_streams import headers, stored
from mqtt_streams.api import JetStream, call
from mqtt_streams.messages import PREFIX, STREAM

CLOCKS: Final = 10.0
"""Seconds by which the clocks of gateways and nats-servers may differ in this search."""

_MESSAGES: Final = 512
_BYTES: Final = 2 * 1024 * 1024


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
    start: dict[str, Any] = {"start_time": stored.rfc3339(begin)}
    last = 0
    more = True
    while wanted and last < end and more:
        page, more = await stored.direct_page(js, STREAM, f"{PREFIX}>", start, messages=_MESSAGES, size=_BYTES)
        for message in page:
            last = message.seq
            identity = (headers.get(message.headers, headers.MSG_ID) or "").encode()
            if identity in wanted:
                wanted.discard(identity)
                found[identity] = last
        start = {"seq": last + 1}
    return found, not wanted or last >= end
