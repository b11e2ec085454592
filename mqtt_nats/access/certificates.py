# SPDX-License-Identifier: Apache-2.0
"""Authentication by the client's TLS certificate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from mqtt_nats.access.authenticator import Allow, Credentials, Denied
from mqtt_nats.codec import ReasonCode

Kind = Literal["cn", "dns", "email", "uri"]

_SAN: Final = {"dns": "DNS", "email": "email", "uri": "URI"}


class CertificateUsers:
    """Authenticator that takes the user from the certificate; denies without a name or with another user name.

    It never ignores a client: on its listener no password admits a client.
    """

    name = "certificate"

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    async def check(self, credentials: Credentials) -> Allow | Denied:
        """Take the user from the certificate that TLS has verified."""
        transport = credentials.connection.transport
        tls = None if transport is None else transport.get_extra_info("ssl_object")
        names = [] if tls is None else identities(tls.getpeercert() or {}, self._kind)
        if len(names) != 1:
            return Denied(f"the certificate has {len(names) or 'no'} names of the kind {self._kind}")
        user = names[0]
        if not user or not user.isprintable():
            return Denied("the name in the certificate is empty or has control characters")
        if credentials.username not in (None, user):
            why = f"the certificate is that of {user!r}, the user name another one"
            return Denied(why, ReasonCode.BAD_USER_NAME_OR_PASSWORD)
        return Allow(user)


def identities(certificate: Mapping[str, Any], kind: Kind) -> list[str]:
    """Return the names of a kind in a certificate; the form of :meth:`ssl.SSLSocket.getpeercert`."""
    if kind == "cn":
        parts = (part for group in certificate.get("subject", ()) for part in group)
        return [value for key, value in parts if key == "commonName"]
    return [value for key, value in certificate.get("subjectAltName", ()) if key == _SAN[kind]]
