# SPDX-License-Identifier: Apache-2.0
"""Guard of the admin listener: who asks, from which page, and how many at a time, before a request is answered."""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable, Set
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mqtt_nats.access.settings import is_loopback
from mqtt_nats.admin.access.administrators import Administrator, Administrators
from mqtt_nats.base.logs import log_failure, once
from mqtt_nats.control.audit import Action, AuditTrail

log = logging.getLogger("mqtt_nats.admin")

BODY_MOST: Final = 1024 * 1024
"""Bytes of a request's body."""

REQUESTS_MOST: Final = 200
"""Requests under way; more are answered with status 503."""

LIVE: Final = "/healthz"
"""Is answered anyhow: who watches over processes would end a gateway that is only asked too much."""

ADMINISTRATOR: Final = "mqtt_nats.administrator"
"""Key, in the scope of a request, of who has made it."""

SUBPROTOCOL: Final = "mqtt-nats"

TOKEN: Final = "token."
"""Before the token, in base64 for URLs, among the subprotocols of a WebSocket: browsers can send it nowhere else."""

OWN_SITES: Final = ("same-origin", "none")
"""Values of `Sec-Fetch-Site` in requests of the listener's own page, and of an address that was typed."""

HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def problem(status: int, text: str) -> Response:
    """Response of one line that names the error."""
    return Response(orjson.dumps({"error": text}), status, media_type="application/json")


class Guard:
    """An ASGI application in front of another.

    Args:
        open_paths: what is answered without a token.
        administrators: returns those of the present, who have tokens or not.
        proved: there is another proof, a certificate.
    """

    def __init__(
        self, app: ASGIApp, open_paths: Set[str], administrators: Callable[[], Administrators], proved: bool
    ) -> None:
        self._app = app
        self._open = open_paths
        self._administrators = administrators
        self._proved = proved
        self._busy = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            return
        refused = self._refusal(scope)
        if refused is not None:
            await (refused(scope, receive, _marked(send)) if scope["type"] == "http" else _close(receive, send))
        elif scope["type"] == "http":
            self._busy += 1
            try:
                await self._app(scope, receive, _marked(send))
            finally:
                self._busy -= 1
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        administrators = self._administrators()
        if not administrators.have_tokens and not self._proved and not _near(host):
            # A name of somebody else's that leads here: a page in a browser of this machine would get in by it.
            return problem(403, "without a token, requests must name 127.0.0.1, ::1 or localhost as their host")
        if any(_netloc(origin) != host for origin in headers.getlist("origin")) or self._is_foreign(scope, headers):
            return problem(403, "the request comes from a page of another origin")
        administrator = administrators.of(_presented(scope, headers))
        if administrator is not None:
            scope[ADMINISTRATOR] = administrator
        elif scope["path"] not in self._open:
            client = scope.get("client")
            text = "admin listener: request from %s without a valid token"
            log_failure(
                log, logging.WARNING, "admin_token", text, client[0] if client else "somebody", extra=once(text)
            )
            found = problem(401, "a bearer token is needed")
            found.headers["www-authenticate"] = 'Bearer realm="mqtt-nats"'
            return found
        if self._busy >= REQUESTS_MOST and scope["type"] == "http" and scope["path"] != LIVE:
            return problem(503, "too many requests are under way")
        size = headers.get("content-length", "0")
        if not (size.isascii() and size.isdecimal()) or int(size) > BODY_MOST:
            return problem(413, f"the body has more than {BODY_MOST} bytes")
        return None

    def _is_foreign(self, scope: Scope, headers: Headers) -> bool:
        """Whether a browser says that a page of another site has made the request, also one without `Origin` (GET).

        A link may lead to the dashboard: its page tells nothing by itself.
        """
        if all(site in OWN_SITES for site in headers.getlist("sec-fetch-site")):
            return False
        followed = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        return not (followed and scope["type"] == "http" and scope["method"] == "GET" and scope["path"] in self._open)


def administrator_of(scope: Scope) -> Administrator:
    """Return who has made a request that the guard has let through."""
    found: Administrator = scope[ADMINISTRATOR]
    return found


def is_dismissed(scope: Scope, administrators: Administrators) -> bool:
    """Whether a request that the guard has let through would not be let through by these administrators as the same."""
    made_by = scope.get(ADMINISTRATOR)
    return made_by is not None and administrators.of(_presented(scope, Headers(scope=scope))) != made_by


def begin_action(audit_trail: AuditTrail, scope: Scope, operation: str, values: dict[str, Any]) -> Action:
    """Note that whoever has made a request does something. A payload is not noted, only its size.

    The values were not checked: they may be any JSON.
    """
    who, client = administrator_of(scope), scope.get("client")
    told = {name: _sized(one) if name == "payload" else one for name, one in values.items()}
    try:
        arguments = orjson.dumps(told, default=str).decode(errors="replace")
    except orjson.JSONEncodeError:  # it has more levels than orjson writes, though fewer than it reads
        arguments = f"{', '.join(told)}: JSON of too many levels"
    return audit_trail.begin(who.name, who.role, client[0] if client else "unknown", operation, arguments)


def _sized(payload: object) -> str:
    return f"{len(payload)} characters" if isinstance(payload, str) else "no text"


def _presented(scope: Scope, headers: Headers) -> bytes | None:
    """Return the token of a request; None: there is none."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return given.strip(" \t").encode("latin-1", "replace")
    for one in scope["subprotocols"] if scope["type"] == "websocket" else ():
        if one.startswith(TOKEN):
            text = one.removeprefix(TOKEN)
            try:
                return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            except (binascii.Error, ValueError):
                return None
    return None


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _near(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def _marked(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending


async def _close(receive: Receive, send: Send) -> None:
    """Refuse a WebSocket: before it is accepted, closing is status 403."""
    await receive()
    await send({"type": "websocket.close", "code": 1008})


async def read_body(receive: Receive) -> bytes | None:
    """The body of a request; None where it has more than it may, or its sender has gone."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > BODY_MOST:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)
