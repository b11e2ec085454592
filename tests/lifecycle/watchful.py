# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.lifecycle.watchful serve ...``: a gateway whose own lease lasts for a minute.

It renews its lease, looks at those of others and finds them lapsed as often and as soon as ``--gateway-lease`` says.
A slow machine that holds it up for longer than that does not make it a dead gateway.
"""

from __future__ import annotations

import os
import runpy

from mqtt_streams.gateways import GatewayStore

WATCHFUL = "tests.lifecycle.watchful"
"""This module, for gateways of tests."""

OF = "WATCHFUL_OF"
"""Environment variable: the module that is run in place of ``mqtt_nats``."""

LASTS = 60
"""Seconds of its own lease."""

if __name__ == "__main__":
    hold = GatewayStore.hold

    async def hold_long(self: GatewayStore, identity: str, holder: str, expected: int, ttl: int) -> int:
        """Write a lease; that of the gateway itself for longer."""
        return await hold(self, identity, holder, expected, LASTS if identity == holder else ttl)

    GatewayStore.hold = hold_long  # type: ignore[method-assign]
    runpy.run_module(os.environ.get(OF, "mqtt_nats"), run_name="__main__", alter_sys=True)
