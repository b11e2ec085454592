# SPDX-License-Identifier: Apache-2.0
"""Settings of the admin listener: who could reach it, and combinations that are refused."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from mqtt_nats.config import admin_settings
from mqtt_nats.config.admin_settings import DASHBOARD_PORTS, AdminSettings, free_dashboard_address, is_free


class Admin(AdminSettings):
    """The model is made for classes that inherit from it."""


FILE = Path(__file__)
TOKEN = "sixteen-letters-"
PROOFS: list[dict[str, Any]] = [
    {"admin_token": TOKEN},
    {"admin_tokens_file": FILE},
    {"admin_tls_client_ca": FILE, "admin_tls_cert": FILE, "admin_tls_key": FILE},
]


def check(taken: list[str] | None = None, **values: Any) -> Admin:
    found = Admin(**values)
    found.check_admin(taken or [])
    return found


def refused(text: str, taken: list[str] | None = None, **values: Any) -> None:
    with pytest.raises(ValueError, match=text):
        check(taken, **values)


@pytest.mark.parametrize("listen", ["127.0.0.1:9883", "127.0.0.1:0", "[::1]:9883", "localhost:9883"])
def test_a_loopback_address_needs_no_token(listen: str) -> None:
    found = check(admin_listen=listen)
    assert (found.admin_is_near, found.admin_is_proved) == (True, False)


@pytest.mark.parametrize("listen", ["0.0.0.0:9883", "[::]:9883", "10.0.0.1:9883", "gateway.example:9883"])
def test_another_address_needs_a_proof(listen: str) -> None:
    refused("can be reached from other machines: set admin_token", admin_listen=listen)
    for proof in PROOFS:
        found = check(admin_listen=listen, **proof)
        assert (found.admin_is_near, found.admin_is_proved) == (False, True)


def test_a_certificate_is_a_proof_without_tokens() -> None:
    assert [check(admin_listen="0.0.0.0:1", **proof).admin_has_tokens for proof in PROOFS] == [True, True, False]


@pytest.mark.parametrize("proof", [*PROOFS, {"admin_tls_cert": FILE}])
def test_without_an_address_every_other_setting_is_an_error(proof: dict[str, Any]) -> None:
    refused(f"^{next(name for name in AdminSettings.model_fields if name in proof)} needs admin_listen$", **proof)


@pytest.mark.parametrize("text", ["off", "OFF", " off "])
def test_off_is_no_address(text: str) -> None:
    assert check(admin_listen=text).admin_listen is None


def test_certificate_and_key_need_each_other() -> None:
    listen = "127.0.0.1:9883"
    refused("^admin_tls_cert and admin_tls_key need each other$", admin_listen=listen, admin_tls_cert=FILE)
    refused("^admin_tls_cert and admin_tls_key need each other$", admin_listen=listen, admin_tls_key=FILE)
    refused("^admin_tls_client_ca needs admin_tls_cert and", admin_listen=listen, admin_tls_client_ca=FILE)


def test_the_address_of_an_mqtt_listener_is_refused() -> None:
    refused("address of an MQTT listener, 127.0.0.1:1883$", ["127.0.0.1:1883"], admin_listen="127.0.0.1:1883")
    check(["127.0.0.1:0"], admin_listen="127.0.0.1:0")  # each gets a port of its own


@pytest.mark.parametrize("token", ["fifteen-letters", TOKEN + "\n", TOKEN + " x", TOKEN + "ä", TOKEN + "\x7f"])
def test_a_token_that_no_client_can_present_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Admin(admin_token=SecretStr(token))
    assert token.strip() not in str(caught.value)


# -- the dashboard of `serve --embedded` ----------------------------------------------------------------


def test_the_dashboard_has_the_first_port_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = DASHBOARD_PORTS[:3]
    monkeypatch.setattr(admin_settings, "is_free", lambda port: port != second)
    assert free_dashboard_address(()) == f"127.0.0.1:{first}"
    assert free_dashboard_address({first}) == f"127.0.0.1:{third}"
    assert free_dashboard_address(DASHBOARD_PORTS) == "127.0.0.1:0"


def test_a_port_is_free_until_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_free(port)
    assert is_free(port)
