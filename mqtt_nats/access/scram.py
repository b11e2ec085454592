# SPDX-License-Identifier: Apache-2.0
"""SCRAM-SHA-256 (RFC 5802, RFC 7677), without channel binding.

The exchange of an unknown user uses a salt and keys derived from its name, and fails at the same step as a wrong
password. Salt and keys are derived for every user, so that the time does not show whether the user exists.
"""

from __future__ import annotations

import hmac
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from scramp import ScramException
from scramp.core import ScramServer

from mqtt_nats.access.authenticator import Challenge, Denied, Success
from mqtt_nats.access.verifiers import ITERATIONS, MECHANISM, NOBODY, Verifier

METHOD: Final = "SCRAM-SHA-256"

# Most bytes of a message. SASLprep takes a microsecond or more per character, before the client is authenticated.
MESSAGE_MOST: Final = 1024


class Users:
    """SCRAM users of a file; derives verifiers for unknown users."""

    def __init__(self, verifiers: Mapping[str, Verifier]) -> None:
        self._verifiers = {name: verifier for name, verifier in verifiers.items() if name != NOBODY}
        nobody = verifiers.get(NOBODY)
        self._secret = nobody.server_key if nobody is not None else secrets.token_bytes(32)
        shapes = Counter((one.iterations, len(one.salt)) for one in self._verifiers.values())
        self._iterations, self._salt_size = shapes.most_common(1)[0][0] if shapes else (ITERATIONS, 16)

    def find(self, name: str) -> Verifier:
        """Return the verifier of a user; for an unknown user always the same one, which no password fits."""
        salt, stored, server = (self._derive(b"%b:%b" % (kind, name.encode())) for kind in (b"salt", b"key", b"server"))
        while len(salt) < self._salt_size:
            salt += self._derive(salt)
        made = Verifier(self._iterations, salt[: self._salt_size], stored, server)
        return self._verifiers.get(name, made)

    def known(self, name: str) -> Verifier | None:
        """Return the verifier of a user in the file, None for an unknown user."""
        return self._verifiers.get(name)

    def _derive(self, text: bytes) -> bytes:
        return hmac.digest(self._secret, text, "sha256")


class ScramExchange:
    """Exchange of SCRAM-SHA-256 with a client.

    Args:
        users: returns the present users.
        nonce: the server's part of the nonce; printable ASCII without comma, new for each exchange.
    """

    def __init__(self, users: Callable[[], Users], nonce: str) -> None:
        self._users = users
        self._verifier: Verifier | None = None
        self._server: ScramServer | None = MECHANISM.make_server(self._find, s_nonce=nonce)
        """State of the exchange; None when the exchange has ended."""
        self._begun = False
        self._user = ""

    async def step(self, data: bytes | None) -> Challenge | Success | Denied:
        """Process the client's message; an empty challenge requests a missing first one (RFC 4422, section 5.1)."""
        server = self._server
        if server is None:
            return Denied("the exchange is over")
        if not data and not self._begun:
            return Challenge(b"")
        self._server = None
        if not data or len(data) > MESSAGE_MOST:
            return Denied("a message is missing or too long")
        try:
            message = data.decode()
            if self._begun:
                server.set_client_final(message)
                return Success(server.get_server_final().encode(), self._user, partial(self._valid, self._verifier))
            server.set_client_first(message)
            self._begun = True
            challenge = Challenge(server.get_server_first().encode())
            self._server = server
        except UnicodeDecodeError:
            return Denied("a message is not UTF-8")
        except ScramException as error:
            return Denied(f"user {self._user!r}: {error}")
        return challenge

    def _find(self, name: str) -> tuple[bytes, bytes, bytes, int]:
        self._user = name
        found = self._verifier = self._users().find(name)
        return found.salt, found.stored_key, found.server_key, found.iterations

    def _valid(self, verifier: Verifier | None) -> bool:
        return self._users().known(self._user) == verifier
