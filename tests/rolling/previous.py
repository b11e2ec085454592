# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.rolling.previous serve ...``: a gateway that knows of session records what version 0.1 knew.

It drops every other key of ``v5`` when it reads a record, so it never writes one.
"""

from __future__ import annotations

from typing import Any

from mqtt_streams import sessions
from mqtt_streams.gateways import POSITIONS, GatewayStore

KEYS = (
    *("version", "kind", "expiry", "owner", "nonce", "q2", "deadline", "options", "start", "draining", "replay"),
    *("shared", "wills", "was"),
)
VERSION = 1

if __name__ == "__main__":
    assert sessions.V5_VERSION >= VERSION
    read, encode = sessions.read_v5, sessions.encode_v5

    def _known(value: Any) -> Any:
        return {key: value[key] for key in KEYS if key in value} if isinstance(value, dict) else value

    sessions.V5_VERSION = VERSION  # type: ignore[misc]
    sessions.read_v5 = lambda value, client_hash: read(_known(value), client_hash)
    sessions.encode_v5 = lambda v5: _known(encode(v5)) | {"version": VERSION}

    from mqtt_nats.cli import main
    from mqtt_nats.lifecycle.lease import Lease

    begin, register = Lease.begin, GatewayStore.register

    async def _begin(self: Lease) -> None:
        del self.info[POSITIONS]
        await begin(self)

    async def _register(self: GatewayStore, gateway: str, alive: float, info: dict[str, Any], last: int) -> int:
        return await register(self, gateway, alive, {key: info[key] for key in info if key != "records"}, last)

    Lease.begin = _begin  # type: ignore[method-assign]
    GatewayStore.register = _register  # type: ignore[method-assign, assignment]
    main()
