# SPDX-License-Identifier: Apache-2.0
"""Authenticators whose users belong to one tenant."""

from __future__ import annotations

from dataclasses import replace

from mqtt_nats.access.authenticator import Allow, Authenticator, Credentials, Denied, Ignore


class Bound:
    """Authenticator whose users all belong to ``tenant``; denies a user whose verdict names another tenant."""

    def __init__(self, authenticator: Authenticator, tenant: str) -> None:
        self._authenticator = authenticator
        self._tenant = tenant

    @property
    def name(self) -> str:
        """Name of the authenticator in the settings."""
        return self._authenticator.name

    async def check(self, credentials: Credentials) -> Allow | Ignore | Denied:
        """Ask the wrapped authenticator and set the tenant in its verdict."""
        verdict = await self._authenticator.check(credentials)
        if not isinstance(verdict, Allow) or verdict.tenant == self._tenant:
            return verdict
        if verdict.tenant is not None:
            return Denied(f"the user is of tenant {verdict.tenant!r}, not of {self._tenant!r}")
        return replace(verdict, tenant=self._tenant)


def bound(authenticator: Authenticator, tenant: str | None) -> Authenticator:
    """Return the authenticator restricted to ``tenant``; without a tenant the authenticator itself."""
    return authenticator if tenant is None else Bound(authenticator, tenant)
