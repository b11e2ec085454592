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
from websockets.exceptions import InvalidStatus

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
    """It publishes, and shows messages."""
    at = f"ws{url.removeprefix('http')}/bridge"
    with pytest.raises(InvalidStatus) as refused:
        await connect(at, additional_headers={"Authorization": f"Bearer {GRAFANA}"})
    assert refused.value.response.status_code == 403
    async with asyncio.timeout(60), connect(at, additional_headers={"Authorization": f"Bearer {ALICE}"}) as socket:
        await socket.send('{"do": "publish", "topic": "roles/a", "payload": "secret text"}')
        while '"published"' not in str(await socket.recv()):
            pass
    with Admin(url, 0, ALICE).http as http:
        found = http.get("/api/v1/audit").json()["deeds"][0]
    assert (found["who"], found["operation"], found["outcome"]) == ("alice", "dashboard.publish", "done")
    assert found["arguments"] == '{"topic":"roles/a","payload":"11 characters","qos":0,"retain":false}'


def test_deeds_are_in_the_audit_trail(roles: dict[str, Admin]) -> None:
    """Who, when, what and how it has ended; also what was not permitted. What a viewer may see is none."""
    viewer, administrator = roles["viewer"], roles["administrator"]
    assert administrator.post("/publish", topic="roles/b", payload="secret text").status_code == 200
    assert administrator.post("/clients/kick", clients=["nobody"]).status_code == 404
    assert viewer.post("/clients/kick", everybody=True).status_code == 403
    assert viewer.http.get("/about").json()["role"] == "viewer"
    found = viewer.get("/audit", limit=3)
    assert [(one["who"], one["operation"], one["role"], one["outcome"]) for one in found["deeds"]] == [
        ("grafana", "clients.kick", "viewer", "clients.kick is for administrators: grafana has the role viewer"),
        ("alice", "clients.kick", "administrator", "not connected: nobody"),
        ("alice", "publish", "administrator", "done"),
    ]
    assert found["total"] >= 3
    assert found["deeds"][2]["arguments"] == '{"topic":"roles/b","payload":"11 characters"}'
    assert found["deeds"][0]["time"] >= found["deeds"][2]["time"] > 1e9
    assert {one["who"] for one in viewer.get("/audit", who="grafana")["deeds"]} == {"grafana"}
    assert len(viewer.get("/audit", limit=1, offset=1)["deeds"]) == 1


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
