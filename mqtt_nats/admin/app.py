# SPDX-License-Identifier: Apache-2.0
"""Answers of the admin listener, path by path."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp

from mqtt_nats.admin.access.guard import Guard, administrator_of, problem
from mqtt_nats.admin.api import PREFIX, Api, describe
from mqtt_nats.admin.bridge import Bridge
from mqtt_nats.admin.metrics import collect
from mqtt_nats.admin.trace import TRACE
from mqtt_nats.base.errors import StartupError
from mqtt_nats.ctl.verbs import VERBS

if TYPE_CHECKING:
    from mqtt_nats.admin.listener import AdminListener

SCRIPT: Final = "text/javascript; charset=utf-8"

SCRIPTS: Final = (
    *("page", "ask", "bridge", "charts", "clients", "list", "messages", "operation", "overview", "parts", "trace"),
)
"""The modules of the dashboard."""

PAGE: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    **{f"/{name}.js": (f"{name}.js", SCRIPT) for name in SCRIPTS},
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""The files of the dashboard."""

OPEN: Final = frozenset(("/healthz", "/readyz", *PAGE))
"""Paths without a token: health of the gateway, and the page without its data."""


def make_app(listener: AdminListener) -> ASGIApp:
    """Make the application of the admin listener, with the guard in front."""

    async def healthz(request: Request) -> Response:
        """The event loop runs: that is all."""
        return Response("ok\n", media_type="text/plain")

    async def readyz(request: Request) -> Response:
        obstacle = listener.obstacle
        return Response(f"{obstacle or 'ready'}\n", 503 if obstacle else 200, media_type="text/plain")

    async def metrics(request: Request) -> Response:
        unknown = [name for name in request.query_params if name != "aggregated"]
        aggregated = request.query_params.get("aggregated", "false")
        if unknown or aggregated not in ("true", "false"):
            return problem(400, "expected /metrics, or /metrics?aggregated=true for the sums of all workers")
        try:
            body, kind = await collect(listener, aggregated == "true", request.headers.get("accept", ""))
        except StartupError as error:
            return problem(503, str(error))
        return Response(body, headers={"content-type": kind, "vary": "accept"})

    async def openapi(request: Request) -> Response:
        return _json(describe((*VERBS, TRACE), listener.administrators.have_tokens))

    async def about(request: Request) -> Response:
        """Return the settings that the page reads first."""
        who = administrator_of(request.scope)
        about = {"gateway": listener.gateway.name(), "obstacle": listener.obstacle}
        return _json({**about, "administrator": who.name, "role": who.role})

    async def page(request: Request) -> Response:
        name, kind = PAGE[request.url.path]
        body = (files("mqtt_nats.admin") / "static" / name).read_bytes()
        return Response(body, headers={"content-type": kind})

    api = Api(listener, (*VERBS, TRACE), listener.gateway.audit_trail)
    routes = [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
        Route("/about", about),
        WebSocketRoute("/bridge", Bridge(listener).serve),
        Route(f"{PREFIX}/{{path:path}}", api),
        *(Route(path, page) for path in PAGE),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _wrong})
    return Guard(app, OPEN, lambda: listener.administrators, proved=listener.settings.admin_tls_client_ca is not None)


def _json(found: Any) -> Response:
    return Response(orjson.dumps(found), media_type="application/json")


async def _wrong(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"the path {request.url.path} does not exist" if error.status_code == 404 else error.detail
    found = problem(error.status_code, text)
    for name, value in (error.headers or {}).items():
        found.headers[name] = value
    return found
