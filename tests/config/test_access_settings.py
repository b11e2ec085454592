# SPDX-License-Identifier: Apache-2.0
"""Settings of who may connect: what is refused before anything listens, and what a listener makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.access_control import AccessControl
from mqtt_nats.config.nats_connect import nats_access
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.supervisor import dump
from tests.conftest import GatewayFactory

FILE = __file__
PASSWORD = {"type": "password", "file": FILE}
JWT = {"type": "jwt", "keys": FILE, "algorithms": ["RS256"]}
TLS = {"type": "tls", "tls_cert": FILE, "tls_key": FILE}


def load(**values: Any) -> Settings:
    return Settings.load(values)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"listen": "127.0.0.1:1883"},
        {"listen": "127.1.2.3:1883"},
        {"listen": "[::1]:1883"},
        {"listen": "localhost:1883"},
        {"listen": "0.0.0.0:1883", "allow_anonymous": True},
        {"listen": "0.0.0.0:1883", "allow_anonymous": "true"},
        {"listen": "0.0.0.0:1883", "password_file": FILE},
        {"listen": "0.0.0.0:1883", "scram_file": FILE},
        {"listen": "0.0.0.0:1883", "authenticators": [JWT]},
        {"listeners": [{"listen": "10.0.0.1:1883", "allow_anonymous": True}]},
        {"listeners": [{"listen": "10.0.0.1:1883"}], "password_file": FILE},
        {"listeners": [{"listen": "10.0.0.1:8883", **TLS, "tls_client_ca": FILE}]},
        {"listeners": [{"listen": "10.0.0.1:8883", **TLS, "tls_client_ca": FILE, "use_identity": "cn"}]},
        {"listeners": [{"listen": "127.0.0.1:8883", "proxy_protocol": ["10.0.0.0/8"], "allow_anonymous": True}]},
    ],
)
def test_what_is_not_open_by_itself(values: dict[str, Any]) -> None:
    settings = load(**values)
    given = json.loads(json.dumps(dump(settings)))
    assert Settings(**given) == settings  # as workers get them


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (
            {"listen": "0.0.0.0:1883"},
            "listener 0.0.0.0:1883 would accept every client: set password_file",
        ),
        ({"listen": "[::]:1883"}, "would accept every client"),
        ({"listen": "192.168.1.2:1883"}, "would accept every client"),
        ({"listen": "gateway.example.org:1883"}, "would accept every client"),
        ({"listen": "0.0.0.0:1883", "allow_anonymous": False}, "no client can connect"),
        ({"listen": "127.0.0.1:1883", "allow_anonymous": False}, "no client can connect"),
        ({"listeners": [{"listen": "10.0.0.1:1883"}]}, "or for it allow_anonymous = true"),
        (
            {"listeners": [{"listen": "10.0.0.1:1883"}], "allow_anonymous": True},
            "listener 10.0.0.1:1883 would accept every client",
        ),
        ({"listeners": [{"listen": "10.0.0.1:8883", **TLS}]}, "would accept every client"),
        ({"listeners": [{"listen": "127.0.0.1:1883", "proxy_protocol": ["10.0.0.0/8"]}]}, "would accept every client"),
        (
            {"listeners": [{"listen": "10.0.0.1:1883", "authenticators": []}], "password_file": FILE},
            "would accept every client",
        ),
        ({"listeners": [{"listen": "127.0.0.1:1883", "authenticators": ["jwt"]}]}, "there is no authenticator 'jwt'"),
        (
            {"listeners": [{"listen": "127.0.0.1:1", "authenticators": ["scram"]}], "password_file": FILE},
            "there is no authenticator 'scram'",
        ),
        (
            {"listeners": [{"listen": "h:1", **TLS, "tls_client_ca": FILE, "authenticators": ["x"]}]},
            "there is no authenticator 'x'",
        ),
        ({"listeners": [{"listen": "h:1", **TLS, "use_identity": "cn"}]}, "use_identity needs tls_client_ca"),
        (
            {
                "listeners": [
                    {
                        "listen": "h:1",
                        **TLS,
                        "tls_client_ca": FILE,
                        "use_identity": "cn",
                        "authenticators": ["password"],
                    }
                ],
                "password_file": FILE,
            },
            "use_identity excludes authenticators",
        ),
        (
            {"listeners": [{"listen": "h:1", **TLS, "tls_client_ca": FILE, "use_identity": "name"}]},
            "listeners[1].use_identity: input should be 'cn'",
        ),
        ({"authenticators": [PASSWORD, PASSWORD]}, "two authenticators are called password: give them a name"),
        ({"authenticators": [PASSWORD], "password_file": FILE}, "two authenticators are called password"),
        ({"authenticators": [{**JWT, "name": "scram"}]}, "two authenticators are called scram"),
        ({"authenticators": [{**JWT, "name": "a b"}]}, "authenticators[1].name: string should match"),
        ({"authenticators": [{}]}, "authenticators[1]: type must be one of password, jwt, http, nats"),
        ({"authenticators": [{"type": "ldap"}]}, "authenticators[1]: type must be one of password"),
        ({"authenticators": [JWT, {"type": "password"}]}, "authenticators[2].file: field required"),
        ({"authenticators": [{**JWT, "leway": 5}]}, "authenticators[1].leway: unknown setting: did you mean 'leeway'?"),
        ({"authenticators": [{**JWT, "algorithms": []}]}, "authenticators[1].algorithms: value should have at least 1"),
        ({"authenticators": [{**JWT, "algorithms": ["none"]}]}, "authenticators[1].algorithms[1]: input should be 'RS"),
        ({"authenticators": [{**JWT, "leeway": float("inf")}]}, "authenticators[1].leeway"),
        ({"authenticators": [{"type": "http", "url": "http://h/"}]}, "authenticators[1].url: http is for 127.0.0.1"),
        (
            {"authenticators": [{"type": "nats", "servers": ["nats://me:secret@h"]}]},
            "authenticators[1].servers: expected URLs",
        ),
        (
            {"authenticators": [{"type": "nats", "servers": ["nats://h"]}]},
            "servers need an account, whose users come in",
        ),
        ({"authenticators": "password"}, "authenticators: input should be a list"),
    ],
)
def test_what_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError) as caught:
        load(**values)
    message = str(caught.value)
    assert message.startswith("invalid setting: ")
    assert named in message
    assert "\n" not in message
    assert "secret" not in message


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQTT_NATS_AUTHENTICATORS", json.dumps([JWT]))
    monkeypatch.setenv("MQTT_NATS_ALLOW_ANONYMOUS", "true")
    settings = load(listen="0.0.0.0:1883")
    assert (settings.allow_anonymous, [one.called for one in settings.all_authenticators]) == (True, ["jwt"])
    monkeypatch.setenv("MQTT_NATS_AUTHENTICATORS", "jwt")
    with pytest.raises(StartupError, match=r"^MQTT_NATS_AUTHENTICATORS is not valid JSON"):
        load()


@pytest.mark.parametrize(
    ("general", "listener", "chain", "is_open"),
    [
        ({}, {}, (), True),
        ({"password_file": FILE}, {}, ("password",), False),
        ({"password_file": FILE, "allow_anonymous": True}, {}, ("password",), True),
        ({"password_file": FILE, "allow_anonymous": True}, {"allow_anonymous": False}, ("password",), False),
        ({"password_file": FILE}, {"authenticators": []}, (), True),
        (
            {"password_file": FILE, "scram_file": FILE, "authenticators": [{**JWT, "name": "tokens"}]},
            {},
            ("password", "tokens", "scram"),
            False,
        ),
        (
            {"password_file": FILE, "authenticators": [JWT]},
            {"authenticators": ["jwt", "password"]},
            ("jwt", "password"),
            False,
        ),
    ],
)
def test_what_a_listener_asks(
    general: dict[str, Any], listener: dict[str, Any], chain: tuple[str, ...], is_open: bool
) -> None:
    settings = load(**general, listeners=[{"listen": "127.0.0.1:0", **listener}])
    (one,) = settings.all_listeners
    assert (settings.chain_of(one), settings.is_open(one)) == (chain, is_open)


@pytest.mark.parametrize(
    ("listener", "warned"),
    [
        ({"listen": "127.0.0.1:1883"}, False),
        ({"listen": "0.0.0.0:1883"}, True),
        ({"listen": "0.0.0.0:1883", "authenticators": [], "allow_anonymous": True}, False),
        ({"listen": "0.0.0.0:1883", "proxy_protocol": ["10.0.0.0/8"]}, False),
        ({"listen": "0.0.0.0:8883", **TLS}, False),
    ],
)
def test_passwords_that_everybody_can_read(
    listener: dict[str, Any], warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "passwords"
    file.touch()
    settings = load(password_file=str(file), listeners=[listener])
    AccessControl(settings, nats_access).door(settings.all_listeners[0])
    assert ("passwords are sent without encryption" in caplog.text) is warned


def test_the_gateway_says_so_in_one_line(gateway_factory: GatewayFactory, tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text('[[listeners]]\nlisten = "0.0.0.0:0"\n', encoding="utf-8")
    gateway = gateway_factory("nats://127.0.0.1:1", "--config", str(config), start=False)
    gateway.launch()
    assert gateway.wait() == 1
    (line,) = gateway.log.splitlines()
    assert line.startswith("mqtt-nats: invalid setting: listener 0.0.0.0:0 would accept every client")
