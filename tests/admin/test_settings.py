# SPDX-License-Identifier: Apache-2.0
"""Settings with which the admin listener does not start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mqtt_nats.admin import administered
from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.gateway import Gateway
from tests.admin.support import TOKEN

FILES = {"admin_tls_cert": Path(__file__), "admin_tls_key": Path(__file__)}

WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"admin_listen": "0.0.0.0:9883"},
        "can be reached from other machines: set admin_token, admin_tokens_file or",
    ),
    ({"admin_listen": "gateway.test:9883"}, "can be reached from other machines"),
    ({"admin_listen": "[::]:9883", **FILES}, "can be reached from other machines"),
    ({"admin_listen": "127.0.0.1:9883", "admin_token": "short"}, "admin_token: "),
    ({"admin_listen": "127.0.0.1:9883", "admin_token": f"{TOKEN}\n"}, "admin_token: it has white space, control or"),
    ({"admin_listen": "127.0.0.1:9883", "admin_token": f"{TOKEN}ü"}, "admin_token: it has white space, control or"),
    ({"admin_listen": "127.0.0.1:9883", "admin_token": f"a {TOKEN}"}, "admin_token: it has white space, control or"),
    ({"admin_listen": "127.0.0.1:9883", "admin_token": f"{TOKEN}\x7f"}, "admin_token: it has white space, control or"),
    ({"admin_listen": "9883"}, "expected HOST:PORT"),
    ({"admin_token": TOKEN}, "admin_token needs admin_listen"),
    ({"admin_listen": "off", "admin_token": TOKEN}, "admin_token needs admin_listen"),
    ({"admin_tokens_file": __file__}, "admin_tokens_file needs admin_listen"),
    ({"admin_listen": "127.0.0.1:1", "admin_tokens_file": "/no/such/file"}, "admin_tokens_file"),
    (FILES, "admin_tls_cert needs admin_listen"),
    ({"admin_listen": "127.0.0.1:1", "admin_tls_cert": __file__}, "admin_tls_cert and admin_tls_key need each other"),
    ({"admin_listen": "127.0.0.1:1", "admin_tls_client_ca": __file__}, "needs admin_tls_cert and admin_tls_key"),
    ({"admin_listen": "127.0.0.1:1883"}, "the address of an MQTT listener"),
]

RIGHT: list[dict[str, Any]] = [
    {},
    {"admin_listen": "off"},
    {"admin_listen": "127.0.0.1:0"},
    {"admin_listen": "[::1]:9883"},
    {"admin_listen": "localhost:9883"},
    {"admin_listen": "0.0.0.0:9883", "admin_token": TOKEN},
    {"admin_listen": "0.0.0.0:9883", "admin_tokens_file": Path(__file__)},
    {"admin_listen": "0.0.0.0:9883", **FILES, "admin_tls_client_ca": Path(__file__)},
]


@pytest.mark.parametrize(("given", "text"), WRONG)
def test_what_is_wrong(given: dict[str, Any], text: str) -> None:
    with pytest.raises(StartupError) as failure:
        Settings.load(given)
    assert text in str(failure.value)
    assert "\n" not in str(failure.value)
    assert "short" not in str(failure.value)
    assert TOKEN not in str(failure.value)


@pytest.mark.parametrize("given", RIGHT)
def test_what_is_right(given: dict[str, Any]) -> None:
    settings = Settings.load(given)
    assert (settings.admin_listen or "off") == given.get("admin_listen", "off")
    assert TOKEN not in repr(settings)


async def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "mqtt_nats.admin.listener", raising=False)
    gateway = Gateway(Settings(admin_listen="127.0.0.1:0"))
    with pytest.raises(StartupError, match=r"admin_listen needs the extra `admin`: pip install 'mqtt-nats\[admin\]'"):
        async with administered(gateway, lambda found: None):
            pass


async def test_an_address_that_is_taken(unused_tcp: int) -> None:
    gateway = Gateway(Settings(admin_listen=f"127.0.0.1:{unused_tcp}"))
    with pytest.raises(StartupError, match="choose another address with --admin-listen"):
        async with administered(gateway, lambda found: None):
            pass
