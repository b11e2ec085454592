# SPDX-License-Identifier: Apache-2.0
"""Consumers that somebody has paused, as by `nats consumer pause`: they are resumed.

A paused consumer delivers nothing, and nothing else shows that its session waits. A pause is heard of at once by
nats-server's advisory, and otherwise when the consumer of PUBREL records is attached. See
docs/internals/sessions.md#paused-consumers.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import orjson

from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from mqtt_streams.consumers import RESUME_NS, resume_consumer
from mqtt_streams.messages import STREAM as MESSAGES
from mqtt_streams.pubrel import STREAM as OUT
from mqtt_streams.stored import time_ns
from mqtt_streams.timers import STREAM as TIMERS

if TYPE_CHECKING:
    from mqtt_nats.sessions.services import Services
    from mqtt_streams.api import JetStream

log = logging.getLogger("mqtt_nats.broker")

PAUSES: Final = tuple(f"$JS.EVENT.ADVISORY.CONSUMER.PAUSE.{stream}.*".encode() for stream in (MESSAGES, OUT, TIMERS))


def watch(services: Services) -> None:
    """Resume consumers of sessions, of groups and of timers as soon as somebody pauses them."""
    for subject in PAUSES:
        services.nats.reconnect.subscribe(subject, partial(_advised, services))


def _advised(services: Services, subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
    try:
        advisory = orjson.loads(payload)
        left = time_ns(advisory["pause_until"]) - time_ns(advisory["timestamp"]) if advisory["paused"] is True else 0
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    if left > RESUME_NS:
        stream, name = subject.decode().rsplit(".", 2)[1:]
        services.tasks.spawn(resume(services.nats.inbox, stream, name), f"resume of consumer {name}")


async def resume(js: JetStream, stream: str, name: str) -> None:
    """Resume a consumer, and say so; where JetStream does not do it, the log says that, too."""
    try:
        await resume_consumer(js, stream, name)
    except (ApiError, NoResponders, RequestTimeout) as error:
        text = "consumer %s of stream %s is paused, and delivers nothing; it cannot be resumed: %s"
        log.error(text, name, stream, " ".join(str(error).split()))
        return
    log.warning("consumer %s of stream %s was paused, and is resumed", name, stream)
