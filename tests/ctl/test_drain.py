# SPDX-License-Identifier: Apache-2.0
"""``ctl drain``, gateways that do not answer, and what the command line is when nothing runs."""

from __future__ import annotations

import re
from contextlib import ExitStack
from importlib import import_module

import orjson
import pytest
from click.testing import CliRunner

from mqtt_nats.base.errors import StartupError
from mqtt_nats.cli import command
from mqtt_nats.ctl import gateway_requests as asking
from tests.conftest import GatewayFactory
from tests.ctl.conftest import Fleet, attend
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer
from tests.harness.raw5 import DISCONNECT, SESSION_EXPIRY, Raw5, prop
from tests.harness.waiting import eventually, free_port


def launched(gateway_factory: GatewayFactory, fleet: Fleet, *arguments: str) -> Gateway:
    """One more gateway."""
    gateway = gateway_factory(fleet.server, *arguments, start=False, port=free_port())
    gateway.launch()
    return attend(gateway)


@pytest.mark.long
def test_drain(fleet: Fleet, gateway_factory: GatewayFactory) -> None:
    """Everybody is moved off, the process ends as on SIGTERM, and the others go on."""
    third = launched(gateway_factory, fleet)
    gateways = {one["listen"][0]: one["id"] for one in fleet.json("cluster", "status")["gateways"] if one["listen"]}
    identity = gateways[f"127.0.0.1:{third.port}"]
    with Raw5.open(third.port, "c-moved", prop(SESSION_EXPIRY, 1000)) as client:
        assert client.subscribed(("moved", 1)) == (1,)
        done = fleet.json("drain", identity)
        assert (done["gateway"], done["connections"], done["left"], done["ended"]) == (identity, 1, 0, True)
        client.answer(DISCONNECT, reason=0x8B)
    assert third.wait() == 0
    assert identity not in {one["id"] for one in fleet.json("cluster", "status")["gateways"]}
    with Raw5.open(fleet.two.port, "c-moved", prop(SESSION_EXPIRY, 0), clean=False) as client:
        assert client.present


def test_a_gateway_that_takes_longer(fleet: Fleet, gateway_factory: GatewayFactory) -> None:
    """Than who drains it waits: that is said, with what is left."""
    third = launched(gateway_factory, fleet, "--drain-time", "20")
    gateways = {one["listen"][0]: one["id"] for one in fleet.json("cluster", "status")["gateways"] if one["listen"]}
    identity = gateways[f"127.0.0.1:{third.port}"]
    with ExitStack() as stack:
        for number in range(3):
            stack.enter_context(Raw5.open(third.port, f"c-staying-{number}"))
        found, complaint = fleet.part("drain", identity, "--wait", "1s")
        assert (found["ended"], found["left"] > 0) == (False, True)
        assert complaint == f"gateway {identity} has not ended in 1 s: {found['left']} connections are left"


@pytest.mark.long
def test_workers_are_drained_one_by_one(fleet: Fleet, gateway_factory: GatewayFactory) -> None:
    """One that was drained is not started again; with the last of them all ends."""
    known = {one["id"] for one in fleet.json("cluster", "status")["gateways"]}
    gateway = launched(gateway_factory, fleet, "--workers", "2")
    workers = [
        one["id"]
        for one in eventually(lambda: fleet.json("cluster", "status")["gateways"])
        if one["id"] not in known and one["state"] == "running"
    ]
    assert len(workers) == 2
    assert fleet.text("drain", workers[0]) == f"gateway {workers[0]} has let go of 0 connections, and has ended\n"
    eventually(lambda: re.search(r"worker \d .* was drained", gateway.log))
    running = {one["id"] for one in fleet.json("cluster", "status")["gateways"] if one["state"] == "running"}
    assert running - known == {workers[1]}
    assert fleet.json("drain", workers[1])["ended"]
    assert gateway.wait() == 0


@pytest.mark.long
def test_a_gateway_that_is_gone_is_named(
    fleet: Fleet, gateway_factory: GatewayFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease has not lapsed: nobody knows whether it still runs; the others are shown."""
    monkeypatch.setattr(asking, "SILENCE_TIMEOUT", 3.0)
    dying = launched(gateway_factory, fleet, "--gateway-lease", "600")
    known = {one["listen"][0]: one["id"] for one in fleet.json("cluster", "status")["gateways"] if one["listen"]}
    identity = known[f"127.0.0.1:{dying.port}"]
    dying.kill()
    found = fleet.json("clients", "--match", "c-nobody")
    assert found["silent"] == [identity]
    assert f"gateway {identity} has not answered: its clients are not shown" in fleet.text("clients")
    refused = fleet.run("sessions", "clean", "--match", "c-nobody")
    assert refused.status == 1
    assert refused.text == f"gateway {identity} has not answered: its connected clients are not known"
    late = fleet.run("drain", identity)
    assert late.status == 1
    assert late.text.startswith(f"gateway {identity} does not answer")
    fleet.text("cluster", "remove", identity)
    eventually(lambda: fleet.json("clients", "--match", "c-nobody")["silent"] == [])


@pytest.mark.parametrize(
    "arguments",
    [("status",), ("clients",), ("acl", "check", "a", "b"), ("publish", "a", "b"), ("hooks",), ("listeners",)],
)
def test_no_gateway_runs(nats_server: NatsServer, arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(command, ["ctl", "--nats", nats_server.url, *arguments])
    assert isinstance(done.exception, StartupError)
    assert "`mqtt-nats ctl cluster status` lists them" in str(done.exception)


def test_no_streams(nats_server: NatsServer) -> None:
    done = CliRunner().invoke(command, ["ctl", "--nats", nats_server.url, "streams"])
    assert str(done.exception) == "there are no streams: no gateway has run here yet"


def test_no_nats_server() -> None:
    done = CliRunner().invoke(command, ["ctl", "--nats", f"nats://127.0.0.1:{free_port()}", "status"])
    assert "no server answers" in str(done.exception)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    runner = CliRunner()
    source = runner.invoke(command, ["completion", shell])
    assert source.exit_code == 0
    assert f"_MQTT_NATS_COMPLETE={shell}_complete" in source.output
    words = {"bash": "mqtt-nats ctl clients ", "zsh": "mqtt-nats ctl clients ", "fish": "mqtt-nats ctl clients "}[shell]
    environment = {
        "_MQTT_NATS_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": "" if shell == "fish" else "3",
    }
    found = runner.invoke(command, [], prog_name="mqtt-nats", env=environment)
    assert {"kick", "list", "show"} <= set(re.findall(r"[a-z]+", found.output))


def test_every_command_says_what_it_does() -> None:
    """`--help` of all of them, without a nats-server; and every argument has a description."""
    from mqtt_nats.ctl.group import MODULES
    from mqtt_nats.ctl.verbs import VERBS

    runner = CliRunner()
    for verb in VERBS:
        done = runner.invoke(command, ["ctl", *verb.name.split("."), "--help"])
        assert done.exit_code == 0, verb.name
        assert " ".join(verb.summary.split())[:40] in " ".join(done.output.split()), verb.name
        for name, field in verb.arguments.model_fields.items():
            assert field.description or name in (*verb.in_path, *verb.positional), (verb.name, name)
        assert set(verb.in_path) <= set(verb.arguments.model_fields), verb.name
    assert len({(verb.method, verb.path) for verb in VERBS}) == len(VERBS)
    assert MODULES.keys() == {verb.name.partition(".")[0] for verb in VERBS} | {"trace"}
    for verb in VERBS:
        module = import_module(f"mqtt_nats.ctl.commands.{MODULES[verb.name.partition('.')[0]]}")
        assert verb in module.VERBS, verb.name
    assert orjson.dumps([verb.arguments.model_json_schema() for verb in VERBS])
