# SPDX-License-Identifier: Apache-2.0
"""Requests to JetStream over a blocking connection. Every refusal is a SourceError that names the option to change."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import orjson

from mqtt_streams import api as wire
from mqtt_streams import headers
from mqtt_streams.api import Reply
from mqtt_streams.error_codes import (
    CLUSTER_NOT_AVAILABLE,
    CLUSTER_NOT_LEADER,
    CONSUMER_NOT_FOUND,
    DUPLICATE_FILTERS,
    NO_MESSAGE_FOUND,
    NOT_ENABLED,
    NOT_ENABLED_FOR_ACCOUNT,
    OVERLAPPING_FILTERS,
    STREAM_NOT_FOUND,
)
from mqtt_streams.stored import StoredMessage, message_of
from pyspark_mqtt_nats.errors import ApiError, RequestTimeout
from pyspark_mqtt_nats.nats import protocol
from pyspark_mqtt_nats.nats.connection import Connection

NO_RESPONDERS: Final = 503
"""Code of an ApiError when the subject of a request has no subscriber."""

_OPTIONS: Final = {
    CLUSTER_NOT_AVAILABLE: "servers",
    CLUSTER_NOT_LEADER: "servers",
    NOT_ENABLED_FOR_ACCOUNT: "user",
    NOT_ENABLED: "servers",
    DUPLICATE_FILTERS: "topics",
    OVERLAPPING_FILTERS: "topics",
}
"""JetStream error number -> option to change; `stream` for all others."""


def api(connection: Connection, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Send one request to the JetStream API; `verb` without the prefix, such as `STREAM.INFO.$MQTT_msgs`.

    Raises ApiError, AccessError, RequestTimeout, ConnectError.
    """
    subject = f"{connection.access.api_prefix}.{verb}"
    payload = b"" if body is None else orjson.dumps(body)
    try:
        reply = connection.request(subject, payload, timeout=connection.access.request_timeout)
        return wire.decode(reply.payload)
    except wire.ApiError as error:
        raise _refused(verb, error) from None
    except ApiError as error:
        if error.code != NO_RESPONDERS:
            raise
        raise _no_responders(connection, subject) from None


def _refused(verb: str, error: wire.ApiError) -> ApiError:
    option = _OPTIONS.get(error.err_code, "stream")
    what = f"JetStream: {' '.join(error.description.split())}"
    if error.err_code == STREAM_NOT_FOUND:
        # STREAM.INFO.<stream>, STREAM.MSG.GET.<stream>, CONSUMER.CREATE.<stream>.<consumer>
        what = f"there is no stream {verb.removeprefix('STREAM.MSG.').split('.')[1 if '.MSG.' in verb else 2]}"
    return ApiError(f"{what} (option {option})", option, error.code, error.err_code, error.description)


def _no_responders(connection: Connection, subject: str) -> ApiError:
    prefix = connection.access.api_prefix
    if prefix == "$JS.API":
        text = f"no JetStream on {connection.server}: enable it there, or give its jsDomain (option servers)"
        return ApiError(text, "servers", NO_RESPONDERS)
    option = "jsDomain" if prefix.startswith("$JS.") else "apiPrefix"
    return ApiError(f"no server answers on {subject} (option {option})", option, NO_RESPONDERS)


def stream_info(connection: Connection, stream: str, **body: Any) -> dict[str, Any]:
    """Return STREAM.INFO: `config`, `state`, `created` and more; `body` e.g. `subjects_filter=">"`."""
    return api(connection, f"STREAM.INFO.{stream}", body or None)


def create_consumer(connection: Connection, stream: str, config: dict[str, Any]) -> dict[str, Any]:
    """Create a consumer from its configuration and return its info; without a `name` the server chooses one."""
    name = config.get("name") or config.get("durable_name")
    verb = f"CONSUMER.CREATE.{stream}.{name}" if name else f"CONSUMER.CREATE.{stream}"
    return api(connection, verb, {"stream_name": stream, "config": config})


def delete_consumer(connection: Connection, stream: str, name: str) -> bool:
    """Delete a consumer; False when it did not exist."""
    try:
        api(connection, f"CONSUMER.DELETE.{stream}.{name}")
    except ApiError as error:
        if error.err_code in (CONSUMER_NOT_FOUND, STREAM_NOT_FOUND):
            return False
        raise
    return True


def get_message(connection: Connection, stream: str, **which: Any) -> StoredMessage | None:
    """Return a message from the stream's leader: `seq=5`, `last_by_subj="a.b"`, or `seq=5, next_by_subj="a.>"`."""
    try:
        return message_of(api(connection, f"STREAM.MSG.GET.{stream}", which))
    except ApiError as error:
        if error.err_code == NO_MESSAGE_FOUND:
            return None
        raise


class Publish(NamedTuple):
    """Message to store: its subject in the stream, a raw header block (b"" for none) and the payload."""

    subject: bytes
    headers: bytes
    payload: bytes


class PubAck(NamedTuple):
    """Acknowledgement: the message has this sequence, stored by this write or, when `duplicate`, by an earlier one."""

    stream: str
    seq: int
    duplicate: bool = False


def publish_all(
    connection: Connection, messages: Iterable[Publish], *, window: int = 1000, window_bytes: int = 8 << 20
) -> Iterator[PubAck | ApiError]:
    """Store messages and yield the outcome of each, in their order.

    At most `window` messages, and about `window_bytes` bytes, are unacknowledged at a time. Raises AccessError,
    ConnectError, and RequestTimeout when a message is not answered in time: messages whose outcome was not yielded may
    be stored or not.
    """
    source = iter(messages)
    waiting: deque[tuple[int, int]] = deque()  # (number of the answer, bytes), in the order of the messages
    outcomes: dict[int, PubAck | ApiError] = {}
    underway = 0
    more = True
    while more or waiting:
        frames = []
        while more and len(waiting) < window and underway < window_bytes:
            message = next(source, None)
            if message is None:
                more = False
                break
            number, reply_subject = connection.expect()
            size = len(message.headers) + len(message.payload)
            try:
                connection.check_size(size)
            except ApiError as error:
                outcomes[number] = error
                size = 0
            else:
                frames.append(protocol.publish(message.subject, message.payload, message.headers, reply_subject))
                underway += size
            waiting.append((number, size))
        connection.send(b"".join(frames))
        if waiting and waiting[0][0] not in outcomes:
            _collect(connection, waiting[0][0], outcomes)
        while waiting and waiting[0][0] in outcomes:
            number, size = waiting.popleft()
            underway -= size
            yield outcomes.pop(number)


def _collect(connection: Connection, oldest: int, outcomes: dict[int, PubAck | ApiError]) -> None:
    """Wait for the answer to the oldest message, and take all other answers that come meanwhile."""
    timeout = connection.access.request_timeout
    deadline = time.monotonic() + timeout
    while oldest not in outcomes:
        left = deadline - time.monotonic()
        if left <= 0:
            text = f"a message was not acknowledged within {timeout:g} s (option requestTimeout)"
            raise RequestTimeout(text, "requestTimeout")
        for number, reply in connection.answers(left):
            if number >= oldest:
                outcomes[number] = _outcome(reply)


def _outcome(reply: Reply) -> PubAck | ApiError:
    if not reply.payload and headers.status(reply.headers) == 503:
        return ApiError("no stream takes messages on this subject (option stream)", "stream", 503)
    try:
        answer = wire.decode(reply.payload)
    except wire.ApiError as error:
        return _refused("", error)
    sequence = answer.get("seq")
    if not isinstance(sequence, int):
        return ApiError("the answer to a message is not a JetStream acknowledgement (option stream)", "stream")
    return PubAck(str(answer.get("stream", "")), sequence, bool(answer.get("duplicate")))
