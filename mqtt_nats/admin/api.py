# SPDX-License-Identifier: Apache-2.0
"""``/api/v1``: the verbs of the command line over HTTP, and their description, made from the same table."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote

import orjson
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mqtt_nats import __version__
from mqtt_nats.admin.access.guard import BODY_MOST, administrator_of, begin_action, problem, read_body
from mqtt_nats.admin.results import result_schema
from mqtt_nats.admin.trace import LINES, Lines
from mqtt_nats.base.errors import StartupError, worded
from mqtt_nats.control.audit import DONE, AuditTrail
from mqtt_nats.ctl.gateway_requests import run_verb
from mqtt_nats.ctl.verb import ADMINISTRATOR, Arguments, Paged, Refused, Verb
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout

if TYPE_CHECKING:
    from mqtt_nats.admin.listener import AdminListener

log = logging.getLogger("mqtt_nats.audit")

PREFIX: Final = "/api/v1"

HERE_ONLY: Final = {"streams.list": frozenset(("monitor",))}
"""Arguments for the command line: a gateway asks no address that somebody names over HTTP."""

REFERENCE: Final = "#/components/schemas/"

JSON: Final = "application/json"

LIMITS: Final = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum"}
"""Names in JSON schema of the limits of a value that has several types."""

LISTED: Final = 100
"""Entries of a list in an answer, where the request names no limit."""

LISTED_MOST: Final = 1000
"""Most entries of a list in an answer."""

LISTS_AT_ONCE: Final = 4
"""Maximum number of lists made at a time; other requests wait. A list may have hundreds of thousands of entries."""

FIELDS_MOST: Final = 100
"""Arguments in a query, each value of a list counted."""


class BadRequest(Exception):
    """A request cannot be understood; the message is one line with the reason."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


class Api:
    """Answers for all verbs of a table.

    Args:
        audit_trail: where it is noted what administrators do.
    """

    def __init__(self, listener: AdminListener, verbs: Sequence[Verb], audit_trail: AuditTrail) -> None:
        self._listener = listener
        # What a path says literally goes before what stands for anything.
        self._verbs = sorted(verbs, key=lambda one: len(one.in_path))
        self._audit_trail = audit_trail
        self._lists = asyncio.Semaphore(LISTS_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await (await self.answer(Request(scope, receive)))(scope, receive, send)

    async def answer(self, request: Request) -> Response:
        """The response to a request: HEAD is answered like GET, of which the server leaves the body out."""
        if request.method == "OPTIONS" and (allowed := self._methods(request)):
            return Response(status_code=204, headers={"allow": ", ".join(allowed)})
        try:
            verb, values = self._find(request)
            values |= await _given(verb, request, values)
        except BadRequest as error:
            found = problem(error.status, str(error))
            if error.status == 405:
                found.headers["allow"] = ", ".join(self._methods(request))
            return found
        if verb.role == "viewer":
            return await self._run(verb, values, request)
        action = begin_action(self._audit_trail, request.scope, verb.name, values)
        found = await self._run(verb, values, request)
        action.end(DONE if found.status_code == 200 else str(orjson.loads(found.body)["error"]))
        return found

    async def _run(self, verb: Verb, values: dict[str, Any], request: Request) -> Response:
        """The response of a verb to somebody who may use it, or the error."""
        administrator = administrator_of(request.scope)
        if verb.role == "administrator" and administrator.role != verb.role:
            return problem(403, f"{verb.name} is for administrators: {administrator.name} has the role viewer")
        ADMINISTRATOR.set(administrator.name)  # each request has a task, so a context, of its own
        try:
            arguments = _validated(verb, values)
            async with self._lists if isinstance(arguments, Paged) else nullcontext():
                result = await _done(verb, run_verb(verb, await self._listener.inbox(), arguments), request.receive)
        except BadRequest as error:
            return problem(error.status, str(error))
        except Refused as error:
            return self._failed(error.status, str(error))
        except StartupError as error:  # NATS cannot be reached
            return self._failed(503, str(error))
        except NoResponders:
            return self._failed(503, "JetStream does not answer, or no gateway has run yet")
        except RequestTimeout as error:
            return self._failed(504, _text(error))
        except ApiError as error:
            return self._failed(502, f"JetStream refuses the request: {_text(error)}")
        except Exception:
            log.exception("%s failed", verb.name)
            return problem(500, "internal error: see the log of the gateway")
        if verb.lines:
            return Lines(result)
        return Response(orjson.dumps(result), media_type=JSON)

    def _failed(self, status: int, text: str) -> Response:
        """A problem; one of NATS (502 to 504) with what this gateway knows of it."""
        obstacle = self._listener.obstacle if status > 500 else ""
        return problem(status, f"{text} (this gateway is not ready: {obstacle})" if obstacle else text)

    def _matching(self, request: Request) -> list[tuple[Verb, dict[str, str]]]:
        raw: bytes = request.scope["raw_path"]
        try:
            path = raw.decode("ascii")
        except UnicodeDecodeError:
            return []
        parts = path.partition("?")[0].removeprefix(PREFIX).split("/")
        found = []
        for verb in self._verbs:
            values = _matched(verb.path.split("/"), parts)
            if values is not None:
                found.append((verb, values))
        return found

    def _methods(self, request: Request) -> list[str]:
        found: set[str] = {verb.method for verb, _ in self._matching(request)}
        return sorted(found | {"OPTIONS"} | ({"HEAD"} if "GET" in found else set())) if found else []

    def _find(self, request: Request) -> tuple[Verb, dict[str, Any]]:
        matching = self._matching(request)
        if not matching:
            raise BadRequest(f"the path {request.url.path} does not exist: see /openapi.json", 404)
        fewest = len(matching[0][0].in_path)
        method = "GET" if request.method == "HEAD" else request.method
        for verb, values in matching:
            if verb.method == method and len(verb.in_path) == fewest and not (verb.lines and request.method == "HEAD"):
                return verb, dict(values)
        for verb, values in matching:
            if verb.method == method and not (verb.lines and request.method == "HEAD"):
                return verb, dict(values)
        raise BadRequest(f"the method {request.method} is not allowed for {request.url.path}", 405)


def _validated(verb: Verb, values: dict[str, Any]) -> Arguments:
    """The arguments of a request. No answer has a whole list, which may be too long: see `LISTED_MOST`.

    Raises:
        BadRequest: one of them is wrong.
    """
    if issubclass(verb.arguments, Paged):
        values = {"limit": LISTED, **values}
    try:
        arguments = verb.arguments(**values)
    except ValidationError as error:
        raise BadRequest(_one_line(error)) from None
    if isinstance(arguments, Paged) and not 0 < arguments.limit <= LISTED_MOST:
        raise BadRequest(f"limit: input should be from 1 to {LISTED_MOST}; offset leads to the others")
    return arguments


async def _done(verb: Verb, running: Awaitable[Any], receive: Receive) -> Any:
    """The result of a verb; of one that waits, only while somebody is there for it.

    Raises:
        Refused: nobody is.
    """
    if not verb.waits:
        return await running
    work, gone = asyncio.ensure_future(running), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise Refused("the HTTP client has disconnected")
        return work.result()
    finally:
        gone.cancel()
        work.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _matched(template: list[str], parts: list[str]) -> dict[str, str] | None:
    """The arguments that a path has where its template names them; None where it does not match."""
    if len(template) != len(parts):
        return None
    values: dict[str, str] = {}
    for wanted, part in zip(template, parts, strict=True):
        if wanted.startswith("{"):
            try:
                values[wanted[1:-1]] = unquote(part, errors="strict")
            except UnicodeDecodeError:
                return None
            if not part:
                return None
        elif wanted != part:
            return None
    return values


async def _given(verb: Verb, request: Request, known: dict[str, Any]) -> dict[str, Any]:
    """Arguments from the query, or from the body, which the path does not name.

    Raises:
        BadRequest: they cannot be read.
    """
    values: dict[str, Any] = {}
    lists = {name for name, schema in _properties(verb).items() if _is_list(schema)}
    try:
        pairs = parse_qsl(
            request.scope["query_string"].decode("ascii"),
            keep_blank_values=True,
            strict_parsing=bool(request.scope["query_string"]),
            errors="strict",
            max_num_fields=FIELDS_MOST,
        )
    except ValueError:
        raise BadRequest("the query cannot be read") from None
    if pairs and verb.method == "POST":
        raise BadRequest("arguments belong into the body, as JSON")
    for name, value in pairs:
        if name in lists:
            values.setdefault(name, []).append(value)
        elif name in values:
            raise BadRequest(f"{name} is given twice")
        else:
            values[name] = value
    body = await read_body(request.receive)
    if body is None:
        raise BadRequest("the body is too large", 413)
    if body:
        if verb.method != "POST":
            raise BadRequest("arguments belong into the query")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise BadRequest("expected a body of type application/json", 415)
        try:
            values = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the body is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise BadRequest("expected a JSON object")
    for name in values:
        if name in HERE_ONLY.get(verb.name, ()):
            raise BadRequest(f"{name}: there is no such argument")
        if name in known:
            raise BadRequest(f"{name} is given by the path")
    return values


def _one_line(error: ValidationError) -> str:
    problems = []
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        where = ".".join(map(str, detail["loc"]))
        text = worded(detail, "an object")
        if detail["type"] == "extra_forbidden":
            text = "there is no such argument"
        problems.append(f"{where}: {text}" if where else text)
    return "; ".join(problems)


def _text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# -- description ------------------------------------------------------------------------------------


def _properties(verb: Verb, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    """The arguments that can be given over HTTP."""
    found: dict[str, Any] = (schema or verb.arguments.model_json_schema()).get("properties", {})
    longest = verb.arguments.model_config.get("str_max_length")
    properties: dict[str, Any] = {}
    for name, one in found.items():
        if name not in HERE_ONLY.get(verb.name, ()):
            properties[name] = _limited(one, longest)
            given = verb.arguments.model_fields[name].default
            if isinstance(given, float):  # the command line says it in words
                properties[name]["default"] = given
    if issubclass(verb.arguments, Paged):
        properties["limit"] |= {"default": LISTED, "minimum": 1, "maximum": LISTED_MOST}
        properties["limit"]["description"] = "So many at most."
    return properties


def _limited(schema: dict[str, Any], longest: int | None) -> dict[str, Any]:
    """A schema that names its limits, without what is for the command line alone."""
    found = {key: one for key, one in schema.items() if key not in ("metavar", "flag", "ge", "le", "gt")}
    limits = {name: schema[key] for key, name in LIMITS.items() if key in schema}
    if "anyOf" in found:
        several = [_limited(one, longest) for one in found["anyOf"]]
        found["anyOf"] = [one | limits if one.get("type") == "number" else one for one in several]
    if "items" in found:
        found["items"] = _limited(found["items"], longest)
    if longest is not None and found.get("type") == "string" and "enum" not in found:
        found.setdefault("maxLength", longest)
    return found


def _is_list(schema: dict[str, Any]) -> bool:
    return schema.get("type") == "array" or any(_is_list(one) for one in schema.get("anyOf", []))


def describe(verbs: Sequence[Verb], token: bool) -> dict[str, Any]:
    """The OpenAPI description of all verbs."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {
        "Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    }
    for verb in verbs:
        paths.setdefault(PREFIX + verb.path, {})[verb.method.lower()] = _operation(verb, schemas)
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "mqtt-nats",
            "version": __version__,
            "description": "What the command line `mqtt-nats ctl` does, over HTTP.",
        },
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if token:
        found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"token": []}]
    return found


def _operation(verb: Verb, schemas: dict[str, Any]) -> dict[str, Any]:
    schema = verb.arguments.model_json_schema(ref_template=REFERENCE + "{model}")
    result = dict(result_schema(verb.name, REFERENCE + "{model}"))
    for described in (schema, result):
        schemas.update(described.pop("$defs", {}))
    if "properties" in result:  # it has a name, which clients that are generated give their type
        schemas[result["title"]] = result
        result = {"$ref": REFERENCE + result["title"]}
    properties = _properties(verb, schema)
    required = set(schema.get("required", ()))
    error = {"description": "One line that says what is wrong.", "content": _json({"$ref": REFERENCE + "Error"})}
    kind = LINES if verb.lines else JSON
    operation: dict[str, Any] = {
        "operationId": verb.name,
        "summary": verb.summary,
        "description": "For viewers and administrators." if verb.role == "viewer" else "For administrators.",
        "tags": [verb.name.partition(".")[0]],
        "parameters": [_parameter(name, properties[name], "path", True) for name in verb.in_path],
        "responses": {
            "200": {"description": "Done.", "content": {kind: {"schema": result}}},
            "4XX": error,
            "5XX": error,
        },
    }
    others = {name: one for name, one in properties.items() if name not in verb.in_path}
    if verb.method == "POST":
        body = {"type": "object", "properties": others, "additionalProperties": False}
        if needed := sorted(required & others.keys()):
            body["required"] = needed
        operation["requestBody"] = {
            "description": f"At most {BODY_MOST:,} bytes.",
            "required": bool(needed),
            "content": _json(body),
        }
    else:
        operation["parameters"] += [_parameter(name, one, "query", name in required) for name, one in others.items()]
    return operation


def _parameter(name: str, schema: dict[str, Any], where: str, required: bool) -> dict[str, Any]:
    if schema.get("type") == "array":
        schema = schema | {"maxItems": FIELDS_MOST}
    found: dict[str, Any] = {"name": name, "in": where, "required": required, "schema": schema}
    if text := schema.get("description"):
        found["description"] = text
    return found


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {JSON: {"schema": schema}}
