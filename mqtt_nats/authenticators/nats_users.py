# SPDX-License-Identifier: Apache-2.0
"""Authenticator for users of nats-server: nats-server decides about the login, and its permissions restrict the client.

For each login the gateway opens a connection to nats-server with the client's credentials, and closes it again. Over
that connection it requests user, account and permissions, if the user is allowed to request them: to publish to `ASK`,
and to subscribe the subjects of its own log-ins (:func:`asked_on`). No payload of a client, and no reply to a gateway,
is on these subjects.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic, time
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import orjson

from mqtt_nats.access.authenticator import IGNORE, Allow, Credentials, Denied, Ignore
from mqtt_nats.access.settings import ANY, NatsSettings
from mqtt_nats.authenticators.admission_queue import Crowd
from mqtt_nats.authenticators.subject_rules import SubjectRules, Subjects
from mqtt_nats.codec import MqttError, ReasonCode
from mqtt_streams.hashing import subject_token

log = logging.getLogger("mqtt_nats.access")

ASK: Final = b"$SYS.REQ.USER.INFO"

LOG_IN: Final = "$MQTT.login."
"""Prefix of the subjects on which nats-server's answers to `ASK` arrive; the next token is the user."""

UNNAMED: Final = "_"
"""That token for a login without user name."""

# Most bytes of a protocol line, and of an answer.
LINE_MOST: Final = 64 * 1024
ANSWER_MOST: Final = 1024 * 1024

# Bytes of a read that leaves nothing unread: more than twice the limit of the reader and one read of the socket.
ALL_UNREAD: Final = 1024 * 1024

# Seconds for which the check that nats-server refuses wrong credentials is valid.
CHECKED: Final = 60.0

# Seconds to wait for the answer to `ASK`; a user without the permission gets none.
ASK_TIMEOUT_S: Final = 2.0


class Refused(Exception):
    """nats-server refuses the credentials."""


@dataclass(frozen=True, slots=True)
class NatsAccess:
    """Servers and TLS settings of nats-server, and the gateway's own login as fields of CONNECT.

    ``login`` None: not usable here, since the gateway logs in by an nkey.
    """

    servers: tuple[str, ...]
    tls: ssl.SSLContext | None
    hostname: str | None
    login: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Info:
    """User, account and permissions in nats-server's answer."""

    user: str
    account: str
    rules: SubjectRules
    expires: float | None


class Untold(str):
    """Why nats-server does not name the user and its permissions: the right that the user lacks."""

    __slots__ = ()


class NatsUsers:
    """Authenticator for user name and password of a user of nats-server, or a token or JWT of one as password."""

    def __init__(self, settings: NatsSettings, access: NatsAccess) -> None:
        self.name = settings.called
        self._settings = settings
        self._access = access
        self._servers = settings.servers or access.servers
        self._requires_tls = access.tls is not None or any(urlsplit(url).scheme == "tls" for url in self._servers)
        self._crowd = Crowd(settings.concurrency)
        self._checked: dict[str, float] = {}
        """Time (`monotonic`, seconds) at which wrong credentials were refused last, by the form of the credentials."""
        self._checking = asyncio.Lock()
        self._account = settings.account

    async def check(self, credentials: Credentials) -> Allow | Ignore | Denied:
        """Log in to nats-server as the client; a time-out denies the client."""
        user, password = credentials.username or "", credentials.password
        if not password:  # nats-server may admit users without a password: `no_auth_user`, or by certificate
            return IGNORE
        try:
            login = _login(user, password.decode())
        except UnicodeDecodeError:
            return Denied("the password is not UTF-8", ReasonCode.BAD_USER_NAME_OR_PASSWORD)
        return await self._crowd.run(credentials.connection.host, lambda: self._decide(user, login))

    async def _decide(self, user: str, login: dict[str, str]) -> Allow | Denied:
        wanted = self._settings.permissions == "wanted"
        try:
            async with asyncio.timeout(self._settings.timeout):
                await self._must_refuse(login)
                info = await self._ask(login)
                account = await self._own_account()
        except Refused:
            return Denied("nats-server refuses the credentials", ReasonCode.BAD_USER_NAME_OR_PASSWORD)
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            why = f"nats-server cannot be asked: {type(error).__name__}"
            return Denied(why, ReasonCode.SERVER_UNAVAILABLE)
        if isinstance(info, Untold):
            if wanted and account is None:
                if "jwt" in login:  # nats-server has not compared the JWT with the user name of CONNECT
                    return Denied(info)
                return Allow(user or None)
            return Denied(info)
        if account is not None and info.account != account:
            return Denied(f"the user is of the account {info.account!r}, not of {account!r}")
        return Allow(info.user if "jwt" in login else user or None, rules=info.rules, expires=info.expires)

    async def _own_account(self) -> str | None:
        """Return the account to which users have to belong; None: any."""
        if self._account == ANY:
            return None
        if self._account is None:
            login = self._access.login
            info = Untold("the gateway logs in by an nkey") if login is None else await self._ask(login)
            if isinstance(info, Untold):
                text = f"the gateway's own account is not known, set `account`: {info}"
                log.error("authenticator %r: %s", self.name, text)
                raise MqttError(text, ReasonCode.NOT_AUTHORIZED)
            self._account = info.account
        return self._account

    async def _must_refuse(self, login: Mapping[str, str]) -> None:
        """Raise MqttError if nats-server accepts random credentials of this form: then a login proves nothing.

        It may do so for one form only (as where it ignores tokens), or because of the gateway's certificate.
        """
        form = next(iter(login))
        async with self._checking:
            if monotonic() - self._checked.get(form, -CHECKED) < CHECKED:
                return
            try:
                await self._ask(dict.fromkeys(login, secrets.token_hex(16)))
            except Refused:
                self._checked[form] = monotonic()
                return
        log.error("authenticator %r: nats-server accepts any credentials, so it cannot authenticate clients", self.name)
        raise MqttError("nats-server accepts any credentials", ReasonCode.NOT_AUTHORIZED)

    async def _ask(self, login: Mapping[str, str]) -> Info | Untold:
        """Log in to the first server that answers, and return its answer.

        Raises:
            Refused: nats-server refuses the credentials.
            OSError, EOFError, ValueError: no server answers as a nats-server.
        """
        failure: Exception = OSError("no server")
        for url in self._servers:
            try:
                return await self._log_in(url, login)
            except (OSError, EOFError, ValueError) as error:
                failure = error
        raise failure

    async def _log_in(self, url: str, login: Mapping[str, str]) -> Info | Untold:
        parts = urlsplit(url)
        host = parts.hostname or ""
        reader, writer = await asyncio.open_connection(host, parts.port or 4222, limit=LINE_MOST)
        try:
            info = await _greeting(reader)
            if self._requires_tls or info.get("tls_required"):
                if not (info.get("tls_required") or info.get("tls_available")):
                    raise ValueError("nats-server offers no TLS, which a URL or a setting of TLS asks for")
                context = self._access.tls or ssl.create_default_context()
                await writer.start_tls(context, server_hostname=self._access.hostname or host)
            options = {"verbose": False, "pedantic": False, "lang": "python", "version": "1", "name": "mqtt-nats login"}
            subject = asked_on(login)
            inbox = subject.encode() + secrets.token_hex(11).encode()
            writer.write(b"CONNECT %b\r\nPING\r\n" % orjson.dumps({**options, **login}))
            await _pong(reader)
            writer.write(b"SUB %b 1\r\nPUB %b %b 0\r\n\r\nPING\r\n" % (inbox, ASK, inbox))
            try:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    return await _answer(reader, subject)
            except TimeoutError:
                return Untold(f"nats-server does not name the user's permissions within {ASK_TIMEOUT_S:g} s")
        finally:
            writer.close()
            try:
                await writer.wait_closed()
            except (OSError, ssl.SSLError):
                pass

    def reload(self) -> Callable[[], None]:
        """Return a function that discards the check of wrong credentials and the account; there is no file to read."""

        def commit() -> None:
            self._checked.clear()
            self._account = self._settings.account

        return commit

    async def keep_current(self) -> None:
        """Do nothing: there is no background work."""

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


async def _greeting(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the INFO of nats-server. Bytes behind INFO are an error: they would be read as if received under TLS.

    Raises:
        EOFError, ValueError: the data is not exactly INFO.
    """
    data = b""
    while b"\n" not in data:
        more = await reader.read(ALL_UNREAD)
        data += more
        if not more or len(data) > LINE_MOST:
            raise EOFError
    line, _, rest = data.partition(b"\n")
    info = orjson.loads(line[5:]) if line.startswith(b"INFO ") and not rest else None
    if not isinstance(info, dict):
        raise ValueError("not a nats-server")
    return info


async def _pong(reader: asyncio.StreamReader) -> None:
    while True:
        line = await reader.readline()
        if line.startswith(b"PONG"):
            return
        if line.startswith(b"-ERR"):
            raise Refused
        if not line:
            raise EOFError


async def _answer(reader: asyncio.StreamReader, inbox: str) -> Info | Untold:
    """Return nats-server's answer to `ASK`, which is to arrive below ``inbox``."""
    while True:
        line = await reader.readline()
        if not line:
            raise EOFError
        if line.startswith(b"-ERR"):
            if b"Permissions Violation for Subscription" in line:
                return Untold(f"the NATS user may not subscribe to {inbox}*")
            if b"Permissions Violation" in line:
                return Untold(f"the NATS user may not publish to {ASK.decode()}")
            raise Refused  # disconnected after the login: revoked, or too many connections
        if line.startswith((b"MSG ", b"HMSG ")):
            size = int(line.split()[-1])
            if size > ANSWER_MOST:
                raise ValueError("the answer is too long")
            payload = await reader.readexactly(size)
            if line.startswith(b"HMSG "):  # "no responders": an old nats-server
                return Untold(f"nats-server does not answer to {ASK.decode()}")
            return parse_info(payload, time())


def parse_info(payload: bytes, now: float) -> Info:
    """Parse the answer of nats-server; ``now`` is Unix time in seconds. Raises ValueError."""
    data: Any = orjson.loads(payload)
    found = data.get("data") if isinstance(data, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("account"), str):
        raise ValueError("the answer has no user")
    permissions = found.get("permissions") or {}
    if not isinstance(permissions, dict):
        raise ValueError("expected permissions")
    expires = found.get("expires") or 0
    if not isinstance(expires, int | float):
        raise ValueError("expected a time")
    return Info(
        str(found.get("user", "")),
        found["account"],
        SubjectRules(Subjects.parse(permissions.get("publish")), Subjects.parse(permissions.get("subscribe"))),
        now + expires / 1e9 if expires > 0 else None,
    )


def _login(user: str, password: str) -> dict[str, str]:
    """Return the login fields of CONNECT: a JWT of NATS alone, a password without user as token."""
    if password.startswith("eyJ") and password.count(".") == 2:
        return {"jwt": password, "sig": ""}
    return {"user": user, "pass": password} if user else {"auth_token": password}


def asked_on(login: Mapping[str, str]) -> str:
    """Return the prefix of the subjects on which answers about a login arrive: no other user needs a right on these.

    A JWT names its user by the public key that it is for; nats-server has verified that.
    """
    name = login.get("user", "")
    if "jwt" in login:
        try:
            claims = login["jwt"].split(".")[1]
            found = orjson.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
            name = str(found["sub"])
        except (ValueError, LookupError, TypeError):  # nats-server refuses such a JWT
            name = ""
    return f"{LOG_IN}{subject_token(name) if name else UNNAMED}."


def own_login(url: str, user: str | None, password: str | None, token: str | None) -> dict[str, str]:
    """Return the gateway's own login fields of CONNECT, from its settings or from the first URL."""
    parts = urlsplit(url)
    if user is not None:
        return {"user": user, "pass": password or ""}
    if token is not None:
        return {"auth_token": token}
    if parts.username and parts.password is not None:
        return {"user": unquote(parts.username), "pass": unquote(parts.password)}
    return {"auth_token": unquote(parts.username)} if parts.username else {}
