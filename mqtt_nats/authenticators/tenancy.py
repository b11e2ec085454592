# SPDX-License-Identifier: Apache-2.0
"""Authenticators whose users belong to one tenant."""

from __future__ import annotations

from dataclasses import replace

from mqtt_nats.access.authenticator import Allow, Authenticator, Credentials, Denied, Ignore


class Bound:
    """An authenticator all of whose users are of ``tenant``; one that it says to be of another is denied."""

    def __init__(self, authenticator: Authenticator, tenant: str) -> None:
        self._authenticator = authenticator
        self._tenant = tenant

    @property
    def name(self) -> str:
        """As the settings call it."""
        return self._authenticator.name

    async def check(self, credentials: Credentials) -> Allow | Ignore | Denied:
        """Ask the authenticator."""
        verdict = await self._authenticator.check(credentials)
        if not isinstance(verdict, Allow) or verdict.tenant == self._tenant:
            return verdict
        if verdict.tenant is not None:
            return Denied(f"the user is of tenant {verdict.tenant!r}, not of {self._tenant!r}")
        return replace(verdict, tenant=self._tenant)


def bound(authenticator: Authenticator, tenant: str | None) -> Authenticator:
    """The authenticator, for users of ``tenant`` where there is one."""
    return authenticator if tenant is None else Bound(authenticator, tenant)
