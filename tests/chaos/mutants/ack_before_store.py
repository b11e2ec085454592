# SPDX-License-Identifier: Apache-2.0
"""PUBACK leaves before JetStream has the message, as with a store that writes behind."""

from __future__ import annotations

import asyncio

from mqtt_nats.backbone.acked_publisher import AckedPublisher
from mqtt_nats.backbone.pending_stores import IgnoredStore, PendingStore
from mqtt_nats.cli import main
from mqtt_nats.ingress.publish import Acknowledgement

_BEHIND = 0.05  # seconds

_put = AckedPublisher.put


def _put_behind(self: AckedPublisher, target: bytes, headers: bytes, payload: bytes, op: PendingStore) -> None:
    if not isinstance(op, Acknowledgement) or op.kind != 4:
        _put(self, target, headers, payload, op)
        return

    def write() -> None:
        _put(self, target, headers, payload, IgnoredStore())
        self.link.kick()

    loop = asyncio.get_running_loop()
    loop.call_later(_BEHIND, write)
    loop.call_soon(op.stored, b"")


if __name__ == "__main__":
    AckedPublisher.put = _put_behind  # type: ignore[method-assign]
    main()
