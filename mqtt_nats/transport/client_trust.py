# SPDX-License-Identifier: Apache-2.0
"""Certificates of clients: when one ends, and whether other files would still let it in.

OpenSSL verifies a certificate when a connection begins. What is decided here is whether a connection goes on.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mqtt_nats.base.errors import StartupError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate, CertificateRevocationList

_LIST: Final = re.compile(b"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)


def read_lists(path: Path) -> list[CertificateRevocationList]:
    """Return the lists of revoked certificates in a PEM file.

    Raises:
        StartupError: the file cannot be read, or has none.
    """
    from cryptography.x509 import load_pem_x509_crl  # not loaded unless a listener needs it

    try:
        found = [load_pem_x509_crl(one) for one in _LIST.findall(path.read_bytes())]
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        found = []
    if not found:
        raise StartupError(f"{path} cannot be used: expected a PEM file of lists of revoked certificates (X509 CRL)")
    return found


def certificate_of(transport: Any) -> bytes | None:
    """Return the client's certificate (DER) of a connection, given by its transport; None = it has shown none."""
    tls = None if transport is None else transport.get_extra_info("ssl_object")
    found: bytes | None = None if tls is None else tls.getpeercert(binary_form=True)
    return found


def end_of(transport: Any) -> float | None:
    """Return the Unix time at which the client's certificate ends; None = it has shown none."""
    tls = None if transport is None else transport.get_extra_info("ssl_object")
    found = None if tls is None else tls.getpeercert()
    return float(ssl.cert_time_to_seconds(found["notAfter"])) if found else None


class ClientTrust:
    """Which certificates of clients a listener accepts.

    Args:
        authorities: trusted ones (DER).
        lists: of revoked certificates.
    """

    def __init__(self, authorities: Iterable[bytes], lists: Iterable[CertificateRevocationList]) -> None:
        from cryptography.x509 import load_der_x509_certificate

        now = datetime.now(UTC)
        found = {one: load_der_x509_certificate(one) for one in authorities}
        self._authorities = {one: cert for one, cert in found.items() if cert.not_valid_after_utc > now}
        """Those that have not ended, by their DER."""
        self._revoked: dict[bytes, frozenset[int]] = {}
        """Serial numbers by the name of the issuer (DER)."""
        for one in lists:
            issuer = one.issuer.public_bytes()
            serials = frozenset(entry.serial_number for entry in one)
            self._revoked[issuer] = self._revoked.get(issuer, frozenset()) | serials

    def withdraws(self, former: ClientTrust) -> bool:
        """Whether there may be a certificate that ``former`` has accepted, and this one does not."""
        return bool(former._authorities.keys() - self._authorities.keys()) or any(
            serials - former._revoked.get(issuer, frozenset()) for issuer, serials in self._revoked.items()
        )

    def accepts(self, certificate: bytes, former: ClientTrust) -> bool:
        """Whether a certificate (DER) that ``former`` has accepted is accepted.

        Certificates between it and its root are not known any more. So one that no trusted authority has issued itself
        is accepted only while no root is withdrawn and no root has revoked anything else: its client may come again.
        """
        from cryptography.x509 import load_der_x509_certificate

        cert = load_der_x509_certificate(certificate)
        if cert.serial_number in self._revoked.get(cert.issuer.public_bytes(), ()):
            return False
        if any(_issued(cert, one) for one in self._authorities.values()):
            return True
        if former._authorities.keys() - self._authorities.keys():
            return False
        roots = {one.subject.public_bytes() for one in self._authorities.values()}
        return not any(
            serials - former._revoked.get(issuer, frozenset())
            for issuer, serials in self._revoked.items()
            if issuer in roots
        )


def _issued(cert: Certificate, authority: Certificate) -> bool:
    """Whether an authority has issued a certificate itself."""
    from cryptography.exceptions import InvalidSignature

    if cert.issuer != authority.subject:
        return False
    try:
        cert.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True
