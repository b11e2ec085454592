# SPDX-License-Identifier: Apache-2.0
"""`$MQTT_pos`: positions of durable sessions.

The stream has one message per session. Each write replaces it and is conditional on the write before.
"""

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson

from mqtt_streams import stored
from mqtt_streams.api import ApiError, JetStream
from mqtt_streams.error_codes import STREAM_NOT_FOUND
from mqtt_streams.headers import EXPECTED_LAST_SUBJECT_SEQUENCE, REPLACES

STREAM: Final = "$MQTT_pos"
PREFIX: Final = "$MQTT.pos."

_EXPECTED: Final = b"NATS/1.0\r\n%b%b:%%d\r\n\r\n" % (REPLACES, EXPECTED_LAST_SUBJECT_SEQUENCE.encode())
_MAX_SEQUENCE: Final = 2**63 - 1
_MAX_ID: Final = 65535


@dataclass(slots=True)
class Position:
    """Position of a session: which of its messages are complete.

    `id`: id of the position in the session record; a position with another id is void. `generation`: id of the
    `$MQTT_msgs` whose sequences it has. `live`: consumers that it replaces: all their messages up to `reached` were
    taken. `clean`: no message after `reached` was sent. `pending`: QoS by sequence of messages taken and not complete.
    `released`: packet identifiers for which the client has sent PUBREC, with the sequence of their message.
    `perhaps`: stream sequence up to which a previous owner may have sent more messages; 0 = none. `unsent`: sequences,
    as far as known, of messages taken but never sent. `gateway`: gateway that wrote the position.
    `most`: in a clean position, last sequence that was sent; -1 = not known.
    `present`: those of `live` that may exist, in a session whose consumers are removed. `identifiers`: packet
    identifiers by sequence of messages that have another one than follows from their sequence; of retained messages,
    whose sequences are those of their own stream, the sequence is negative.
    """

    id: str
    generation: str = ""
    live: list[str] = field(default_factory=list)
    clean: bool = False
    reached: int = 0
    pending: dict[int, int] = field(default_factory=dict)
    released: dict[int, int] = field(default_factory=dict)
    perhaps: int = 0
    unsent: list[int] = field(default_factory=list)
    gateway: str = ""
    most: int = -1
    present: list[str] = field(default_factory=list)
    identifiers: dict[int, int] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the stored JSON; a clean position leaves out `perhaps` where it is 0, and an empty `unsent`."""
        value: dict[str, object] = {
            "id": self.id,
            "generation": self.generation,
            "live": self.live,
            "clean": self.clean,
            "reached": self.reached,
            "qos1": [sequence for sequence, qos in self.pending.items() if qos == 1],
            "qos2": [sequence for sequence, qos in self.pending.items() if qos == 2],
            "released": list(self.released.items()),
            "gateway": self.gateway,
            "most": self.most,
        }
        further = {"perhaps": self.perhaps, "unsent": self.unsent}
        # The last position of a connection is shorter than the one before: nats-server rewrites a block of the stream
        # when replaced positions are more than half of it.
        value |= {name: one for name, one in further.items() if one or not self.clean}
        if self.present:
            value["present"] = self.present
        if self.identifiers:
            value["identifiers"] = list(self.identifiers.items())
        return orjson.dumps(value)


def decode(data: bytes) -> Position | None:
    """Read a stored position; None for data that is no position."""
    try:
        value: Any = orjson.loads(data)
        position = Position(
            value["id"],
            value["generation"],
            list(value["live"]),
            value["clean"] is True,
            value["reached"],
            dict.fromkeys(value["qos1"], 1) | dict.fromkeys(value["qos2"], 2),
            dict(value["released"]),
            value.get("perhaps", 0),
            list(value.get("unsent", ())),
            value["gateway"],
            value["most"],
            list(value.get("present", ())),
            dict(value.get("identifiers", ())),
        )
    except (ValueError, KeyError, TypeError):
        return None
    texts: list[Any] = [position.id, position.generation, position.gateway, *position.live, *position.present]
    numbers: list[Any] = [
        position.reached,
        position.perhaps,
        *position.pending,
        *position.released.values(),
        *position.unsent,
        *(abs(one) if type(one) is int else None for one in position.identifiers),
        position.most + 1 if type(position.most) is int else None,
    ]
    identifiers: list[Any] = [*position.released, *position.identifiers.values()]
    usable = (
        all(type(text) is str for text in texts)
        and all(type(number) is int and 0 <= number <= _MAX_SEQUENCE for number in numbers)
        and all(type(identifier) is int and 1 <= identifier <= _MAX_ID for identifier in identifiers)
    )
    return position if usable else None


def position_subject(client_hash: str) -> str:
    """Return the subject of a session's position."""
    return PREFIX + client_hash


def expected_block(sequence: int) -> bytes:
    """Return the header block of a write that replaces the position with `sequence`; 0 = no position is stored."""
    return _EXPECTED % sequence


class Found(NamedTuple):
    """A stored position with its sequence and store time (Unix time in seconds); empty, 0 and 0 without a position."""

    data: bytes = b""
    sequence: int = 0
    time: float = 0.0


class PositionStore:
    """Store that reads positions; the gateway's data path writes them."""

    def __init__(self, js: JetStream) -> None:
        self._js = js

    async def load(self, client_hash: str) -> Found:
        """Return the stored position, also without the stream. Raises ApiError, RequestTimeout."""
        try:
            message = await stored.get_last(self._js, STREAM, position_subject(client_hash))
        except ApiError as error:
            if error.err_code == STREAM_NOT_FOUND:
                return Found()
            raise
        return Found() if message is None else Found(message.payload, message.seq, message.time_ns / 1e9)
