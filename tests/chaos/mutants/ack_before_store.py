# SPDX-License-Identifier: Apache-2.0
"""PUBACK leaves before JetStream has the message, as with a store that writes behind."""

from __future__ import annotations

import asyncio

from mqtt_nats.backbone.acked_publisher import Store
from mqtt_nats.backbone.pending import Op, Silent
from mqtt_nats.cli import main
from mqtt_nats.ingress.receipts import Receipt

_BEHIND = 0.05  # seconds

_put = Store.put


def _put_behind(self: Store, target: bytes, headers: bytes, payload: bytes, op: Op) -> None:
    if not isinstance(op, Receipt) or op.kind != 4:
        _put(self, target, headers, payload, op)
        return

    def write() -> None:
        _put(self, target, headers, payload, Silent())
        self.link.kick()

    loop = asyncio.get_running_loop()
    loop.call_later(_BEHIND, write)
    loop.call_soon(op.stored, b"")


if __name__ == "__main__":
    Store.put = _put_behind  # type: ignore[method-assign]
    main()
