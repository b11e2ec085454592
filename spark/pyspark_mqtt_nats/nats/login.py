# SPDX-License-Identifier: Apache-2.0
"""CONNECT options for nats-server, and the meaning of its refusals."""

import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, Final

import orjson

from pyspark_mqtt_nats.nats.access import Access, Server

CLIENT_NAME: Final = "pyspark_mqtt_nats"
"""Name of the connections in the lists of nats-server."""

_WAYS: Final = {
    "user": "user and password",
    "servers": "what servers has before the @",
    "tlsCert": "the client certificate of tlsCert",
}
_PASSING: Final = ("maximum connections", "maximum account active connections", "server shutdown", "lame duck")


def connect_line(access: Access, server: Server, info: dict[str, Any]) -> bytes:
    """Return the CONNECT line for a server with this INFO."""
    options: dict[str, Any] = {
        "name": CLIENT_NAME,
        "lang": "python",
        "verbose": False,
        "pedantic": False,
        "protocol": 1,
        "headers": True,
        "no_responders": True,
    }
    nonce = str(info.get("nonce", "")).encode()
    if access.creds is not None:
        options |= {"jwt": access.creds.jwt} | _signed(access.creds.seed, nonce)
    elif access.nkey is not None:
        import nkeys  # few logins need it, and it loads a library

        public = nkeys.from_seed(bytearray(access.nkey.encode())).public_key.decode()
        options |= {"nkey": public} | _signed(access.nkey, nonce)
    elif access.token is not None:
        options["auth_token"] = access.token
    elif access.user is not None:
        options |= {"user": access.user, "pass": access.password or ""}
    elif server.user is not None and server.password is not None:
        options |= {"user": server.user, "pass": server.password}
    elif server.user is not None:
        options["auth_token"] = server.user
    return b"CONNECT %b\r\n" % orjson.dumps(options)


def _signed(seed: str, nonce: bytes) -> dict[str, str]:
    """Return the signature of the server's nonce; empty without a nonce: such a server does not use nkeys."""
    if not nonce:
        return {}
    import nkeys

    signature = nkeys.from_seed(bytearray(seed.encode())).sign(nonce)
    return {"sig": urlsafe_b64encode(signature).rstrip(b"=").decode()}


def is_passing(error: str) -> bool:
    """Whether the error is temporary: the same login may succeed a moment later."""
    return any(words in error.lower() for words in _PASSING)


def refusal(error: str, access: Access) -> tuple[str, str]:
    """Return the meaning of an -ERR before the PONG, as (text, option to change)."""
    lower = error.lower()
    if is_passing(error):
        return f"it takes no more clients now, {error}", "servers"
    if not ("authorization" in lower or "authentication" in lower or "expired" in lower or "revoked" in lower):
        return f"it refused us, {error}", "servers"
    way = access.login
    if not way:
        return "it wants a login: user and password, token, nkey or creds", "user"
    if way == "creds" and access.creds is not None and _expired(access.creds.jwt):
        return "the JWT of the credentials file has expired", "creds"
    return f"it refused the login by {_WAYS.get(way, way)}, {error}", way


def _expired(jwt: str) -> bool:
    try:
        claims = jwt.split(".")[1]
        expires = orjson.loads(urlsafe_b64decode(claims + "=" * (-len(claims) % 4))).get("exp", 0)
    except (ValueError, IndexError, AttributeError):
        return False
    return isinstance(expires, int) and 0 < expires < time.time()
