# SPDX-License-Identifier: Apache-2.0
"""The transport that the stores need, and the JSON side of the JetStream API."""

from collections.abc import AsyncGenerator
from typing import Any, Final, NamedTuple, Protocol

import orjson

_NO_LEADER: Final = (10008, 10009)


class Reply(NamedTuple):
    """One message received in answer to a request.

    `subject` is the subject on the wire: the reply inbox, except for messages of a pull consumer,
    which arrive under their stream subject (so answers must be matched by subscription).
    `headers` is the raw block up to and including the blank line, b"" when there is none.
    `reply` is the message's own reply subject (the acknowledgement subject of a consumer's message).
    """

    subject: str
    headers: bytes
    payload: bytes
    reply: str = ""


class NoResponders(Exception):
    """Nobody listens on the request subject: no JetStream, no such stream, or no leader."""


class NoLeader(NoResponders):
    """JetStream is there, but a majority of its servers is not, or has elected no leader yet."""


class RequestTimeout(Exception):
    """No answer in time: whether the request was carried out is unknown."""


class ApiError(Exception):
    """JetStream refused a request: HTTP-like `code`, JetStream's `err_code` and its text."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} (JetStream error {err_code})")
        self.code = code
        self.err_code = err_code
        self.description = description


class JetStream(Protocol):
    """What a store asks of the NATS connection."""

    @property
    def api_prefix(self) -> str:
        """`$JS.API`, or `$JS.<domain>.API`."""

    @property
    def max_ack_pending(self) -> int:
        """Largest `max_ack_pending` of a consumer that the account allows; 0 = no limit."""

    async def request(
        self, subject: str, payload: bytes = b"", headers: bytes = b"", *, timeout: float = 5.0, reply: str = ""
    ) -> Reply:
        """Send and return one answer; `timeout` in seconds; `reply`, when given, is the literal reply subject.

        Raises NoResponders or RequestTimeout.
        """

    def stream(self, subject: str, payload: bytes = b"", *, timeout: float = 5.0) -> AsyncGenerator[Reply, None]:
        """Send and yield answers until the caller stops; `timeout` = longest wait in seconds between two.

        Raises NoResponders or RequestTimeout.
        """


def bounded_ack_pending(js: JetStream, wanted: int) -> int:
    """`max_ack_pending` of a new consumer: what is wanted, or what the account allows where that is less."""
    return min(wanted, js.max_ack_pending) if js.max_ack_pending > 0 else wanted


def decode(payload: bytes) -> dict[str, Any]:
    """Parse an API answer or a PubAck.

    Raises ApiError for `{"error":...}` and for anything that is no object, NoLeader for errors that an election ends.
    """
    try:
        answer = orjson.loads(payload)
    except orjson.JSONDecodeError:
        raise ApiError(500, 0, "JetStream's answer is not JSON") from None
    if not isinstance(answer, dict):
        raise ApiError(500, 0, "JetStream's answer is not a JSON object")
    error = answer.get("error")
    if error is not None:
        if not isinstance(error, dict):
            raise ApiError(500, 0, str(error))
        found = ApiError(int(error.get("code", 500)), int(error.get("err_code", 0)), str(error.get("description", "")))
        if found.err_code in _NO_LEADER:
            raise NoLeader(str(found))
        raise found
    return answer


async def call(js: JetStream, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One JetStream API request, `subject` without the API prefix; raises ApiError, NoResponders, RequestTimeout."""
    payload = b"" if body is None else orjson.dumps(body)
    return decode((await js.request(f"{js.api_prefix}.{subject}", payload)).payload)


async def publish(js: JetStream, subject: str, payload: bytes, headers: bytes = b"", *, reply: str = "") -> int:
    """Store one message and return its stream sequence; raises ApiError, NoResponders, RequestTimeout."""
    answer = decode((await js.request(subject, payload, headers, reply=reply)).payload)
    sequence = answer.get("seq")
    if not isinstance(sequence, int):
        raise ApiError(500, 0, "the answer to a store is not a JetStream acknowledgement")
    return sequence
