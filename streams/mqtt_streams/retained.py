# SPDX-License-Identifier: Apache-2.0
"""`$MQTT_rmsgs`: the retained message of each topic, in nats-server's format.

A tombstone (RFlags -1, empty body) removes a retained message, because nats-server's listeners keep copies in memory
and notice no other removal; the gateway that wrote the tombstone deletes it.
"""

from base64 import b64decode
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, Final, NamedTuple

import orjson

from mqtt_streams import headers, stored
from mqtt_streams.api import JetStream, NoLeader, call, has_leader
from mqtt_streams.consumers import consumer_info, consumer_names
from mqtt_streams.pages import PAGE_BYTES, PAGE_MESSAGES, SubjectReader
from mqtt_streams.stored import StoredMessage
from mqtt_streams.subjects import readable_topic, starts_with_wildcard, visible_to_wildcard

STREAM: Final = "$MQTT_rmsgs"
PREFIX: Final = "$MQTT.rmsgs."
PAGES_EARLY: Final = 2
"""Pages that a caller may read for each of many filters before it uses the first page."""

_FLAGS: Final = f"\r\n{headers.R_FLAGS}:".encode()
_QOS: Final = {b"%x\r\n" % nibble: nibble >> 1 & 3 for nibble in range(16) if nibble >> 1 & 3 != 3}
_MARKER: Final = f"\r\n{headers.MARKER_REASON}:".encode()


class RetainedMessage(NamedTuple):
    """A retained message; `subject` has no prefix, `headers` is the raw block, `time_ns` the store time since 1970."""

    subject: str
    qos: int
    payload: bytes
    headers: bytes
    seq: int
    time_ns: int


def retained_subject(subject: str) -> str:
    """Return the subject under which the retained message of `subject` is stored."""
    return PREFIX + subject


def set_block(topic: str, flags: int, origin: str, lines: bytes = b"") -> bytes:
    """Return the header block of a retained message.

    `flags`: flags nibble of the PUBLISH (1, 3, 5 for QoS 0, 1, 2); `origin`: this gateway's 8-character id; `lines`:
    further ready header lines (`Name:value` CR LF, repeated).
    """
    return b"NATS/1.0\r\n%bNmqtt-RTopic:%b\r\nNmqtt-RFlags:%x\r\nNmqtt-ROrigin:%b\r\n%b\r\n" % (
        headers.REPLACES,
        readable_topic(topic).encode(),
        flags,
        origin.encode(),
        lines,
    )


def tombstone_block(topic: str, origin: str, lines: bytes = b"") -> bytes:
    """Return the header block of a tombstone; its payload is empty. `lines`: further ready header lines."""
    return b"NATS/1.0\r\n%bNmqtt-RTopic:%b\r\nNmqtt-RFlags:-1\r\nNmqtt-ROrigin:%b\r\n%b\r\n" % (
        headers.REPLACES,
        readable_topic(topic).encode(),
        origin.encode(),
        lines,
    )


def parse(message: StoredMessage) -> RetainedMessage | None:
    """Read a retained message; None for a tombstone, an expiry marker, or an unusable record or subject."""
    block = message.headers
    payload = message.payload
    if not payload or _MARKER in block or message.is_answer:
        return None
    name = message.subject
    if not name.isascii() and any("\ud800" <= sign <= "\udfff" for sign in name):
        return None
    at = block.find(_FLAGS)
    qos = -1 if at < 0 else _QOS.get(block[at + len(_FLAGS) : at + len(_FLAGS) + 3], -1)
    if qos < 0:  # not the form of gateways and present nats-servers
        unusual = _unusual(block, payload)
        if unusual is None:
            return None
        qos, payload = unusual
    return RetainedMessage(name.removeprefix(PREFIX), qos, payload, block, message.seq, message.time_ns)


def _unusual(block: bytes, payload: bytes) -> tuple[int, bytes] | None:
    """Return QoS and payload of a record with unusual or no flags; None for a tombstone or an unusable record."""
    flags = headers.get(block, headers.R_FLAGS)
    if flags is None:
        body = _json_body(payload)
        if body is None:
            return None
        nibble, payload = body
    elif len(flags) == 1 and flags in "0123456789abcdefABCDEF":
        nibble = int(flags, 16)
    else:
        return None
    qos = nibble >> 1 & 3
    return None if qos == 3 else (qos, payload)


def _json_body(payload: bytes) -> tuple[int, bytes] | None:
    """Return flags and payload from the format of older nats-servers, one JSON object; None for any other body."""
    try:
        body = orjson.loads(payload)
        flags = body.get("flags", 0)
        message = b64decode(body["msg"], validate=True)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(flags, int) or isinstance(flags, bool) or not 0 <= flags < 15 or not message:
        return None
    return flags, message


def _matches(filter_subject: str, found: Iterable[StoredMessage]) -> list[RetainedMessage]:
    """Return the usable retained messages, without those hidden from a filter that begins with a wildcard."""
    messages = [message for message in map(parse, found) if message is not None]
    if starts_with_wildcard(filter_subject):
        return [message for message in messages if visible_to_wildcard(message.subject)]
    return messages


async def listener_has_clients(js: JetStream) -> bool:
    """Whether nats-server's own MQTT listener serves clients in the account: it has a consumer, gateways have none.

    Raises ApiError, NoResponders, RequestTimeout.
    """
    for name in await consumer_names(js, STREAM, STREAM + "_"):
        info = await consumer_info(js, STREAM, name)
        if info is not None and info.push_bound:
            return True
    return False


class RetainedStore:
    """Store that reads retained messages by direct get; needs `allow_direct` on the stream.

    `replicated`: the stream has replicas, which may lag: a single message is then read from the leader.
    """

    def __init__(self, js: JetStream) -> None:
        self._js = js
        self.replicated = False
        self._info: Callable[[], Awaitable[dict[str, Any]]] = self.info

    def read_replicas(self, replicated: bool) -> None:
        """Set whether the stream has replicas, which may lag."""
        self.replicated = replicated

    async def info(self) -> dict[str, Any]:
        """Return JetStream's answer to `STREAM.INFO`."""
        return await call(self._js, f"STREAM.INFO.{STREAM}")

    def read_info_by(self, info: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        """Have `matching` read the state of the stream by `info`, whose answer is later than the call."""
        self._info = info

    async def get(self, subject: str) -> RetainedMessage | None:
        """Return the retained message of one subject (no wildcards), None without one."""
        look = stored.get_last if self.replicated else stored.direct_get_last
        message = await look(self._js, STREAM, PREFIX + subject)
        return None if message is None else parse(message)

    async def matching(
        self, filter_subject: str, start_seq: int = 0, early: int = 0
    ) -> AsyncGenerator[list[RetainedMessage], None]:
        """Yield pages of the retained messages that match, oldest first, from stream sequence `start_seq` on.

        The last message is the newest one at the start, so the generator ends also while messages are being retained. A
        page is fetched when the caller asks for it; a caller that stops earlier closes the generator. Subjects hidden
        from wildcards are left out. In a cluster, a replica that answers a direct get may lack the newest messages, so
        the leader tells what follows the last page.

        `early`: bytes (about) of each of the first `PAGES_EARLY` pages; 0 = as for the other pages.

        Raises NoLeader where any replica may have told the last sequence, ApiError, NoResponders, RequestTimeout.
        """
        if "*" not in filter_subject and ">" not in filter_subject:
            only = await self.get(filter_subject)
            if only is not None and only.seq >= start_seq:
                yield [only]
            return
        info = await self._info()
        if not has_leader(info):
            raise NoLeader(f"stream {STREAM} has no leader")
        last_seq = info["state"]["last_seq"]
        seq = max(start_seq, 1)
        former = await stored.several(self._js, STREAM, PREFIX + filter_subject, info["state"])
        reader = SubjectReader(self._js, STREAM, PREFIX + filter_subject, {"seq": seq}, former)
        read = 0
        try:
            while reader.more and seq <= last_seq:
                read += 1
                raw = await reader.page(PAGE_MESSAGES, early if early and read <= PAGES_EARLY else PAGE_BYTES)
                if raw:
                    seq = raw[-1].seq + 1
                if page := _matches(filter_subject, (one for one in raw if one.seq <= last_seq)):
                    yield page
        finally:
            await reader.close()
        if self.replicated and seq <= last_seq:
            async with aclosing(self._pages_of_leader(filter_subject, seq, last_seq)) as late:
                async for page in late:
                    yield page

    async def _pages_of_leader(
        self, filter_subject: str, seq: int, last_seq: int
    ) -> AsyncGenerator[list[RetainedMessage], None]:
        """Yield pages of what the leader has from sequence `seq` to `last_seq`; one request for each message."""
        page: list[StoredMessage] = []
        size = 0
        async with aclosing(stored.scan(self._js, STREAM, PREFIX + filter_subject, seq)) as messages:
            async for message in messages:
                if message.seq > last_seq:
                    break
                page.append(message)
                size += len(message.payload) + len(message.headers)
                if len(page) == PAGE_MESSAGES or size >= PAGE_BYTES:
                    if found := _matches(filter_subject, stored.newest(page)):
                        yield found
                    page, size = [], 0
        if found := _matches(filter_subject, stored.newest(page)):
            yield found
