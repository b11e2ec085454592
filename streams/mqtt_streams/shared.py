# SPDX-License-Identifier: Apache-2.0
"""Shared subscriptions: `$MQTT_shared`, and a pull consumer on `$MQTT_msgs` for each group and filter.

The stream has one message for each member of a group, so that the last one to leave can remove the consumer, and one
for each QoS 2 message that a group has sent to a durable member: the group's copy of the message is that client's, and
of no other member, until the client has it [MQTT-4.8.2-5] (5.0). Beside those stands what a client had half-way when
its connection ended.
"""

from contextlib import aclosing, suppress
from hashlib import sha256
from typing import Any, Final, NamedTuple

import orjson

from mqtt_streams import headers, stored
from mqtt_streams.api import ApiError, JetStream, NoResponders, RequestTimeout, bounded_ack_pending, call, publish
from mqtt_streams.consumers import ACK_WAIT_NS, consumer_info, delete_consumer, describe, parse_ack
from mqtt_streams.error_codes import CONSUMER_EXISTS, WRONG_LAST_SEQUENCE
from mqtt_streams.hashing import nuid
from mqtt_streams.messages import PREFIX as MESSAGE_PREFIX
from mqtt_streams.messages import STREAM as MESSAGES

STREAM: Final = "$MQTT_shared"
MEMBERS: Final = "$MQTT.shared.members."
ASSIGNED: Final = "$MQTT.shared.assigned."

CONSUMER_PREFIX: Final = "share_"
WINDOW: Final = 20_000
"""Most pending messages of one group's consumer; the window of a member is smaller."""

MEMBERS_MOST: Final = 10_000
"""Most pull requests of members of one group that wait at the same time (`max_waiting`)."""

TAKEN: Final = WRONG_LAST_SEQUENCE
"""JetStream's error codes for the assignment of a message that is assigned, or is being assigned, already."""

IN_TIME_NS: Final = ACK_WAIT_NS // 2
"""Nanoseconds within which an assignment must be stored: after AckWait the message goes to another member."""

EXPIRED_NS: Final = 2_000_000_000
"""AckWait in nanoseconds that is set for a moment: what nobody has asked more time for is delivered again."""

ATTEMPTS: Final = 3
"""Times that a group's consumer is written, while other gateways write it at the same time."""

_SOLE: Final = (
    b"Nats-Expected-Last-Subject-Sequence:0\r\nNats-Expected-Last-Subject-Sequence-Subject:"
    + ASSIGNED.encode()
    + b"*.%b-%d\r\n"
)
_ASKS: Final = (
    b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence:%d\r\nNats-Expected-Last-Subject-Sequence-Subject:"
    + ASSIGNED.encode()
    + b"*.%%b-%%d\r\n\r\n"
) % (2**63 - 1)
"""Headers of a store that is refused in any case, since no stream has this sequence."""
_REPLACES: Final = headers.REPLACES + b"Nats-Expected-Last-Subject-Sequence:%d\r\n"
_BLOCK: Final = (
    b"NATS/1.0\r\nNmqtt-PacketId:%d\r\nNmqtt-Seq:%d\r\nNmqtt-Arrived:%d\r\nNmqtt-Epoch:%d\r\nNmqtt-Share:%b\r\n"
    b"Nmqtt-Ack:%b\r\n%b\r\n"
)
_HALFWAY: Final = "halfway"
_PACKET_ID: Final = "Nmqtt-PacketId"
_ARRIVED: Final = "Nmqtt-Arrived"
_ACK: Final = "Nmqtt-Ack"
_SHARE: Final = "Nmqtt-Share"


class Assignment(NamedTuple):
    """Assignment of a QoS 2 message of a shared subscription to one client.

    `seq`: sequence of this record. `message_seq`: sequence of the message in `$MQTT_msgs`. `subscription`: filter with
    `$share/`. `ack`: acknowledgement subject of the message for the group's consumer, empty if the
    record has none that can be used. `epoch`: epoch of the connection that has chosen the packet identifier.
    `subject`: of this record.
    """

    packet_id: int
    seq: int
    message_seq: int
    subscription: str
    ack: bytes = b""
    epoch: int = 0
    subject: str = ""


class Owner(NamedTuple):
    """Client to which a message is assigned, and the packet identifier.

    `seq`: sequence of the assignment. `arrived_ns`: time of delivery as in `assigned_block`, 0 = not known.
    """

    client_hash: str
    packet_id: int
    seq: int
    arrived_ns: int = 0


class HalfWay(NamedTuple):
    """QoS 2 messages that were sent to a client and were incomplete when its connection ended.

    `seq`: sequence of this record. `sequences`: sequences in `$MQTT_msgs`; negative: sequences in `$MQTT_rmsgs`.
    """

    seq: int
    sequences: list[int]


def group_hash(group: str, topic_filter: str) -> str:
    """Return the 22-character hash of a group and its filter, for subjects and names."""
    return nuid(sha256(f"{group}/{topic_filter}".encode()).digest())


def members_subject(group: str, client_hash: str = "*") -> str:
    """Return the subject of a member's record; `group` is a hash of `group_hash`."""
    return f"{MEMBERS}{group}.{client_hash}"


def assigned_subject(client_hash: str, group: str, sequence: int) -> str:
    """Return the subject of the record that a group's copy of a message is a client's; `group`: as of `group_hash`."""
    return f"{ASSIGNED}{client_hash}.{group}-{sequence}"


def assigned_subjects(client_hash: str) -> str:
    """Return the filter subject of all assignments to a client and of its half-way record."""
    return f"{ASSIGNED}{client_hash}.*"


def halfway_subject(client_hash: str) -> str:
    """Return the subject of the record of a client's incomplete QoS 2 messages."""
    return f"{ASSIGNED}{client_hash}.{_HALFWAY}"


def assigned_block(
    packet_id: int,
    group: str,
    sequence: int,
    subscription: str,
    arrived_ns: int,
    ack: bytes,
    *,
    epoch: int = 0,
    sole: bool = True,
) -> bytes:
    """Return the header block of an assignment; its payload is empty.

    `ack`: subject that acknowledges the message to the group's consumer, for the connection that completes the message.
    `arrived_ns`: when the message came from the group, by nats-server's clock (nanoseconds since 1970); an assignment
    that is stored more than `IN_TIME_NS` later is void. `epoch`: of the connection. `sole`: JetStream refuses it with a
    code of `TAKEN` when the group's copy of the message belongs to some client already.
    """
    expected = _SOLE % (group.encode(), sequence) if sole else headers.REPLACES
    share = headers.percent_encode(subscription).encode()
    return _BLOCK % (packet_id, sequence, arrived_ns, epoch, share, ack, expected)


def _ack_of(found: stored.StoredMessage, message_seq: int) -> bytes:
    """Return an assignment's acknowledgement subject; empty unless it is for this message and a group's consumer."""
    subject = (headers.get(found.headers, _ACK) or "").encode()
    ack = parse_ack(subject)
    if ack is None or b" " in subject:
        return b""
    own = ack.stream == MESSAGES and ack.consumer.startswith(CONSUMER_PREFIX) and ack.stream_seq == message_seq
    return subject if own else b""


def _void(found: stored.StoredMessage) -> bool:
    """Whether an assignment was stored so late that the group's consumer may have redelivered to another member."""
    arrived = headers.get_int(found.headers, _ARRIVED)
    return arrived is not None and found.time_ns - arrived > IN_TIME_NS


class SharedStore:
    """Store of members, assignments and consumers of shared subscriptions."""

    def __init__(self, js: JetStream) -> None:
        self._js = js

    async def join(self, group: str, client_hash: str, client_id: str, subscription: str, threshold: int) -> None:
        """Write a member's record; raises ApiError, NoResponders, RequestTimeout (all do).

        `threshold`: what the member needs of the group's consumer; see `ensure_consumer`.
        """
        body = orjson.dumps({"client": client_id, "filter": subscription, "threshold": threshold})
        await publish(self._js, members_subject(group, client_hash), body, headers.REPLACING)

    async def tidy(self, group: str) -> None:
        """Delete the consumer of a group if the group has no members."""
        body = {"subjects_filter": members_subject(group)}
        info = await call(self._js, f"STREAM.INFO.{STREAM}", body)
        if not info["state"].get("subjects"):
            await delete_consumer(self._js, MESSAGES, CONSUMER_PREFIX + group)

    async def ensure_consumer(
        self, group: str, subscription: str, subjects: tuple[str, ...], start: int, threshold: int
    ) -> bool:
        """Create the group's consumer from stream sequence `start`, or from the end of the stream if that is lower.

        Returns whether there was one, and somebody has paused it.

        `threshold`: nanoseconds without a request until nats-server may remove the consumer, 0 = never; it only grows.
        The member's record is there already: see `_needed`.
        """
        name = CONSUMER_PREFIX + group
        for _ in range(ATTEMPTS):
            info = await consumer_info(self._js, MESSAGES, name)
            if info is not None:
                # Else a gateway has died within `set_wait`.
                sound = info.config.get("ack_wait") == ACK_WAIT_NS
                if sound and _suffices(info.config, [threshold]):
                    return info.paused
                await self._update(group, info.config, [threshold])
                continue
            state = (await call(self._js, f"STREAM.INFO.{MESSAGES}"))["state"]
            start = min(start, int(state["last_seq"]) + 1)
            config = _config(name, subscription, subjects, start, threshold)
            config["max_ack_pending"] = bounded_ack_pending(self._js, WINDOW)
            try:
                await self._write(name, config, "create")
                return False
            except ApiError as error:
                if error.err_code not in CONSUMER_EXISTS:  # otherwise another gateway has created it: look again
                    raise
        return False

    async def beginning(self, group: str) -> int | None:
        """Return the stream sequence from which the group's consumer has all messages; None = there is no consumer."""
        info = await consumer_info(self._js, MESSAGES, CONSUMER_PREFIX + group)
        return None if info is None else int(info.config.get("opt_start_seq", 0))

    async def set_wait(self, group: str, ack_wait: int, most: int = 0) -> bool:
        """Set the AckWait (nanoseconds) of a group's consumer if more than ``most`` messages are pending there.

        Returns:
            False when no more are, or there is no such consumer.
        """
        name = CONSUMER_PREFIX + group
        info = await consumer_info(self._js, MESSAGES, name)
        if info is None or info.num_ack_pending <= most:
            return False
        await self._write(name, info.config | {"ack_wait": ack_wait}, "update")
        return True

    async def restore_wait(self, group: str) -> None:
        """Set the AckWait of a group's consumer to what it always is, after `set_wait`."""
        info = await consumer_info(self._js, MESSAGES, CONSUMER_PREFIX + group)
        if info is not None:
            await self._update(group, info.config, await self._needed(group))

    async def _update(self, group: str, config: dict[str, Any], needed: list[int]) -> None:
        """Write a consumer's configuration with the longest of its own inactive threshold and ``needed``.

        A change between the read and the write of ``config``, by another gateway, is undone by the write: JetStream
        takes the configuration as a whole. So whoever has written looks whether the consumer is as all members need
        it. Their records are older than their changes.
        """
        for _ in range(ATTEMPTS):
            threshold = _longest([*needed, int(config.get("inactive_threshold", 0))])
            config = config | {"inactive_threshold": threshold, "ack_wait": ACK_WAIT_NS}
            await self._write(CONSUMER_PREFIX + group, config, "update")
            needed = await self._needed(group)
            info = await consumer_info(self._js, MESSAGES, CONSUMER_PREFIX + group)
            if info is None or _suffices(info.config, needed):
                return
            config = info.config

    async def _needed(self, group: str) -> list[int]:
        """Return the inactive thresholds that the members of a group need."""
        found = []
        for record in await stored.all_of(self._js, STREAM, members_subject(group)):
            with suppress(orjson.JSONDecodeError, AttributeError):
                threshold = orjson.loads(record.payload).get("threshold")
                if isinstance(threshold, int):
                    found.append(threshold)
        return found

    async def _write(self, name: str, config: dict[str, Any], action: str) -> None:
        body = {"stream_name": MESSAGES, "config": config, "action": action}
        await call(self._js, f"CONSUMER.DURABLE.CREATE.{MESSAGES}.{name}", body)

    async def assigned(self, client_hash: str) -> tuple[list[Assignment], HalfWay | None]:
        """Return the assignments to a client, oldest first, and the record of its incomplete QoS 2 messages."""
        found = []
        halfway = None
        for message in stored.newest(await stored.all_of(self._js, STREAM, assigned_subjects(client_hash))):
            if message.subject.endswith(_HALFWAY):
                halfway = HalfWay(
                    message.seq, [int(one) for one in message.payload.split(b",") if one.removeprefix(b"-").isdigit()]
                )
                continue
            packet_id = headers.get_int(message.headers, _PACKET_ID)
            sequence = headers.get_int(message.headers, headers.SEQ)
            name = headers.percent_decode(headers.get(message.headers, _SHARE) or "")
            if packet_id is None or sequence is None or not 1 <= packet_id <= 65535 or _void(message):
                await stored.remove(self._js, STREAM, message.subject, message.seq)
            else:
                ack, epoch = _ack_of(message, sequence), headers.get_int(message.headers, headers.EPOCH) or 0
                found.append(Assignment(packet_id, message.seq, sequence, name, ack, epoch, message.subject))
        return found, halfway

    async def change_packet_id(self, one: Assignment, packet_id: int, epoch: int, now_ns: int) -> Assignment | None:
        """Replace an assignment by one under another packet identifier; None: it is removed or replaced already.

        Raises ApiError, NoResponders, RequestTimeout.

        Args:
            one: the assignment; no connection has sent its message.
            packet_id: the other identifier.
            epoch: of the connection that has chosen it.
            now_ns: time by nats-server's clock (nanoseconds since 1970).
        """
        share = headers.percent_encode(one.subscription).encode()
        block = _BLOCK % (packet_id, one.message_seq, now_ns, epoch, share, one.ack, _REPLACES % one.seq)
        try:
            seq = await publish(self._js, one.subject, b"", block)
        except ApiError as error:
            if error.err_code not in TAKEN:
                raise
            found = await stored.get_last(self._js, STREAM, one.subject)
            if found is not None and found.seq == one.seq:
                raise RequestTimeout("an earlier attempt to replace an assignment is not stored yet") from error
            if found is None or headers.get_int(found.headers, _PACKET_ID) != packet_id:
                return None
            seq = found.seq  # an earlier attempt has stored it, maybe without removing the former one
            await stored.delete(self._js, STREAM, one.seq)
        return one._replace(packet_id=packet_id, seq=seq, epoch=epoch)

    async def acknowledge(self, client_hash: str, last: int) -> None:
        """Acknowledge a client's assigned messages to the groups' consumers, for assignments up to sequence `last`."""
        async with aclosing(stored.scan(self._js, STREAM, assigned_subjects(client_hash))) as messages:
            async for message in messages:
                if message.seq > last:
                    return
                if message.is_answer:
                    continue
                sequence = headers.get_int(message.headers, headers.SEQ)
                ack = b"" if sequence is None or _void(message) else _ack_of(message, sequence)
                if ack:
                    with suppress(NoResponders):  # the consumer is gone
                        await self._js.request(ack.decode())

    async def decide(self, client_hash: str, group: str, message_seq: int) -> None:
        """Make sure that no assignment of a group's copy of a message is on its way, to whichever client.

        A leader that has lost its followers has the store in its log, and may have it stored when they are back. Until
        then it refuses any other conditional store of the message with the second code of `TAKEN`. A new leader answers
        nothing before it has applied its log. So a leader that compares the sequence has no such store.

        Raises:
            RequestTimeout: an assignment may be stored yet, or the stream does not answer.
            ApiError, NoResponders: the stream does not answer.
        """
        subject = assigned_subject(client_hash, group, message_seq)
        try:
            await publish(self._js, subject, b"", _ASKS % (group.encode(), message_seq))
        except ApiError as error:
            if error.err_code == TAKEN[1]:
                raise RequestTimeout("an assignment is on its way") from error
            if error.err_code != TAKEN[0]:
                raise

    async def remove_void(self, client_hash: str, group: str, message_seq: int) -> None:
        """Remove the assignment of a message to a client if it is void.

        Raises:
            ApiError, NoResponders, RequestTimeout: the stream does not do it.
        """
        subject = assigned_subject(client_hash, group, message_seq)
        found = await stored.get_last(self._js, STREAM, subject)
        if found is not None and _void(found):
            await stored.remove(self._js, STREAM, subject, found.seq)

    async def owner(self, group: str, message_seq: int, stored_ns: int) -> Owner | None:
        """Return the owner of a group's copy of a message of `$MQTT_msgs`, stored at `stored_ns` (ns since 1970).

        An assignment older than the message belongs to another message: the stream has been replaced since.
        """
        found = await stored.get_last(self._js, STREAM, f"{ASSIGNED}*.{group}-{message_seq}")
        return None if found is None else _owner(found, stored_ns)


def _longest(thresholds: list[int]) -> int:
    """Return the longest inactive threshold in nanoseconds; 0 stands for one without an end."""
    return 0 if 0 in thresholds else max(thresholds)


def _suffices(config: dict[str, Any], needed: list[int]) -> bool:
    """Whether a consumer's inactive threshold is as long as each of ``needed``."""
    present = int(config.get("inactive_threshold", 0))
    return _longest([present, *needed]) == present


def _owner(found: stored.StoredMessage, stored_ns: int) -> Owner | None:
    if found.time_ns < stored_ns or found.is_answer or _void(found):
        return None
    packet_id = headers.get_int(found.headers, _PACKET_ID) or 0
    client_hash = found.subject.removeprefix(ASSIGNED).partition(".")[0]
    return Owner(client_hash, packet_id, found.seq, headers.get_int(found.headers, _ARRIVED) or 0)


def _config(name: str, subscription: str, subjects: tuple[str, ...], start: int, threshold: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "durable_name": name,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": start,
        "ack_policy": "explicit",
        "ack_wait": ACK_WAIT_NS,
        "replay_policy": "instant",
        "max_waiting": MEMBERS_MOST,
        "metadata": {"mqtt_subscription": subscription},
        "description": describe(subscription),
    }
    if len(subjects) == 1:
        config["filter_subject"] = MESSAGE_PREFIX + subjects[0]
    else:
        config["filter_subjects"] = [MESSAGE_PREFIX + subject for subject in subjects]
    if threshold:
        config["inactive_threshold"] = threshold
    return config
