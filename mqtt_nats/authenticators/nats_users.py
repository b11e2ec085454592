# SPDX-License-Identifier: Apache-2.0
"""The users of nats-server: a client is let in when nats-server would let it in, and may do what it may do there.

For each login a connection is made with what the client presents, and closed again. Over it nats-server is asked who
that is and what it may do, where the user has the permission to ask.
"""

from __future__ import annotations

import asyncio
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

log = logging.getLogger("mqtt_nats.access")

ASK: Final = b"$SYS.REQ.USER.INFO"

# Bytes of a line, and of an answer.
LINE_MOST: Final = 64 * 1024
ANSWER_MOST: Final = 1024 * 1024

# Seconds for which a server that was seen to refuse bad credentials is taken to refuse them.
CHECKED: Final = 60.0

# Seconds to wait for an answer after a user has been let in; one that may not ask has none.
ANSWERED: Final = 2.0


class Refused(Exception):
    """nats-server does not accept the credentials."""


@dataclass(frozen=True, slots=True)
class NatsAccess:
    """How nats-server is reached, and how the gateway itself logs in, as fields of its CONNECT.

    ``login`` None: that is not known, since it takes an nkey.
    """

    servers: tuple[str, ...]
    tls: ssl.SSLContext | None
    hostname: str | None
    login: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class Info:
    """What nats-server says of a user."""

    user: str
    account: str
    rules: SubjectRules
    expires: float | None


class NatsUsers:
    """Clients with the user name and password of a user of nats-server, or with its token or JWT as password."""

    def __init__(self, settings: NatsSettings, access: NatsAccess) -> None:
        self.name = settings.called
        self._settings = settings
        self._access = access
        self._servers = settings.servers or access.servers
        self._requires_tls = access.tls is not None or any(urlsplit(url).scheme == "tls" for url in self._servers)
        self._crowd = Crowd(settings.concurrency)
        self._checked: dict[str, float] = {}
        """When bad credentials were refused last, by their form."""
        self._checking = asyncio.Lock()
        self._account = settings.account

    async def check(self, credentials: Credentials) -> Allow | Ignore | Denied:
        """Log in to nats-server as the client; without an answer in time it is denied."""
        user, password = credentials.username or "", credentials.password
        if not password:  # there are users without: `no_auth_user`, or by their certificate
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
        if info is None:
            if wanted and account is None:
                if "jwt" in login:  # nobody has compared it with the user name of CONNECT
                    return Denied("nats-server does not say whose JWT it is: it may not ask on $SYS.REQ.USER.INFO")
                return Allow(user or None)
            return Denied("nats-server does not say what the user may do: it may not ask on $SYS.REQ.USER.INFO")
        if account is not None and info.account != account:
            return Denied(f"the user is of the account {info.account!r}, not of {account!r}")
        return Allow(info.user if "jwt" in login else user or None, rules=info.rules, expires=info.expires)

    async def _own_account(self) -> str | None:
        """The account that users have to be of; None: any."""
        if self._account == ANY:
            return None
        if self._account is None:
            login = self._access.login
            info = None if login is None else await self._ask(login)
            if info is None:
                text = "the gateway's own user may not ask on $SYS.REQ.USER.INFO for its account: set `account`"
                log.error("authenticator %r: %s", self.name, text)
                raise MqttError(text, ReasonCode.NOT_AUTHORIZED)
            self._account = info.account
        return self._account

    async def _must_refuse(self, login: Mapping[str, str]) -> None:
        """A server that lets everybody in, or goes by the gateway's certificate, proves nothing.

        It may do so for some forms of credentials only: for tokens, when it looks at no token.
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
        log.error("authenticator %r: nats-server accepts any credentials, so it cannot decide", self.name)
        raise MqttError("nats-server accepts anybody", ReasonCode.NOT_AUTHORIZED)

    async def _ask(self, login: Mapping[str, str]) -> Info | None:
        """Log in to the first server that answers; None when the user may not ask who it is.

        Raises:
            Refused: nats-server does.
            OSError, EOFError, ValueError: no server answers as one.
        """
        failure: Exception = OSError("no server")
        for url in self._servers:
            try:
                return await self._log_in(url, login)
            except (OSError, EOFError, ValueError) as error:
                failure = error
        raise failure

    async def _log_in(self, url: str, login: Mapping[str, str]) -> Info | None:
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
            inbox = b"_INBOX." + secrets.token_hex(11).encode()
            writer.write(b"CONNECT %b\r\nPING\r\n" % orjson.dumps({**options, **login}))
            await _pong(reader)
            writer.write(b"SUB %b 1\r\nPUB %b %b 0\r\n\r\nPING\r\n" % (inbox, ASK, inbox))
            try:
                async with asyncio.timeout(ANSWERED):
                    return await _answer(reader)
            except TimeoutError:
                return None
        finally:
            writer.close()
            try:
                await writer.wait_closed()
            except (OSError, ssl.SSLError):
                pass

    def reload(self) -> Callable[[], None]:
        """Nothing to be read; what nats-server does is looked at again."""

        def commit() -> None:
            self._checked.clear()
            self._account = self._settings.account

        return commit

    async def keep(self) -> None:
        """Nothing to be done meanwhile."""

    async def close(self) -> None:
        """Nothing to be closed."""


async def _greeting(reader: asyncio.StreamReader) -> dict[str, Any]:
    """INFO, which is all that comes first: what follows it could be taken for something that is said under TLS.

    Raises:
        EOFError, ValueError: it is not that.
    """
    data = b""
    while b"\n" not in data:
        more = await reader.read(LINE_MOST)
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


async def _answer(reader: asyncio.StreamReader) -> Info | None:
    """What nats-server says of the user; None when it may not ask."""
    while True:
        line = await reader.readline()
        if not line:
            raise EOFError
        if line.startswith(b"-ERR"):
            if b"Permissions Violation" in line:
                return None
            raise Refused  # it has been let in, and is thrown out: revoked, or too many connections
        if line.startswith((b"MSG ", b"HMSG ")):
            size = int(line.split()[-1])
            if size > ANSWER_MOST:
                raise ValueError("the answer is too long")
            payload = await reader.readexactly(size)
            if line.startswith(b"HMSG "):  # nobody answers: an old server
                return None
            return parse_info(payload, time())


def parse_info(payload: bytes, now: float) -> Info:
    """The answer of nats-server; ``now`` is Unix time. Raises ValueError."""
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
    """The fields of CONNECT: a JWT of NATS stands for itself, a password without user is a token."""
    if password.startswith("eyJ") and password.count(".") == 2:
        return {"jwt": password, "sig": ""}
    return {"user": user, "pass": password} if user else {"auth_token": password}


def own_login(url: str, user: str | None, password: str | None, token: str | None) -> dict[str, str]:
    """How the gateway logs in, by its settings or by what stands in the first URL."""
    parts = urlsplit(url)
    if user is not None:
        return {"user": user, "pass": password or ""}
    if token is not None:
        return {"auth_token": token}
    if parts.username and parts.password is not None:
        return {"user": unquote(parts.username), "pass": unquote(parts.password)}
    return {"auth_token": unquote(parts.username)} if parts.username else {}
