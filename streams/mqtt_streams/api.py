# SPDX-License-Identifier: Apache-2.0
"""Transport interface of the stores, and JSON requests and answers of the JetStream API."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final, NamedTuple, Protocol

import orjson

from mqtt_streams.error_codes import NO_LEADER

_API: Final = "$JS.API"


class Reply(NamedTuple):
    """Message that was received in answer to a request.

    `subject` is the subject on the wire: the reply inbox, but the stream subject for messages of a pull consumer
    (so answers must be matched by subscription). `headers` is the raw block including the blank line, b"" = no headers.
    `reply` is the message's reply subject (the acknowledgement subject of a consumer's message).
    """

    subject: str
    headers: bytes
    payload: bytes
    reply: str = ""


class NoResponders(Exception):
    """The request subject has no subscriber: no JetStream, no such stream, or no leader."""


class NoLeader(NoResponders):
    """JetStream has answered that no leader is elected, or that a majority of its servers is missing."""


class RequestTimeout(Exception):
    """No answer within the time-out: the request may have been carried out."""


class ApiError(Exception):
    """JetStream has refused a request: HTTP-like `code`, JetStream's `err_code` and error text."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} (JetStream error {err_code})")
        self.code = code
        self.err_code = err_code
        self.description = description


class JetStream(Protocol):
    """A NATS connection as the stores use it."""

    @property
    def api_prefix(self) -> str:
        """`$JS.API`, or `$JS.<domain>.API`."""

    @property
    def max_ack_pending(self) -> int:
        """Largest `max_ack_pending` of a consumer that the account allows; 0 = no limit."""

    async def request(
        self, subject: str, payload: bytes = b"", headers: bytes = b"", *, timeout: float = 5.0, reply: str = ""
    ) -> Reply:
        """Send a request and return one answer; `timeout` in seconds; `reply`: literal reply subject, "" = an inbox.

        Raises NoResponders or RequestTimeout.
        """

    def stream(self, subject: str, payload: bytes = b"", *, timeout: float = 5.0) -> AsyncGenerator[Reply, None]:
        """Send a request and yield answers until the caller stops; `timeout`: longest wait between two, in seconds.

        Raises NoResponders or RequestTimeout.
        """


class TellingJetStream(JetStream, Protocol):
    """A NATS connection over which others are told of what was stored."""

    def tell(self, subject: bytes, payload: bytes) -> None:
        """Publish a message that nobody answers."""


def api_prefix(domain: str | None) -> str:
    """Return the prefix of the JetStream API of a domain; None or "": of the account's own servers."""
    return f"$JS.{domain}.API" if domain else _API


def kv_subject(js: JetStream, subject: str) -> str:
    """Return the subject on which a key of a KV bucket is written; leafnodes bring none below `$KV.` to a domain."""
    return subject if js.api_prefix == _API else f"{js.api_prefix}.{subject}"


def has_leader(info: Mapping[str, Any]) -> bool:
    """Return whether a stream has a leader, from an answer to `STREAM.INFO`, where any replica answers without one."""
    cluster = info.get("cluster")
    return not cluster or bool(cluster.get("leader"))


def bounded_ack_pending(js: JetStream, wanted: int) -> int:
    """Return `max_ack_pending` of a new consumer: `wanted`, or the account's limit where that is lower."""
    return min(wanted, js.max_ack_pending) if js.max_ack_pending > 0 else wanted


def decode(payload: bytes) -> dict[str, Any]:
    """Parse an API answer or a PubAck.

    Raises ApiError for `{"error":...}` and for an answer that is no object, NoLeader for errors that an election ends.
    """
    try:
        answer = orjson.loads(payload)
    except orjson.JSONDecodeError:
        raise ApiError(500, 0, "JetStream's answer is not JSON") from None
    if not isinstance(answer, dict):
        raise ApiError(500, 0, "JetStream's answer is not a JSON object")
    if answer.get("error") is not None:
        # A variable for the exception would refer to its own frame by the traceback: only the collector frees that.
        raise _error(answer["error"])
    return answer


def _error(error: object) -> ApiError | NoLeader:
    if not isinstance(error, dict):
        return ApiError(500, 0, str(error))
    found = ApiError(int(error.get("code", 500)), int(error.get("err_code", 0)), str(error.get("description", "")))
    return NoLeader(str(found)) if found.err_code in NO_LEADER else found


async def call(
    js: JetStream, subject: str, body: dict[str, Any] | None = None, *, timeout: float = 5.0
) -> dict[str, Any]:
    """Send one JetStream API request, `subject` without API prefix; raises ApiError, NoResponders, RequestTimeout."""
    payload = b"" if body is None else orjson.dumps(body)
    return decode((await js.request(f"{js.api_prefix}.{subject}", payload, timeout=timeout)).payload)


async def publish(js: JetStream, subject: str, payload: bytes, headers: bytes = b"", *, reply: str = "") -> int:
    """Store one message and return its stream sequence; raises ApiError, NoResponders, RequestTimeout."""
    answer = decode((await js.request(subject, payload, headers, reply=reply)).payload)
    sequence = answer.get("seq")
    if not isinstance(sequence, int):
        raise ApiError(500, 0, "the answer to a store is not a JetStream acknowledgement")
    return sequence
