# SPDX-License-Identifier: Apache-2.0
"""Every operation, and who may use it: each request is checked."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from mqtt_nats.admin.trace import TRACE
from mqtt_nats.ctl.verbs import VERBS
from tests.admin.support import Admin, address, serving
from tests.admin.test_administrators import ALICE, FILE, GRAFANA
from tests.conftest import GatewayFactory
from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually

OPERATIONS: Final = {
    "status": "viewer",
    "history": "viewer",
    "audit": "viewer",
    "listeners": "viewer",
    "hooks": "viewer",
    "acl.check": "viewer",
    "drain": "administrator",
    "log.list": "viewer",
    "log.level": "administrator",
    "clients.list": "viewer",
    "clients.show": "viewer",
    "clients.kick": "administrator",
    "sessions.list": "viewer",
    "sessions.show": "viewer",
    "sessions.clean": "administrator",
    "subscriptions": "viewer",
    "groups": "viewer",
    "topics": "viewer",
    "retained.list": "viewer",
    "retained.get": "administrator",
    "retained.delete": "administrator",
    "publish": "administrator",
    "streams.list": "viewer",
    "streams.set": "administrator",
    "cluster.status": "viewer",
    "cluster.remove": "administrator",
    "bans.list": "viewer",
    "bans.add": "administrator",
    "bans.remove": "administrator",
    "plugins.list": "viewer",
    "plugins.load": "administrator",
    "plugins.unload": "administrator",
    "reload": "administrator",
    "trace": "administrator",
}
"""The least role of each operation. A new one has to be entered here."""

PATHS: Final = {"/metrics": "viewer", "/openapi.json": "viewer", "/about": "viewer"}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the tokens."""
    found = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    found.write_text(FILE, encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def url(nats_server: NatsServer, tokens: Path) -> Iterator[str]:
    """A gateway whose administrators have names."""
    with serving(nats_server.url, admin_tokens_file=tokens) as found:
        yield found.url


@pytest.fixture(scope="module")
def roles(url: str) -> Iterator[dict[str, Admin]]:
    """A viewer and an administrator."""
    found = {"viewer": Admin(url, 0, GRAFANA), "administrator": Admin(url, 0, ALICE)}
    yield found
    for one in found.values():
        one.http.close()


def request(admin: Admin, operation: str) -> httpx.Response:
    """Use an operation in a way that it refuses by itself, or that changes nothing."""
    (verb,) = (one for one in (*VERBS, TRACE) if one.name == operation)
    path = f"/api/v1{verb.path}"
    for name in verb.in_path:
        path = path.replace(f"{{{name}}}", "client" if name == "kind" else "nothing-of-this-name")
    values: dict[str, Any] = {}
    if operation == "clients.kick":
        values = {"clients": ["nobody"]}
    if operation == "publish":
        values = {"topic": "a/#"}
    if operation == "acl.check":
        values = {"user": "-", "topic": "a"}
    if verb.method == "POST":
        return admin.http.post(path, json=values)
    return admin.http.request(verb.method, path, params=values)


def test_every_operation_is_listed() -> None:
    assert {verb.name: verb.role for verb in (*VERBS, TRACE)} == OPERATIONS


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("role", ["viewer", "administrator"])
def test_operations(roles: dict[str, Admin], operation: str, role: str) -> None:
    answer = request(roles[role], operation)
    if role == "viewer" and OPERATIONS[operation] == "administrator":
        assert answer.status_code == 403
        assert answer.json() == {"error": f"{operation} is for administrators: grafana has the role viewer"}
    else:
        assert answer.status_code not in (401, 403), answer.text


@pytest.mark.parametrize("path", PATHS)
def test_other_paths(roles: dict[str, Admin], url: str, path: str) -> None:
    for one in roles.values():
        assert one.http.get(path).status_code == 200
    assert httpx.get(url + path).status_code == 401


async def test_the_bridge_is_for_administrators(url: str) -> None:
    """The bridge publishes and shows messages, so a viewer is refused."""
    at = f"ws{url.removeprefix('http')}/bridge"
    with pytest.raises(InvalidStatus) as refused:
        await connect(at, additional_headers={"Authorization": f"Bearer {GRAFANA}"})
    assert refused.value.response.status_code == 403
    async with asyncio.timeout(60), connect(at, additional_headers={"Authorization": f"Bearer {ALICE}"}) as socket:
        await socket.send('{"do": "publish", "topic": "roles/a", "payload": "secret text"}')
        while '"published"' not in str(await socket.recv()):
            pass
    with Admin(url, 0, ALICE).http as http:
        found = http.get("/api/v1/audit").json()["actions"][0]
    assert (found["who"], found["operation"], found["outcome"]) == ("alice", "dashboard.publish", "done")
    assert found["arguments"] == '{"topic":"roles/a","payload":"11 characters","qos":0,"retain":false}'


def test_actions_are_in_the_audit_trail(roles: dict[str, Admin]) -> None:
    """An action has administrator, time, operation and outcome, also a refused one. To look at something is none."""
    viewer, administrator = roles["viewer"], roles["administrator"]
    assert administrator.post("/publish", topic="roles/b", payload="secret text").status_code == 200
    assert administrator.post("/clients/kick", clients=["nobody"]).status_code == 404
    assert viewer.post("/clients/kick", everybody=True).status_code == 403
    assert viewer.http.get("/about").json()["role"] == "viewer"
    found = viewer.get("/audit", limit=3)
    assert [(one["who"], one["operation"], one["role"], one["outcome"]) for one in found["actions"]] == [
        ("grafana", "clients.kick", "viewer", "clients.kick is for administrators: grafana has the role viewer"),
        ("alice", "clients.kick", "administrator", "not connected: nobody"),
        ("alice", "publish", "administrator", "done"),
    ]
    assert found["total"] >= 3
    assert found["actions"][2]["arguments"] == '{"topic":"roles/b","payload":"11 characters"}'
    assert found["actions"][0]["time"] >= found["actions"][2]["time"] > 1e9
    assert {one["who"] for one in viewer.get("/audit", who="grafana")["actions"]} == {"grafana"}
    assert len(viewer.get("/audit", limit=1, offset=1)["actions"]) == 1


def test_tokens_are_read_again(
    nats_server: NatsServer, gateway_factory: GatewayFactory, tokens: Path, tmp_path: Path
) -> None:
    """A token that has gone from the file is one no more; a wrong file changes nothing."""
    file = tmp_path / "own.toml"
    file.write_text(FILE, encoding="utf-8")
    arguments = ("--admin-listen", "127.0.0.1:0", "--admin-tokens-file", str(file))
    gateway = gateway_factory(nats_server.url, *arguments)
    at = address(gateway)
    with Admin(at, 0, GRAFANA).http as viewer, Admin(at, 0, ALICE).http as alice:
        assert viewer.get("/about").status_code == alice.get("/about").status_code == 200
        file.write_text("[grafana]", encoding="utf-8")
        gateway.process.send(signal.SIGHUP)
        eventually(lambda: "grafana.role: field required" in gateway.log, what="the wrong file in the log")
        assert viewer.get("/about").status_code == 200
        file.write_text(FILE.replace(GRAFANA, "another-token-0123456789"), encoding="utf-8")
        gateway.process.send(signal.SIGHUP)
        eventually(lambda: viewer.get("/about").status_code == 401, what="the end of the token")
        assert alice.get("/about").status_code == 200


async def test_what_goes_on_ends_with_its_token(
    nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """The token of somebody who has lost it: a page that publishes, and a trace. Those of others go on."""
    file = tmp_path / "own.toml"
    bob = "token-of-bob-0123456789"
    file.write_text(f'{FILE}\n[bob]\nrole = "administrator"\ntoken = "{bob}"', encoding="utf-8")
    arguments = ("--admin-listen", "127.0.0.1:0", "--admin-tokens-file", str(file))
    gateway = await asyncio.to_thread(gateway_factory, nats_server.url, *arguments)
    at = address(gateway)
    pages = [
        await connect(f"ws{at.removeprefix('http')}/bridge", additional_headers={"Authorization": f"Bearer {token}"})
        for token in (ALICE, bob)
    ]
    headers = {"Authorization": f"Bearer {ALICE}"}
    async with asyncio.timeout(60), httpx.AsyncClient(headers=headers, timeout=60) as http, pages[0], pages[1]:
        async with http.stream("GET", f"{at}/api/v1/trace", params={"client": "x", "lasts": "5m"}) as trace:
            lines = trace.aiter_lines()
            assert '"tracing"' in await anext(lines)
            file.write_text(file.read_text(encoding="utf-8").replace(ALICE, "another-token-0123456789"), "utf-8")
            gateway.process.send(signal.SIGHUP)
            with pytest.raises(httpx.TransportError):
                [line async for line in lines]
        with pytest.raises(ConnectionClosedError):
            [message async for message in pages[0]]
        await pages[1].send('{"do": "publish", "topic": "roles/c", "payload": "x"}')
        while '"published"' not in str(await pages[1].recv()):
            pass


@pytest.mark.long
@pytest.mark.parametrize("path", ["/clients", "/sessions", "/subscriptions"])
def test_a_long_pattern_is_refused(roles: dict[str, Admin], path: str) -> None:
    """A pattern of 16,000 brackets takes eleven seconds to compile, in which a gateway serves nobody."""
    names = {"match", "filter"} if path == "/subscriptions" else {"match"}
    for name in names:
        refused = roles["viewer"].http.get(f"/api/v1{path}", params={name: "[" * 1001})
        assert (refused.status_code, refused.json()) == (
            400,
            {"error": f"{name}: string should have at most 1000 characters"},
        )
        assert roles["viewer"].http.get(f"/api/v1{path}", params={name: "[" * 1000}).status_code == 200


@pytest.mark.parametrize("payload", ["5", "null", '["secret text"]', "[" * 300 + "]" * 300])
def test_an_action_may_be_any_json(roles: dict[str, Admin], payload: str) -> None:
    """An action is noted before its arguments are checked."""
    for name in ("payload", "clients"):
        content = f'{{"topic": "a", "{name}": {payload}}}'
        answer = roles["administrator"].http.post(
            "/api/v1/publish", content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400, answer.text
        noted = roles["viewer"].get("/audit", limit=1)["actions"][0]
        assert noted["operation"] == "publish"
        assert (name == "clients") or ("secret text" not in noted["arguments"])
