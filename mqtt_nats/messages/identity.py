# SPDX-License-Identifier: Apache-2.0
"""Identity of a gateway in one NATS account, and the unique names that it makes."""

from __future__ import annotations

import secrets

from mqtt_streams.hashing import nuid


class Identity:
    """Identity of a gateway in one account.

    Args:
        gateway: the gateway's id, 8 characters, unique in the NATS account.
        tenant: name of the tenant; empty = the gateway's own account.
        domain: JetStream domain; empty = none.
    """

    __slots__ = ("_nuid_prefix", "_nuids", "domain", "id", "tenant")

    def __init__(self, gateway: str, tenant: str = "", domain: str = "") -> None:
        self.id, self.tenant, self.domain = gateway, tenant, domain
        self._nuid_prefix = nuid(secrets.token_bytes(32))[:12]
        self._nuids = secrets.randbelow(1_000_000_000)

    def rename(self, gateway: str) -> None:
        """Go on under another id: another gateway has dealt with the clients of the former one."""
        self.id = gateway

    def new_nuid(self) -> str:
        """Return a unique token of 22 characters, as used in consumer names and deliver subjects."""
        self._nuids += 1
        return f"{self._nuid_prefix}{self._nuids:010d}"
