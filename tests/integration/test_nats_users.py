# SPDX-License-Identifier: Apache-2.0
"""MQTT clients that log in as users of nats-server, with what these may do there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backbone.certificates import ACCOUNT, OPERATOR, USER, Authority, nkey, token
from tests.conftest import NatsFactory
from tests.harness import raw, raw5
from tests.harness.nats import NatsServer
from tests.integration.inprocess import Running, running
from tests.integration.test_authenticators import BAD, NOT, entered, may_publish, refused

ASK = '"$SYS.REQ.USER.INFO"'
CONFIG = f"""
accounts {{
  A: {{
    jetstream: enabled
    users: [
      {{user: gateway, password: "g:pw"}}
      {{user: all, password: pw}}
      {{user: some, password: pw, permissions: {{
        publish: {{allow: ["out.>", {ASK}], deny: ["out.secret.>"]}}
        subscribe: {{allow: ["in.*", "$MQTT.login.some.*"]}}
      }}}}
      {{user: silent, password: pw, permissions: {{publish: "out.>", subscribe: "in.*"}}}}
      {{user: deaf, password: pw, permissions: {{publish: ["out.>", {ASK}], subscribe: "in.*"}}}}
      {{user: device, password: pw, allowed_connection_types: ["MQTT"]}}
      {{user: unnamed, password: ""}}
    ]
  }}
  B: {{ users: [{{user: stranger, password: pw}}] }}
}}
"""


def settings(server: NatsServer, *, user: str | None = "gateway", **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"nats": (server.url,), "authenticators": [{"type": "nats", **more}]}
    return found if user is None else {**found, "nats_user": user, "nats_password": "g:pw"}


@pytest.fixture(scope="module")
def accounts(nats_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    from tests.conftest import _nats_factory

    start: NatsFactory
    with _nats_factory(nats_backend, tmp_path_factory.mktemp("accounts")) as start:
        yield start(config=CONFIG)


@pytest.fixture(scope="module")
def gateway(accounts: NatsServer) -> Iterator[Running]:
    with running(**settings(accounts)) as found:
        yield found


def test_a_user_without_limits(gateway: Running) -> None:
    with entered(gateway.port, "all", "pw") as client:
        assert may_publish(client, "anything")
        assert client.subscribed(("#", 1)) == (1,)


def test_the_permissions_of_the_user_are_those_of_the_client(gateway: Running) -> None:
    with entered(gateway.port, "some", "pw") as client:
        assert may_publish(client, "out/x")
        assert not may_publish(client, "out/secret/x")
        assert not may_publish(client, "elsewhere")
        wanted = [("in/x", 1), ("in/+", 1), ("in/#", 1), ("#", 1), ("in/x/y", 1), ("$share/g/in/x", 1), ("out/x", 1)]
        assert client.subscribed(*wanted) == (1, 1, NOT, NOT, NOT, 1, NOT)
    tail = raw5.will("out/secret/x", "") + raw.field("some") + raw.field("pw")
    raw5.refused(gateway.port, raw5.connect("", flags=0xC4, tail=tail), NOT)


@pytest.mark.parametrize(
    ("user", "password", "code"),
    [
        ("all", "wrong", BAD),
        ("all", "", BAD),
        ("nobody", "pw", BAD),
        ("", "pw", BAD),
        ("unnamed", "", BAD),
        ("all", None, BAD),
        (None, None, NOT),
        ("all", b"\xff", BAD),
        ("all", 'pw","jwt":"', BAD),
        ("all", "pw\r\nPING", BAD),
        ("device", "pw", BAD),  # of MQTT only: nats-server lets it in by its own listener
        ("stranger", "pw", NOT),  # of another account
        ("silent", "pw", NOT),  # may not ask what it may do
        ("deaf", "pw", NOT),  # may not hear the answer
        ("x", "eyJhbGciOiJub25lIn0.e30.", BAD),
    ],
)
def test_who_does_not_get_in(gateway: Running, user: str | None, password: str | bytes | None, code: int) -> None:
    refused(gateway.port, user, password, code)


def test_what_a_user_may_do_is_not_known(accounts: NatsServer, tmp_path: Path) -> None:
    """Where the settings say so, the rules for all decide then."""
    acl = tmp_path / "acl.toml"
    acl.write_text("[[rules]]\neffect = 'allow'\nuser = 'silent'\ntopics = 'a'", encoding="utf-8")
    with running(**settings(accounts, permissions="wanted"), acl_file=acl) as gateway:
        refused(gateway.port, "stranger", "pw", NOT)
        refused(gateway.port, "silent", "pw", NOT)  # its account is not known either
    every = settings(accounts, permissions="wanted", servers=[accounts.url], account="*")
    with running(**every, acl_file=acl) as gateway:
        with entered(gateway.port, "silent", "pw") as client:
            assert may_publish(client, "a")
            assert not may_publish(client, "out/x")
        with entered(gateway.port, "stranger", "pw") as client:
            assert not may_publish(client, "a")
        refused(gateway.port, "silent", "wrong", BAD)
    of_one = settings(accounts, permissions="wanted", servers=[accounts.url], account="A")
    with running(**of_one, acl_file=acl) as gateway:
        refused(gateway.port, "stranger", "pw", NOT)


def test_a_server_that_lets_everybody_in_proves_nothing(
    nats_server: NatsServer, nats_factory: NatsFactory, caplog: pytest.LogCaptureFixture
) -> None:
    with running(**settings(nats_server, user=None)) as gateway:
        refused(gateway.port, "any", "body", NOT)
        refused(gateway.port, "any", "body", NOT)
    assert "accepts any credentials" in caplog.text
    by_default = nats_factory(config=CONFIG + "no_auth_user: all")
    with running(**settings(by_default)) as gateway:
        refused(gateway.port, "any", "body", BAD)
        refused(gateway.port, None, None, NOT)
        refused(gateway.port, "all", "", BAD)
        entered(gateway.port, "all", "pw").close()


def test_a_server_that_maps_certificates_proves_nothing(
    nats_server: NatsServer, nats_factory: NatsFactory, tmp_path: Path
) -> None:
    """It would take every client for the gateway, whose certificate it is shown."""
    authority = Authority(tmp_path)
    server, client = authority.issue("server"), authority.issue("gateway.test")
    tls = f"""tls {{ cert_file: "{server.certificate}", key_file: "{server.key}", ca_file: "{authority.file}",
      verify_and_map: true }}"""
    mapped = nats_factory(config=f'{tls}\nauthorization {{ users: [{{user: "gateway.test"}}] }}')
    values = {
        "nats": (mapped.url.replace("nats://", "tls://"),),
        "nats_tls_ca": authority.file,
        "nats_tls_cert": client.certificate,
        "nats_tls_key": client.key,
        "authenticators": [{"type": "nats", "account": "$G"}],
    }
    with running(**values) as gateway:
        refused(gateway.port, "any", "body", BAD)
        refused(gateway.port, "gateway.test", "body", BAD)
        refused(gateway.port, None, "body", NOT)
        refused(gateway.port, None, "eyJhbGciOiJub25lIn0.e30.", NOT)


def test_by_tls(nats_factory: NatsFactory, nats_server: NatsServer, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.issue("server")
    tls = f'tls {{ cert_file: "{server.certificate}", key_file: "{server.key}" }}'
    secure = nats_factory(config=CONFIG + tls)
    values = settings(secure, servers=[secure.url], account="A") | {
        "nats": (secure.url.replace("nats://", "tls://"),),
        "nats_tls_ca": authority.file,
    }
    with running(**values) as gateway:
        entered(gateway.port, "all", "pw").close()
        refused(gateway.port, "all", "wrong", BAD)
    values = settings(nats_server, user=None, servers=[secure.url.replace("nats://", "tls://")], account="A")
    with running(**values) as gateway:  # no authority vouches for it
        refused(gateway.port, "all", "pw", 0x88)


def test_nobody_answers(nats_server: NatsServer) -> None:
    with running(**settings(nats_server, user=None, servers=["nats://127.0.0.1:1"], account="A")) as gateway:
        refused(gateway.port, "all", "pw", 0x88)


def test_a_token(nats_factory: NatsFactory) -> None:
    server = nats_factory(config='authorization { token: "s3cret" }')
    values = settings(server, user=None, account="$G") | {"nats_token": "s3cret"}
    with running(**values) as gateway:
        with entered(gateway.port, None, "s3cret") as client:
            assert may_publish(client, "x")
        refused(gateway.port, None, "other", BAD)
        refused(gateway.port, "x", "s3cret", BAD)


def test_jwts(nats_server: NatsServer, nats_factory: NatsFactory) -> None:
    """Bearer tokens of an operator's account."""
    operator, account, user, other, system = (nkey(kind) for kind in (OPERATOR, ACCOUNT, USER, ACCOUNT, ACCOUNT))
    accounts = {one.public: token(operator, one, "account", "A") for one in (account, system)}
    config = f"operator: {token(operator, operator, 'operator', 'O')}\nresolver: MEMORY\n"
    config += f"system_account: {system.public}\n"
    config += f"resolver_preload: {json.dumps(accounts)}\n"
    server = nats_factory(config=config)
    permissions = {
        "pub": {"allow": ["out.>", "$SYS.REQ.USER.INFO"]},
        "sub": {"allow": ["in.>", f"$MQTT.login.{user.public}.*"]},
    }

    def bearer(issuer: Any, **more: Any) -> str:
        return token(issuer, user, "user", "lamp", bearer_token=True, **(permissions | more))

    values = settings(nats_server, user=None, servers=[server.url], account=account.public)
    with running(**values) as gateway:
        with entered(gateway.port, "whatever", bearer(account)) as client:
            assert may_publish(client, "out/x")
            assert not may_publish(client, "in/x")
            assert client.subscribed(("in/x", 0), ("out/x", 0)) == (0, NOT)
        refused(gateway.port, "x", bearer(other), BAD)
        refused(gateway.port, "x", token(account, user, "user", "lamp", **permissions), BAD)  # no bearer: has to sign
        good = bearer(account)
        refused(gateway.port, "x", good[:-4] + "AAAA", BAD)
        refused(gateway.port, "x", "password", BAD)
    values = settings(nats_server, user=None, servers=[server.url], account="*", permissions="wanted")
    with running(**values) as gateway:
        entered(gateway.port, "admin", bearer(account)).close()
        silent = bearer(account, pub={"allow": ["out.>"]})  # nothing but itself says that it is the lamp's
        refused(gateway.port, "admin", silent, NOT)
        refused(gateway.port, "lamp", silent, NOT)
