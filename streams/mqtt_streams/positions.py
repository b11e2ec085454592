# SPDX-License-Identifier: Apache-2.0
"""`$MQTT_pos`: where a durable session is whose messages come through a gateway's shared reader.

One message per session, replaced by each write; a write is conditional on the one before it.
"""

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson

from mqtt_streams import stored
from mqtt_streams.api import ApiError, JetStream
from mqtt_streams.headers import EXPECTED_LAST_SUBJECT_SEQUENCE

STREAM: Final = "$MQTT_pos"
PREFIX: Final = "$MQTT.pos."

_EXPECTED: Final = b"NATS/1.0\r\n%b:%%d\r\n\r\n" % EXPECTED_LAST_SUBJECT_SEQUENCE.encode()
_STREAM_NOT_FOUND: Final = 10059
_MAX_SEQUENCE: Final = 2**63 - 1
_MAX_ID: Final = 65535


@dataclass(slots=True)
class Position:
    """What of a session's messages is complete.

    `id`: the session's, as its record has it; another one's is nobody's. `generation`: id of the `$MQTT_msgs` in which
    it counts. `live`: consumers for which this speaks: of what they match everything up to `reached` was taken.
    `clean`: nothing after `reached` was sent. `pending`: what was taken and is not complete: QoS by sequence.
    `released`: packet identifiers for which the client has sent PUBREC, with the sequence of their message.
    `perhaps`: up to this sequence an earlier connection may have sent more than that; 0 = none has.
    `unsent`: what was taken or delivered, and never sent, as far as that is known. `gateway`: who has written this.
    `most`: where it is clean, nothing after this was sent, however often it was delivered; -1 = that is not known.
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

    def encode(self) -> bytes:
        """The stored JSON."""
        return orjson.dumps(
            {
                "id": self.id,
                "generation": self.generation,
                "live": self.live,
                "clean": self.clean,
                "reached": self.reached,
                "qos1": [sequence for sequence, qos in self.pending.items() if qos == 1],
                "qos2": [sequence for sequence, qos in self.pending.items() if qos == 2],
                "released": list(self.released.items()),
                "perhaps": self.perhaps,
                "unsent": self.unsent,
                "gateway": self.gateway,
                "most": self.most,
            }
        )


def decode(data: bytes) -> Position | None:
    """Read a stored position; None for what is none."""
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
            value.get("gateway", ""),
            value.get("most", -1),
        )
    except (ValueError, KeyError, TypeError):
        return None
    texts: list[Any] = [position.id, position.generation, position.gateway, *position.live]
    numbers: list[Any] = [
        position.reached,
        position.perhaps,
        *position.pending,
        *position.released.values(),
        *position.unsent,
        position.most + 1 if type(position.most) is int else None,
    ]
    usable = (
        all(type(text) is str for text in texts)
        and all(type(number) is int and 0 <= number <= _MAX_SEQUENCE for number in numbers)
        and all(type(identifier) is int and 1 <= identifier <= _MAX_ID for identifier in position.released)
    )
    return position if usable else None


def position_subject(client_hash: str) -> str:
    """Where the position of a session is stored."""
    return PREFIX + client_hash


def expected_block(sequence: int) -> bytes:
    """Header block of a write that replaces the one with `sequence`; 0 = there is none."""
    return _EXPECTED % sequence


class Found(NamedTuple):
    """What is stored: its sequence, and when it was, in seconds since 1970. Nothing, 0 and 0 where there is none."""

    data: bytes = b""
    sequence: int = 0
    time: float = 0.0


class PositionStore:
    """Reads and removes positions; the gateway's data path writes them."""

    def __init__(self, js: JetStream) -> None:
        self._js = js

    async def load(self, client_hash: str) -> Found:
        """What is stored. Raises ApiError, RequestTimeout."""
        try:
            message = await stored.get_last(self._js, STREAM, position_subject(client_hash))
        except ApiError as error:
            if error.err_code == _STREAM_NOT_FOUND:
                return Found()
            raise
        return Found() if message is None else Found(message.payload, message.seq, message.time_ns / 1e9)
