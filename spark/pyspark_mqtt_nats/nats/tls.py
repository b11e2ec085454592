# SPDX-License-Identifier: Apache-2.0
"""TLS of a connection: the context from PEM texts, and the option to change when a handshake fails."""

import os
import ssl
import tempfile
from typing import Final

from pyspark_mqtt_nats.errors import OptionError
from pyspark_mqtt_nats.nats.access import Access

# Values of X509_V_ERR_*: the name does not match; the certificate is not valid at this time.
_NAME: Final = (62, 64)
_TIME: Final = (9, 10)


def context(access: Access) -> ssl.SSLContext:
    """Return the client's TLS context; raises OptionError when the certificates or the key cannot be used."""
    try:
        made = ssl.create_default_context(cadata=access.tls_ca)
    except ssl.SSLError:
        raise OptionError("tlsCa: the certificates cannot be read", "tlsCa") from None
    if access.tls_cert is not None and access.tls_key is not None:
        _load_chain(made, access.tls_cert, access.tls_key)
    return made


def _load_chain(made: ssl.SSLContext, certificate: str, key: str) -> None:
    """Load the pair from a temporary file (mode 600, deleted at once): OpenSSL reads it from a file only."""

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


def explain(error: ssl.SSLError, access: Access) -> tuple[str, str]:
    """Return the meaning of a failed handshake, as (text, option to change)."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _NAME:
            return "its certificate is for another name", "tlsHostname"
        if error.verify_code in _TIME:
            return f"{error.verify_message}: it has to be renewed there", "servers"
        return f"its certificate is not trusted, {error.verify_message}", "tlsCa"
    reason = (error.reason or "").lower().replace("_", " ")
    if access.tls_cert is None and any(words in reason for words in ("certificate required", "bad certificate")):
        return "it requires a client certificate", "tlsCert"
    if "alert" in reason and any(words in reason for words in ("certificate", "unknown ca")):
        return f"it does not accept the client certificate, {reason}", "tlsCert"
    if any(words in reason for words in ("wrong version", "packet length", "record layer")):
        if access.tls_first:
            return "it does not begin with TLS", "tlsFirst"
        return "it does not speak TLS", "servers"
    return f"TLS failed, {reason or 'the connection was closed'}", "servers"
