# SPDX-License-Identifier: Apache-2.0
"""What :class:`NatsConnection` takes from the inside of nats-py is still there, and still means the same."""

from __future__ import annotations

import ast
import inspect
from importlib.metadata import version

import nats.aio.client
import pytest
from nats.aio.client import Client
from nats.aio.transport import TcpTransport, Transport

from mqtt_nats.backbone import link
from mqtt_nats.backbone.link import NatsConnection

# Overridden, with the parameters that nats-py calls them with.
OVERRIDDEN = {
    "_select_next_server": [],
    "_process_info": ["info", "initial_connection"],
    "_process_connect_init": [],
    "_read_loop": [],
    "_process_err": ["err_msg"],
    "_process_op_err": ["e"],
    "_send_command": ["cmd", "priority"],
    "_flush_pending": ["force_flush"],
    "_flusher": [],
    "_ping_interval": [],
    "_send_ping": ["future"],
    "flush": ["timeout"],
    "close": [],
}

# Called as they are.
CALLED = {
    "_connect_to_server": ["s"],
    "_process_msg": ["sid", "subject", "reply", "data", "headers"],
}

# Methods of nats-py that read from or write to the socket themselves: all of them run before the data path has taken
# the transport over, or after it has let it go, or are overridden.
TOUCH_THE_SOCKET = {
    "_attempt_reconnect",
    "_close",
    "_flush_pending",
    "_flusher",
    "_process_connect_init",
    "_read_loop",
    "_select_next_server",
    "_connect_to_server",
    "_send_ping",
    "_send_command",
}


def parameters(function: object) -> list[str]:
    assert callable(function)
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_minor_version_is_the_one_this_was_written_for() -> None:
    assert version("nats-py").split(".")[:2] == ["2", "16"]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_overridden(name: str) -> None:
    assert name in vars(NatsConnection)
    assert parameters(getattr(Client, name)) == OVERRIDDEN[name]
    assert parameters(getattr(NatsConnection, name)) == OVERRIDDEN[name]
    assert inspect.iscoroutinefunction(getattr(Client, name)) == inspect.iscoroutinefunction(
        getattr(NatsConnection, name)
    )


def test_nothing_else_is_overridden() -> None:
    own = {name for name in vars(NatsConnection) if not name.startswith("__")}
    assert {name for name in own if hasattr(Client, name)} == set(OVERRIDDEN)
    attributes = set(vars(NatsConnection())) - set(vars(Client()))
    assert not {name for name in own | attributes if name in vars(Client())}, "an attribute of nats-py is shadowed"


@pytest.mark.parametrize("name", CALLED)
def test_called(name: str) -> None:
    assert parameters(getattr(Client, name)) == CALLED[name]
    assert inspect.iscoroutinefunction(getattr(Client, name))


def test_every_name_that_is_used_exists() -> None:
    """A renamed attribute would be made anew by an assignment, and nobody would notice."""
    known = set(dir(Client())) | set(vars(NatsConnection())) | set(vars(NatsConnection)) | {"_control_tasks"}
    tree = ast.parse(inspect.getsource(link))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "NatsConnection"]
    used = {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    assert len(used) > 20
    assert used <= known


def test_the_transport_has_what_is_taken_from_it() -> None:
    source = inspect.getsource(TcpTransport)
    for name in ("_io_writer", "_io_reader"):
        assert f"self.{name}" in source
    assert issubclass(TcpTransport, Transport)


def test_who_touches_the_socket() -> None:
    tree = ast.parse(inspect.getsource(nats.aio.client))
    (client,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Client"]
    touching = set()
    for method in client.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            calls = {
                node.func.attr
                for node in ast.walk(method)
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Attribute)
                and node.func.value.attr == "_transport"
            }
            if calls & {"write", "writelines", "drain", "readline", "read", "close"}:
                touching.add(method.name)
    assert touching <= TOUCH_THE_SOCKET
    assert "_process_connect_init" in touching
