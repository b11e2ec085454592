# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.rolling.by_sequence serve ...``: the gateway before assignments were of a group and a message.

It has one assignment for a message, under its sequence alone.
"""

from __future__ import annotations

from mqtt_streams import shared, stored
from mqtt_streams.shared import ASSIGNED, STREAM, Owner, SharedStore, _owner

SOLE = (
    f"Nats-Expected-Last-Subject-Sequence:0\r\nNats-Expected-Last-Subject-Sequence-Subject:{ASSIGNED}*.%d\r\n\r\n"
).encode()

block_of = shared.assigned_block


def _subject(client_hash: str, group: str, sequence: int) -> str:
    return f"{ASSIGNED}{client_hash}.{sequence}"


def _block(
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
    block = block_of(packet_id, group, sequence, subscription, arrived_ns, ack, sole=False)
    return block[:-2] + SOLE % sequence if sole else block


async def _found(self: SharedStore, group: str, subscription: str, message_seq: int, stored_ns: int) -> Owner | None:
    found = await stored.get_last(self._js, STREAM, f"{ASSIGNED}*.{message_seq}")
    return None if found is None else _owner(found, stored_ns)


if __name__ == "__main__":
    shared.assigned_subject = _subject
    shared.assigned_block = _block
    SharedStore.owner = _found  # type: ignore[method-assign]

    from mqtt_nats.cli import main

    main()
