# SPDX-License-Identifier: Apache-2.0
"""Durable push consumers: their description in session records, management, acknowledgement subjects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mqtt_streams.api import ApiError, JetStream, NoResponders, RequestTimeout, bounded_ack_pending, call
from mqtt_streams.error_codes import CONSUMER_EXISTS, CONSUMER_GONE, CONSUMER_NAME_EXISTS, CONSUMER_NOT_FOUND
from mqtt_streams.stored import rfc3339, time_ns
from mqtt_streams.subjects import subject_to_filter

ACK_WAIT_NS: Final = 30_000_000_000

DELETED: Final = 1.0
"""Seconds without an answer after which the deletion of a consumer is repeated."""

DELETIONS: Final = 5
"""Times that the deletion of a consumer is requested."""

BACKSTOP_S: Final = 86_400
"""Seconds by which a consumer outlives the deadline of its session when no gateway runs that deletes it."""


MESSAGE_PREFIX: Final = "$MQTT.msgs."

RESUME_NS: Final = 1_000_000_000
"""Nanoseconds: a pause that ends within this time is taken for one that is being ended."""

DESCRIBED_LENGTH: Final = 200
"""Characters of a client id, and of a topic filter, in the description of a consumer; nats-server allows 4 KiB."""


class DeliverSubjectBusy(Exception):
    """The consumer's present deliver subject has interest: the former owner has not unsubscribed yet."""


class ConsumerExists(Exception):
    """A consumer with this name exists with another configuration."""


class ConsumerNotFound(Exception):
    """No consumer with this name exists."""


NOT_CHANGED: Final = (ApiError, ConsumerExists, ConsumerNotFound, DeliverSubjectBusy, NoResponders, RequestTimeout)
"""Reasons for which a consumer stays as it is."""


@dataclass(frozen=True, slots=True)
class ConsumerRef:
    """A durable push consumer with explicit acknowledgement, as nats-server's ConsumerConfig.

    `ack_wait` is in nanoseconds. `start_seq`: first stream sequence to deliver, None = new messages only.
    `inactive_threshold`: nanoseconds without interest after which the server removes the consumer, 0 = never.
    `extra`: further settings found in a record, written back unchanged. `client_id`: client of the consumer, for its
    description in nats-server. `paused`, `description`: of a consumer that was found. These three are not in the
    record's configuration.
    """

    durable_name: str
    deliver_subject: str
    filter_subject: str
    max_ack_pending: int
    ack_wait: int = ACK_WAIT_NS
    start_seq: int | None = None
    inactive_threshold: int = 0
    num_replicas: int = 0
    extra: Mapping[str, object] = field(default_factory=dict)
    client_id: str = field(default="", compare=False)
    paused: bool = field(default=False, compare=False)
    description: str = field(default="", compare=False)

    def to_config(self) -> dict[str, object]:
        """Return the JSON object as stored in a session record, keys in nats-server's order."""
        config: dict[str, object] = {
            "durable_name": self.durable_name,
            "deliver_policy": "new" if self.start_seq is None else "by_start_sequence",
        }
        if self.start_seq is not None:
            config["opt_start_seq"] = self.start_seq
        config |= {
            "ack_policy": "explicit",
            "ack_wait": self.ack_wait,
            "filter_subject": self.filter_subject,
            "replay_policy": "instant",
            "max_ack_pending": self.max_ack_pending,
            "deliver_subject": self.deliver_subject,
        }
        if not self.filter_subject:
            del config["filter_subject"]
        if self.inactive_threshold:
            config["inactive_threshold"] = self.inactive_threshold
        config["num_replicas"] = self.num_replicas
        return config | dict(self.extra)


def describe(text: str, filter_subject: str = "") -> str:
    """Return the description of a consumer: `text` (a client id, say), and the topic filter of a `$MQTT_msgs` subject.

    Both are shortened. Characters that are not printable are replaced by the replacement character.
    """
    if not filter_subject.startswith(MESSAGE_PREFIX):
        return _shown(text)
    return f"{_shown(text)}: {_shown(subject_to_filter(filter_subject[len(MESSAGE_PREFIX) :]))}"


def _shown(text: str) -> str:
    short = text if len(text) <= DESCRIBED_LENGTH else f"{text[: DESCRIBED_LENGTH - 1]}\u2026"
    return short if short.isprintable() else "".join(sign if sign.isprintable() else "\ufffd" for sign in short)


class ConsumerInfo(NamedTuple):
    """State of a consumer. Sequences are stream sequences."""

    config: dict[str, Any]
    push_bound: bool
    delivered_seq: int
    ack_floor_seq: int
    num_ack_pending: int
    num_pending: int
    num_redelivered: int = 0
    paused: bool = False
    """Whether somebody has paused the consumer for a time: it delivers nothing."""


def _info(answer: dict[str, Any]) -> ConsumerInfo:
    delivered = answer.get("delivered", {})
    return ConsumerInfo(
        answer.get("config", {}),
        bool(answer.get("push_bound", False)),
        delivered.get("stream_seq", 0),
        answer.get("ack_floor", {}).get("stream_seq", 0),
        answer.get("num_ack_pending", 0),
        answer.get("num_pending", 0),
        answer.get("num_redelivered", 0),
        is_paused(answer),
    )


def is_paused(answer: Mapping[str, Any]) -> bool:
    """Return whether an answer about a consumer says that it is paused, and not just being resumed."""
    return int(answer.get("pause_remaining", 0)) > RESUME_NS


async def _apply(js: JetStream, stream: str, consumer: ConsumerRef, action: str) -> ConsumerInfo:
    more: dict[str, object] = {"max_ack_pending": bounded_ack_pending(js, consumer.max_ack_pending)}
    if consumer.client_id:
        more["description"] = describe(consumer.client_id, consumer.filter_subject)
    body = {"stream_name": stream, "config": consumer.to_config() | more, "action": action}
    try:
        return _info(await call(js, f"CONSUMER.DURABLE.CREATE.{stream}.{consumer.durable_name}", body))
    except ApiError as error:
        if error.err_code == CONSUMER_NAME_EXISTS and action == "update":
            raise DeliverSubjectBusy(consumer.durable_name) from error
        if error.err_code in CONSUMER_EXISTS:
            raise ConsumerExists(consumer.durable_name) from error
        if error.err_code in CONSUMER_GONE:
            raise ConsumerNotFound(consumer.durable_name) from error
        raise


async def create_consumer(js: JetStream, stream: str, consumer: ConsumerRef) -> ConsumerInfo:
    """Create a consumer; creating the same consumer again is no error. Raises ConsumerExists, ApiError."""
    return await _apply(js, stream, consumer, "create")


def reader_request(
    stream: str, name: str, filters: Sequence[str], start_seq: int, idle: float, action: str = "create", **more: object
) -> dict[str, Any]:
    """Return the request for a consumer in memory, without acknowledgements, removed after ``idle`` seconds unused.

    Args:
        filters: filter subjects, which must not overlap.
        more: further settings of the consumer.
    """
    return {
        "stream_name": stream,
        "action": action,
        "config": {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": start_seq,
            "ack_policy": "none",
            "filter_subjects": list(filters),
            "replay_policy": "instant",
            "inactive_threshold": int(idle * 1e9),
            "num_replicas": 1,
            "mem_storage": True,
            **more,
        },
    }


async def update_consumer(js: JetStream, stream: str, consumer: ConsumerRef) -> ConsumerInfo:
    """Change an existing consumer. With a new deliver subject nats-server redelivers pending messages, in order.

    Raises DeliverSubjectBusy (try again until the former owner has unsubscribed), ConsumerNotFound, ApiError. Delivery
    policy and start sequence cannot change: give the values with which the consumer was created.
    """
    return await _apply(js, stream, consumer, "update")


async def delete_consumer(js: JetStream, stream: str, name: str) -> bool:
    """Delete a consumer; False when no consumer has this name. Raises ApiError, NoResponders, RequestTimeout."""
    return await _delete(js, stream, name, 5.0)


async def delete_for_good(js: JetStream, stream: str, name: str) -> bool:
    """Delete a consumer whose name is never used again; False when no consumer had this name.

    nats-server (2.15.1) deletes a consumer that has no leader, and does not answer. So the request is repeated, and the
    next answer is that no consumer has this name. A repeated request may be late: under the same name it would delete
    the next consumer. Raises ApiError, NoResponders, RequestTimeout.
    """
    for earlier in range(DELETIONS - 1):
        try:
            return await _delete(js, stream, name, DELETED) or earlier > 0
        except RequestTimeout:
            continue
    await _delete(js, stream, name, DELETED)
    return True


async def _delete(js: JetStream, stream: str, name: str, timeout: float) -> bool:
    try:
        await call(js, f"CONSUMER.DELETE.{stream}.{name}", timeout=timeout)
    except ApiError as error:
        if error.err_code == CONSUMER_NOT_FOUND:
            return False
        raise
    return True


async def resume_consumer(js: JetStream, stream: str, name: str) -> None:
    """End the pause of a consumer within a second. Raises ApiError, NoResponders, RequestTimeout.

    nats-server (2.15.1) looks for messages when the time of a pause is over, and not when a pause is ended before its
    time: a message that was stored during the pause would wait for the next one. So the pause gets an early end.
    """
    now = time_ns((await call(js, f"CONSUMER.INFO.{stream}.{name}"))["ts"])
    await call(js, f"CONSUMER.PAUSE.{stream}.{name}", {"pause_until": rfc3339(now + RESUME_NS // 2)})


async def consumer_info(js: JetStream, stream: str, name: str) -> ConsumerInfo | None:
    """Return the state of a consumer, None when no consumer has this name."""
    try:
        return _info(await call(js, f"CONSUMER.INFO.{stream}.{name}"))
    except ApiError as error:
        if error.err_code == CONSUMER_NOT_FOUND:
            return None
        raise


async def existing_consumer(js: JetStream, stream: str, name: str, client_id: str) -> ConsumerRef | None:
    """Return the present configuration of a client's consumer, None when no consumer has this name."""
    info = await consumer_info(js, stream, name)
    if info is None:
        return None
    config = info.config
    return ConsumerRef(
        name,
        config.get("deliver_subject", ""),
        config.get("filter_subject", ""),
        config.get("max_ack_pending", 0),
        config.get("ack_wait", ACK_WAIT_NS),
        config.get("opt_start_seq"),
        config.get("inactive_threshold", 0),
        config.get("num_replicas", 0),
        client_id=client_id,
        paused=info.paused,
        description=config.get("description", ""),
    )


async def consumer_names(js: JetStream, stream: str, prefix: str = "") -> list[str]:
    """Return the names of a stream's consumers that start with `prefix`. Expensive: nats-server lists all consumers."""
    names: list[str] = []
    offset = 0
    while True:
        answer = await call(js, f"CONSUMER.NAMES.{stream}", {"offset": offset})
        page = answer.get("consumers") or []
        names += [name for name in page if name.startswith(prefix)]
        offset += len(page)
        if not page or offset >= answer.get("total", 0):
            return names


class Ack(NamedTuple):
    """Content of an acknowledgement subject; `delivered` counts from 1, `timestamp_ns`: store time since 1970."""

    stream: str
    consumer: str
    delivered: int
    stream_seq: int
    consumer_seq: int
    timestamp_ns: int
    pending: int


def parse_ack(reply: bytes) -> Ack | None:
    """Read `$JS.ACK...` with 9 tokens, or with domain and account (11 tokens or more); None for any other subject."""
    tokens = reply.split(b".")
    at = 2 if len(tokens) == 9 else 4
    if len(tokens) < 9 or len(tokens) == 10 or tokens[1] != b"ACK":
        return None
    try:
        return Ack(
            tokens[at].decode(),
            tokens[at + 1].decode(),
            int(tokens[at + 2]),
            int(tokens[at + 3]),
            int(tokens[at + 4]),
            int(tokens[at + 5]),
            int(tokens[at + 6]),
        )
    except ValueError:
        return None


def backstop(expiry: int | None) -> int:
    """Return the inactive threshold (nanoseconds, 0 = none) of consumers of a session with `expiry` in seconds."""
    return 0 if expiry is None else (expiry + BACKSTOP_S) * 1_000_000_000
