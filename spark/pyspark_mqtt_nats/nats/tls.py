# SPDX-License-Identifier: Apache-2.0
"""TLS for a connection: the context from PEM texts, and what to change when a handshake fails."""

import os
import ssl
import tempfile
from typing import Final

from pyspark_mqtt_nats.errors import OptionError
from pyspark_mqtt_nats.nats.access import Access

# Of X509_V_ERR_*: the name does not match; the certificate is not valid at this time.
_NAME: Final = (62, 64)
_TIME: Final = (9, 10)


def context(access: Access) -> ssl.SSLContext:
    """The client's TLS settings; raises OptionError when the certificates or the key cannot be used."""
    try:
        made = ssl.create_default_context(cadata=access.tls_ca)
    except ssl.SSLError:
        raise OptionError("tlsCa: the certificates cannot be read", "tlsCa") from None
    if access.tls_cert is not None and access.tls_key is not None:
        _load_chain(made, access.tls_cert, access.tls_key)
    return made


def _load_chain(made: ssl.SSLContext, certificate: str, key: str) -> None:
    """OpenSSL reads the pair from a file only: one that nobody else can read, and that is gone at once."""

    def encrypted() -> str:
        raise OptionError("tlsKey: the key is encrypted; give one that is not", "tlsKey")

    handle, name = tempfile.mkstemp(prefix="mqtt-nats-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(f"{key}\n{certificate}\n")
        made.load_cert_chain(name, password=encrypted)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise OptionError("tlsKey: it is not the key of tlsCert", "tlsKey") from None
        raise OptionError("tlsCert and tlsKey: the certificate or its key cannot be read", "tlsCert") from None
    finally:
        os.unlink(name)


def explain(error: OSError, access: Access) -> tuple[str, str]:
    """What a failed handshake means, as (text, option to change)."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _NAME:
            return "the certificate is for another name; set tlsHostname to the name that it is for", "tlsHostname"
        if error.verify_code in _TIME:
            return f"the certificate cannot be used now ({error.verify_message}); renew it on the server", "servers"
        return f"the certificate is not trusted ({error.verify_message}); set tlsCa to its authority", "tlsCa"
    reason = str(getattr(error, "reason", None) or "").lower().replace("_", " ")
    if "certificate required" in reason or "bad certificate" in reason or "handshake failure" in reason:
        return "the server wants a client certificate; set tlsCert and tlsKey", "tlsCert"
    if "unknown ca" in reason or "certificate unknown" in reason or "certificate expired" in reason:
        return f"the server does not accept the client certificate ({reason}); set another tlsCert", "tlsCert"
    if "wrong version" in reason or "packet length" in reason or "record layer" in reason:
        if access.tls_first:
            return "the server does not begin with TLS; leave out tlsFirst", "tlsFirst"
        return "the server does not speak TLS; use nats:// in servers", "servers"
    return f"TLS failed ({reason or error.strerror or 'connection closed'})", "servers"
