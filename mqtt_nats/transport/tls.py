# SPDX-License-Identifier: Apache-2.0
"""TLS context of a listener, and the end of its certificate."""

from __future__ import annotations

import math
import ssl
from typing import Final

from mqtt_nats.base.errors import StartupError
from mqtt_nats.transport.client_trust import ClientTrust, read_lists
from mqtt_nats.transport.listener_settings import ListenerSettings

VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class ServerContext(ssl.SSLContext):
    """TLS context of a server."""

    def refuse_below(self, version: ssl.TLSVersion) -> None:
        """Refuse older versions, and renegotiation: in TLS 1.2 a client could renegotiate again and again."""
        self.minimum_version = version
        self.options |= ssl.OP_NO_RENEGOTIATION

    def require_certificates(self) -> None:
        """Refuse clients without a certificate of the loaded authorities.

        No session is resumed: OpenSSL does not look at the certificate of a session again, which may have expired.
        """
        self.verify_mode = ssl.CERT_REQUIRED
        self.options |= ssl.OP_NO_TICKET
        self.num_tickets = 0

    def require_lists(self) -> None:
        """Refuse clients whose certificate, or an authority of it, is revoked, or has no list that is in force."""
        self.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_CHAIN


def certificate_end(settings: ListenerSettings) -> float:
    """Return the Unix time at which the certificate of a listener ends; infinite for a listener without TLS.

    Raises:
        StartupError: the file has no certificate in its first PEM block.
    """
    if settings.tls_cert is None:
        return math.inf
    from cryptography.x509 import load_pem_x509_certificate  # not loaded unless a listener needs it

    try:
        found = load_pem_x509_certificate(settings.tls_cert.read_bytes())
    except (OSError, ValueError) as error:
        raise StartupError(f"listener {settings.listen}: cannot read {settings.tls_cert}: {error}") from None
    return found.not_valid_after_utc.timestamp()


def make_context(settings: ListenerSettings) -> ssl.SSLContext:
    """Return the TLS context of a listener, made from its files.

    Raises:
        StartupError: a file cannot be used.
    """
    certificate, key, authorities = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    assert certificate is not None
    assert key is not None
    where = f"listener {settings.listen}"
    context = ServerContext(ssl.PROTOCOL_TLS_SERVER)
    context.refuse_below(VERSIONS[settings.tls_minimum])
    locked = False

    def no_passphrase() -> str:
        nonlocal locked
        locked = True
        return ""

    try:
        context.load_cert_chain(certificate, key, no_passphrase)  # else OpenSSL would ask on the terminal
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = "the key belongs to another certificate"
        elif locked:
            why = "the key is encrypted"
        else:
            why = "expected PEM files, the certificate first in its file"
        raise StartupError(f"{where}: {certificate} and {key} cannot be used: {why}") from None
    except OSError as error:
        raise StartupError(f"{where}: cannot read {certificate} and {key}: {error.strerror or error}") from None
    if authorities is not None:
        try:
            context.load_verify_locations(authorities)
        except ssl.SSLError:
            raise StartupError(f"{where}: {authorities} cannot be used: expected a PEM file of certificates") from None
        except OSError as error:
            raise StartupError(f"{where}: cannot read {authorities}: {error.strerror or error}") from None
        context.require_certificates()
        if settings.tls_crl_file is not None:
            read_lists(settings.tls_crl_file)
            context.load_verify_locations(settings.tls_crl_file)
            context.require_lists()
    return context


def client_trust(settings: ListenerSettings, context: ssl.SSLContext) -> ClientTrust | None:
    """Return which certificates of clients the context of a listener accepts; None = it needs none.

    Raises:
        StartupError: a file cannot be used.
    """
    if settings.tls_client_ca is None:
        return None
    lists = () if settings.tls_crl_file is None else read_lists(settings.tls_crl_file)
    return ClientTrust(context.get_ca_certs(binary_form=True), lists)
