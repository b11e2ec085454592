# SPDX-License-Identifier: Apache-2.0
"""docs/plugins.md: the template is installed and run as it is written, and the options are those that there are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import orjson
import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from mqtt_nats.hooks.chain import Decision
from mqtt_nats.hooks.points import POINTS
from mqtt_nats.plugins.delayed import DelayedOptions
from mqtt_nats.plugins.rewrite import RewriteOptions, Rule
from mqtt_nats.plugins.subscriptions import SubscriptionOptions, Wanted
from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.nats import ROOT, NatsServer
from tests.harness.rawclient import RawClient
from tests.plugins.conftest import run_ctl

PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


class Template(NamedTuple):
    """The plugin of the page, and its table."""

    env: dict[str, str]
    """Where Python finds it."""
    table: str


@pytest.fixture
def template(tmp_path: Path) -> Template:
    package, site = tmp_path / "package", tmp_path / "site"
    package.mkdir()
    (project,) = [one for one in blocks("toml") if "[build-system]" in one]
    (module,) = [one for one in blocks("python") if "class Shout(" in one]
    (table,) = [one for one in blocks("toml") if "[plugins.shout]" in one]
    (package / "pyproject.toml").write_text(project, encoding="utf-8")
    (package / "mqtt_nats_shout.py").write_text(module, encoding="utf-8")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(
        [*install, "--no-build-isolation", "--no-index", "--target", str(site), str(package)], check=True, timeout=80
    )
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH", ""))))
    return Template({"PYTHONPATH": path}, table)


def loaded(server: NatsServer) -> list[tuple[str, str]]:
    status, text = run_ctl(server.url, "plugins", "list", "--json")
    assert status == 0, text
    (one,) = orjson.loads(text)
    return [(plugin["name"], plugin["package"]) for plugin in one["plugins"] if plugin["loaded"]]


@pytest.mark.long
@pytest.mark.anyio
async def test_the_template(
    template: Template, nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text(template.table, encoding="utf-8")
    gateway = gateway_factory(nats_server, "--config", str(config), env=template.env)
    assert loaded(nats_server) == [("shout", "mqtt-nats-shout 1.0")]
    async with await RawClient.connect(gateway.port, "listener") as client:
        await client.subscribe("loud/#", "greetings/guest")  # its own greeting may be on its way still
        client.publish("loud/a", b"hello")
        await client.message("loud/a", b"HELLO")
        async with await RawClient.connect(gateway.port, "guest"):
            await client.message("greetings/guest", b"HELLO")
        assert run_ctl(nats_server.url, "plugins", "unload", "shout")[0] == 0
        assert loaded(nats_server) == []
        client.publish("loud/a", b"hello")
        await client.message("loud/a", b"hello")
        assert run_ctl(nats_server.url, "plugins", "load", "shout")[0] == 0
        client.publish("loud/a", b"hello")
        await client.message("loud/a", b"HELLO")


@pytest.mark.long
def test_the_template_is_loaded_later(
    template: Template, nats_factory: NatsFactory, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    """As the page says: where the table is, and says that it is not loaded at the start."""
    assert "With `load = false` in that table too" in PAGE
    server = nats_factory()
    config = tmp_path / "gateway.toml"
    config.write_text(f"{template.table}load = false\n", encoding="utf-8")
    gateway = gateway_factory(server, "--config", str(config), env=template.env)
    assert loaded(server) == []
    assert run_ctl(server.url, "plugins", "load", "shout")[0] == 0
    assert loaded(server) == [("shout", "mqtt-nats-shout 1.0")]
    assert run_ctl(server.url, "plugins", "unload", "shout")[0] == 0
    assert gateway.term() == 0
    gateway_factory(server, env=template.env)
    status, text = run_ctl(server.url, "plugins", "load", "shout")
    assert status == 1
    assert "plugin 'shout': topics: field required" in text


def test_a_plugin_without_what_it_needs_stops_the_start(
    nats_server: NatsServer, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text("[plugins.nowhere]\n", encoding="utf-8")
    gateway = gateway_factory(nats_server, "--config", str(config), start=False)
    gateway.launch()
    assert gateway.wait() == 1
    assert gateway.log.splitlines()[-1].startswith("mqtt-nats: no plugin 'nowhere' is installed")


@pytest.mark.parametrize(
    ("model", "prefix"),
    [(DelayedOptions, ""), (Rule, "rules[]."), (Wanted, "subscriptions[].")],
)
def test_every_option_is_on_the_page(model: type[BaseModel], prefix: str) -> None:
    """With its default, and nothing else."""
    rows = dict(re.findall(rf"^\| `{re.escape(prefix)}(\w+)` \|(?: (?:`(\S+)`)? \|)?", PAGE, re.MULTILINE))
    known = dict(model.model_fields)
    if prefix:
        assert set(rows) == set(known)
    for name, field in known.items():
        assert name in rows
        if rows[name] and field.default is not PydanticUndefined:
            assert rows[name] == str(field.default).lower()
    assert {RewriteOptions: ["rules"], SubscriptionOptions: ["subscriptions"]} == {
        one: list(one.model_fields) for one in (RewriteOptions, SubscriptionOptions)
    }


def test_every_example_is_valid() -> None:
    found = {}
    for one in blocks("toml"):
        found.update(tomllib.loads(one).get("plugins", {}))
    RewriteOptions.model_validate({key: value for key, value in found["rewrite"].items() if key != "load"})
    SubscriptionOptions.model_validate(found["subscriptions"])
    DelayedOptions.model_validate(found["delayed"])


def test_every_point_is_on_its_page() -> None:
    text = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
    rows = {}
    for names, kind in re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|", text, re.MULTILINE):
        rows.update(dict.fromkeys(re.findall(r"`([\w.]+)`", names), kind))
    wanted = {
        point.name: "notice"
        if not isinstance(point, Decision)
        else ", ".join(["decision", *(["strict"] if point.strict else []), *([] if point.waits else ["not async"])])
        for point in POINTS
    }
    assert rows == wanted
