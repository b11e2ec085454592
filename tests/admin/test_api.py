# SPDX-License-Identifier: Apache-2.0
"""Verbs over HTTP: where their arguments stand, what is wrong with them, and their description."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import Field
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from mqtt_nats.admin.access.administrators import LOCAL
from mqtt_nats.admin.access.guard import ADMINISTRATOR
from mqtt_nats.admin.api import LISTS_AT_ONCE, PREFIX, Api, _done, describe
from mqtt_nats.admin.results import RESULTS
from mqtt_nats.admin.trace import TRACE
from mqtt_nats.backbone.inbox import RequestInbox
from mqtt_nats.control.audit import AuditTrail
from mqtt_nats.ctl.verb import TEXT_LENGTH, Arguments, Paged, Refused, Verb
from mqtt_nats.ctl.verbs import VERBS
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout
from tests.admin.fakes import FakeListener, as_listener


class Nothing(Arguments):
    """No arguments."""


class Some(Arguments):
    """Some."""

    name: str
    count: int = Field(default=1, ge=1, description="How many.")
    tags: tuple[str, ...] = ()
    deep: bool = False


async def echo(inbox: RequestInbox, arguments: Arguments) -> dict[str, Any]:
    return arguments.model_dump()


def failing(error: Exception) -> Any:
    async def run(inbox: RequestInbox, arguments: Arguments) -> None:
        raise error

    return run


def verb(name: str, method: Any, path: str, arguments: type[Arguments], run: Any = echo) -> Verb:
    return Verb(name, method, path, arguments, run, f"Does {name}.", str)


TABLE = (
    verb("things.show", "GET", "/things/{name}", Some),
    verb("things.kick", "POST", "/things/kick", Some),
    verb("things.remove", "DELETE", "/things/{name}", Some),
    verb("things.send", "POST", "/things/{name}/send", Some),
    verb("list", "GET", "/list", Nothing),
    verb("pages", "GET", "/pages", Paged),
    verb("refused", "GET", "/refused", Nothing, failing(Refused("there is none", 404))),
    verb("silent", "GET", "/silent", Nothing, failing(NoResponders("x"))),
    verb("late", "GET", "/late", Nothing, failing(RequestTimeout("no reply"))),
    verb("broken", "GET", "/broken", Nothing, failing(ApiError(500, 1, "no\nroom"))),
    verb("wrong", "GET", "/wrong", Nothing, failing(ZeroDivisionError("secret"))),
)


async def ask(method: str, path: str, obstacle: str = "", **given: Any) -> httpx.Response:
    listener = as_listener(FakeListener(obstacle=obstacle))
    app = Starlette(routes=[Route(f"{PREFIX}/{{path:path}}", Api(listener, TABLE, AuditTrail()))])

    async def let_through(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, ADMINISTRATOR: LOCAL}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(let_through), base_url="http://localhost") as client:
        return await client.request(method, PREFIX + path, **given)


@pytest.mark.parametrize(
    ("path", "status", "told"), [("/silent", 503, True), ("/late", 504, True), ("/nothing", 404, False)]
)
async def test_errors_of_nats_say_why_the_gateway_is_not_ready(path: str, status: int, told: bool) -> None:
    answer = await ask("GET", path, "JetStream has no leader")
    assert answer.status_code == status
    assert answer.json()["error"].endswith(" (this gateway is not ready: JetStream has no leader)") is told


JSON = {"content-type": "application/json"}

RIGHT = [
    ("GET", "/things/a%2Fb%20%C3%BC", {}, {"name": "a/b ü", "count": 1, "tags": [], "deep": False}),
    ("GET", "/things/kick", {}, {"name": "kick", "count": 1, "tags": [], "deep": False}),
    (
        "GET",
        "/things/x?count=3&tags=a&tags=b&deep=true",
        {},
        {"name": "x", "count": 3, "tags": ["a", "b"], "deep": True},
    ),
    ("DELETE", "/things/x?count=2", {}, {"name": "x", "count": 2, "tags": [], "deep": False}),
    (
        "POST",
        "/things/kick",
        {"json": {"name": "x", "tags": ["a"]}},
        {"name": "x", "count": 1, "tags": ["a"], "deep": False},
    ),
    ("POST", "/things/x%2Fy/send", {}, {"name": "x/y", "count": 1, "tags": [], "deep": False}),
    ("GET", "/list", {}, {}),
    ("GET", "/pages", {}, {"offset": 0, "limit": 100, "reverse": False}),
    ("GET", "/pages?offset=7&limit=1000&reverse=true", {}, {"offset": 7, "limit": 1000, "reverse": True}),
]

WRONG = [
    ("GET", "/nothing", {}, 404, "the path /api/v1/nothing does not exist: see /openapi.json"),
    ("GET", "/things/", {}, 404, "does not exist"),
    ("GET", "/things/%FF", {}, 404, "does not exist"),
    ("GET", "/things/a/b", {}, 404, "does not exist"),
    ("PUT", "/things/x", {}, 405, "the method PUT is not allowed for /api/v1/things/x"),
    ("GET", "/list?x=1", {}, 400, "x: there is no such argument"),
    ("GET", "/pages?limit=0", {}, 400, "limit: input should be from 1 to 1000; offset leads to the others"),
    ("GET", "/pages?limit=1001", {}, 400, "limit: input should be from 1 to 1000"),
    ("GET", "/pages?offset=-1", {}, 400, "offset: input should be greater than or equal to 0"),
    ("GET", "/pages?offset=100001", {}, 400, "offset: input should be less than or equal to 100000"),
    ("GET", "/things/x?count=0", {}, 400, "count: input should be greater than or equal to 1"),
    ("GET", "/things/x?count=a&deep=b", {}, 400, "count: input should be a valid integer, unable to parse"),
    ("GET", "/things/x?count=1&count=2", {}, 400, "count is given twice"),
    ("GET", "/things/x?name=y", {}, 400, "name is given by the path"),
    ("GET", "/things/x?count", {}, 400, "the query cannot be read"),
    ("GET", "/things/x", {"content": b"{}", "headers": JSON}, 400, "arguments belong into the query"),
    ("POST", "/things/kick?name=x", {}, 400, "arguments belong into the body, as JSON"),
    ("POST", "/things/kick", {}, 400, "name: field required"),
    ("POST", "/things/kick", {"content": b"name=x"}, 415, "expected a body of type application/json"),
    ("POST", "/things/kick", {"content": b"{", "headers": JSON}, 400, "the body is not JSON"),
    ("POST", "/things/kick", {"json": [1]}, 400, "expected a JSON object"),
    ("POST", "/things/kick", {"json": {"name": 5}}, 400, "name: input should be a valid string"),
    ("POST", "/things/x/send", {"json": {"name": "y"}}, 400, "name is given by the path"),
    ("GET", "/refused", {}, 404, "there is none"),
    ("GET", "/silent", {}, 503, "JetStream does not answer"),
    ("GET", "/late", {}, 504, "no reply"),
    ("GET", "/broken", {}, 502, "no room"),
    ("GET", "/wrong", {}, 500, "internal error: see the log of the gateway"),
]


@pytest.mark.parametrize(("method", "path", "given", "expected"), RIGHT)
async def test_arguments(method: str, path: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    answer = await ask(method, path, **given)
    assert answer.status_code == 200, answer.text
    assert answer.json() == expected


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/things/x", "DELETE, GET, HEAD, OPTIONS"),
        ("/things/x/send", "OPTIONS, POST"),
        ("/list", "GET, HEAD, OPTIONS"),
    ],
)
async def test_methods(path: str, allowed: str) -> None:
    """What a path has is said for every method that it has not, and on request."""
    for method in (
        "PUT",
        "PATCH",
        "TRACE",
        "PROPFIND",
        *({"GET", "HEAD", "POST", "DELETE"} - set(allowed.split(", "))),
    ):
        answer = await ask(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed), method
    answer = await ask("OPTIONS", path)
    assert (answer.status_code, answer.headers["allow"], answer.content) == (204, allowed, b"")
    assert (await ask("OPTIONS", "/nothing")).status_code == 404


async def test_head_is_answered_like_get() -> None:
    answer = await ask("HEAD", "/list")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert (await ask("HEAD", "/nothing")).status_code == 404


@pytest.mark.parametrize(("method", "path", "given", "status", "text"), WRONG)
async def test_what_is_wrong(method: str, path: str, given: dict[str, Any], status: int, text: str) -> None:
    answer = await ask(method, path, **given)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert text in answer.json()["error"]
    assert "\n" not in answer.json()["error"]
    if status == 405:
        assert answer.headers["allow"] == "DELETE, GET, HEAD, OPTIONS"


async def test_what_waits_ends_with_who_has_asked() -> None:
    """Nothing else does: it would be half done."""
    ends: list[str] = []

    async def run(name: str) -> str:
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            ends.append(name)
            raise
        return name

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    plain = verb("plain", "POST", "/plain", Nothing)
    assert await _done(plain, run("plain"), receive) == "plain"
    with pytest.raises(Refused, match="the HTTP client has disconnected"):
        await _done(replace(plain, waits=True), run("waits"), receive)
    await asyncio.sleep(0)
    assert ends == ["waits"]
    assert [one.name for one in VERBS if one.waits] == ["clients.kick"]


def test_the_description_names_every_verb() -> None:
    found = describe(VERBS, True)
    OpenAPIV31SpecValidator(found).validate()
    described = {
        (operation["operationId"], method.upper(), path.removeprefix(PREFIX))
        for path, operations in found["paths"].items()
        for method, operation in operations.items()
    }
    assert described == {(verb.name, verb.method, verb.path) for verb in VERBS}
    assert found["security"] == [{"token": []}]
    assert "security" not in describe(VERBS, False)


def test_the_description_says_where_arguments_stand() -> None:
    paths = describe(TABLE, False)["paths"]
    shown = {one["name"]: (one["in"], one["required"]) for one in paths["/api/v1/things/{name}"]["get"]["parameters"]}
    assert shown == {
        "name": ("path", True),
        "count": ("query", False),
        "tags": ("query", False),
        "deep": ("query", False),
    }
    body = paths["/api/v1/things/kick"]["post"]["requestBody"]
    assert body["required"]
    assert body["content"]["application/json"]["schema"]["required"] == ["name"]
    assert not paths["/api/v1/things/{name}/send"]["post"]["requestBody"]["required"]


def test_addresses_are_not_asked_for_others() -> None:
    """A gateway reaches what an administrator's machine may not."""
    operation = describe(VERBS, False)["paths"]["/api/v1/streams"]["get"]
    assert [one["name"] for one in operation["parameters"]] == []


def test_every_answer_has_a_type() -> None:
    """A client that is generated has types: of each operation, and of what is in it."""
    found = describe((*VERBS, TRACE), False)
    OpenAPIV31SpecValidator(found).validate()
    assert set(RESULTS) == {verb.name for verb in VERBS}
    for operations in found["paths"].values():
        for operation in operations.values():
            (content,) = operation["responses"]["200"]["content"].values()
            schema = content["schema"]
            name = schema.get("$ref") or schema.get("items", {}).get("$ref")
            assert name or operation["operationId"] == "trace", operation["operationId"]
            if name:
                assert found["components"]["schemas"][name.rpartition("/")[2]]["properties"]


def test_limits_of_arguments_are_named() -> None:
    """Those that are held: a longer text, or a number beyond, is refused."""
    paths = describe((*VERBS, TRACE), False)["paths"]
    (name,) = [one for one in paths["/api/v1/clients/{client_id}"]["get"]["parameters"] if one["name"] == "client_id"]
    assert name["schema"]["maxLength"] == TEXT_LENGTH
    body = paths["/api/v1/gateways/{gateway}/drain"]["post"]["requestBody"]
    wait = body["content"]["application/json"]["schema"]["properties"]["wait"]
    assert wait["default"] == 300
    assert {"type": "number", "minimum": 0, "maximum": 1e11} in wait["anyOf"]
    assert "1,048,576 bytes" in body["description"]
    (group,) = [one for one in paths["/api/v1/acl/check"]["get"]["parameters"] if one["name"] == "group"]
    assert (group["schema"]["maxItems"], group["schema"]["items"]["maxLength"]) == (100, TEXT_LENGTH)
    for operations in paths.values():
        for operation in operations.values():
            for one in operation["parameters"]:
                assert not {"metavar", "flag", "ge", "le", "gt"} & set(one["schema"]), operation["operationId"]


def test_lists_have_pages() -> None:
    """Every list that grows with clients or messages: a part of it, its total, and an order."""
    found = describe(VERBS, False)
    paged = {verb.name for verb in VERBS if issubclass(verb.arguments, Paged)}
    assert paged == {"clients.list", "sessions.list", "subscriptions", "groups", "topics", "retained.list", "audit"}
    for path in ("clients", "sessions", "subscriptions", "groups", "topics", "retained"):
        operation = found["paths"][f"/api/v1/{path}"]["get"]
        parameters = {one["name"]: one["schema"] for one in operation["parameters"]}
        assert (parameters["limit"]["default"], parameters["limit"]["maximum"]) == (100, 1000)
        assert parameters["offset"]["maximum"] == 100_000
        assert len(parameters["sort"]["enum"]) > 1
        name = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert "total" in found["components"]["schemas"][name]["required"]


async def test_few_lists_are_made_at_a_time() -> None:
    """Whoever asks for many at once does not fill the gateway's memory, and keeps nobody from other answers."""
    running, most, full, go_on = 0, 0, asyncio.Event(), asyncio.Event()

    async def counted(inbox: RequestInbox, arguments: Arguments) -> dict[str, Any]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == LISTS_AT_ONCE:
            full.set()
        await go_on.wait()
        running -= 1
        return {}

    table = (verb("pages", "GET", "/pages", Paged, counted), verb("list", "GET", "/list", Nothing))
    api = Api(as_listener(FakeListener()), table, AuditTrail())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await api({**scope, ADMINISTRATOR: LOCAL}, receive, send)

    transport = httpx.ASGITransport(app)
    async with asyncio.timeout(20), httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        asked = [asyncio.create_task(client.get(f"{PREFIX}/pages")) for _ in range(3 * LISTS_AT_ONCE)]
        await full.wait()
        assert (await client.get(f"{PREFIX}/list")).status_code == 200
        go_on.set()
        assert [one.status_code for one in await asyncio.gather(*asked)] == [200] * len(asked)
    assert most == LISTS_AT_ONCE


async def test_a_text_that_is_too_long() -> None:
    answer = await ask("POST", "/things/kick", json={"name": "x" * (TEXT_LENGTH + 1)})
    assert answer.status_code == 400
    assert f"at most {TEXT_LENGTH} characters" in answer.json()["error"]
