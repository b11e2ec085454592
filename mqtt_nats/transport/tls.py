# SPDX-License-Identifier: Apache-2.0
"""What a listener needs to speak TLS."""

from __future__ import annotations

import ssl
from typing import Final

from mqtt_nats.base.errors import StartupError
from mqtt_nats.transport.listener_settings import ListenerSettings

VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


def make_context(settings: ListenerSettings) -> ssl.SSLContext:
    """Read the files of a listener.

    Raises:
        StartupError: one of them cannot be used.
    """
    certificate, key, authorities = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    assert certificate is not None
    assert key is not None
    where = f"listener {settings.listen}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = VERSIONS[settings.tls_minimum]
    context.options |= ssl.OP_NO_RENEGOTIATION  # in 1.2, what lets a client have work done for nothing
    locked = False

    def no_passphrase() -> str:
        nonlocal locked
        locked = True
        return ""

    try:
        context.load_cert_chain(certificate, key, no_passphrase)  # without the last it would ask on the terminal
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
        context.verify_mode = ssl.CERT_REQUIRED
    return context
