# SPDX-License-Identifier: Apache-2.0
"""Settings of a NATS account: URLs, logins and prefixes that are refused, and what a tenant has of the gateway's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mqtt_nats.config.accounts import AccountSettings, NatsSettings, TenantSettings

FILE = Path(__file__)
OTHER = FILE.with_name("__init__.py")


def error_of(values: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        NatsSettings(**values)
    return str(caught.value)


def test_urls_are_split_at_commas() -> None:
    settings = NatsSettings(nats="nats://one:4222, tls://two.example")  # type: ignore[arg-type]
    assert settings.nats == ("nats://one:4222", "tls://two.example")


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:4222", "ws://one:4222", "http://one", "nats://", "nats://one:0", "nats://one:x", "nats://[::"],
)
def test_a_url_that_nobody_can_connect_to_is_refused(url: str) -> None:
    assert "expected URLs such as nats://127.0.0.1:4222" in error_of({"nats": f"nats://good:4222,{url}"})


def test_a_password_in_a_url_is_not_shown() -> None:
    settings = NatsSettings(nats=("nats://ann:secret@one:4222", "nats://two:4222"))
    assert settings.nats_display == "nats://one:4222,nats://two:4222"
    assert "secret" not in repr(settings)
    assert "one:4222" in repr(settings)
    assert "secret" not in error_of({"nats": ("http://ann:secret@one",)})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"nats_user": "ann", "nats_token": "t"}, "nats_user and nats_token exclude each other"),
        ({"nats_nkey": FILE, "nats_creds": FILE}, "nats_nkey and nats_creds exclude each other"),
        ({"nats_password": "p"}, "nats_password needs nats_user"),
        ({"nats_tls_cert": FILE}, "nats_tls_cert and nats_tls_key need each other"),
        ({"nats_tls_key": FILE}, "nats_tls_cert and nats_tls_key need each other"),
        ({"mappings": {"a.*": "b.{{wildcard(2)}}"}}, "mappings"),
        ({"reply_prefixes": "_INBOX_app,a.*"}, "'a.*' is not a prefix of reply subjects"),
        ({"reply_prefixes": "a b"}, "'a b' is not a prefix of reply subjects"),
        ({"reply_prefixes": "$JS.x"}, "'$JS.x' is not a prefix of reply subjects"),
        ({"reply_prefixes": "a..b"}, "'a..b' is not a prefix of reply subjects"),
    ],
)
def test_settings_that_do_not_go_together_are_named(values: dict[str, Any], text: str) -> None:
    assert text in error_of(values)


def test_prefixes_of_several_tokens_are_accepted() -> None:
    settings = NatsSettings(reply_prefixes="_INBOX_app, replies.of.app")  # type: ignore[arg-type]
    assert settings.reply_prefixes == ("_INBOX_app", "replies.of.app")


PLAIN, ENCRYPTED = ("nats://one:4222",), ("nats://one:4222", "tls://two:4222")


@pytest.mark.parametrize(
    ("values", "urls", "requires"),
    [
        ({}, PLAIN, False),
        ({}, ENCRYPTED, True),
        ({"nats_tls_ca": FILE}, PLAIN, True),
        ({"nats_tls_cert": FILE, "nats_tls_key": FILE}, PLAIN, True),
        ({"nats_tls_hostname": "one"}, PLAIN, True),
        ({"nats_user": "ann", "nats_password": "p"}, PLAIN, False),
    ],
)
def test_one_setting_or_url_is_enough_to_require_tls(
    values: dict[str, Any], urls: tuple[str, ...], requires: bool
) -> None:
    assert NatsSettings(**values).requires_tls(urls) is requires


def changes(tenant: dict[str, Any], general: dict[str, Any]) -> dict[str, Any]:
    return TenantSettings(**tenant).over(NatsSettings(**general), PLAIN)


def test_a_tenant_never_logs_in_as_the_gateway() -> None:
    general = {"nats_user": "gateway", "nats_password": "p", "mappings": {"a": "b"}, "reply_prefixes": ("_INBOX_app",)}
    found = changes({"nats_token": "t"}, general)
    assert found.keys() == AccountSettings.model_fields.keys()
    assert (found["nats_user"], found["nats_password"], found["mappings"], found["reply_prefixes"]) == (
        None,
        None,
        {},
        (),
    )
    assert found["nats_token"].get_secret_value() == "t"


def test_authorities_and_host_name_are_the_gateways_unless_the_tenant_has_its_own() -> None:
    general = {"nats_tls_ca": FILE, "nats_tls_hostname": "core"}
    assert (changes({}, general)["nats_tls_ca"], changes({}, general)["nats_tls_hostname"]) == (FILE, "core")
    own = changes({"nats_tls_ca": OTHER, "nats_tls_hostname": "own"}, general)
    assert (own["nats_tls_ca"], own["nats_tls_hostname"]) == (OTHER, "own")


def test_the_host_name_of_the_gateways_server_is_not_expected_of_another_server() -> None:
    elsewhere = changes({"nats": "tls://elsewhere:4222"}, {"nats_tls_ca": FILE, "nats_tls_hostname": "core"})
    assert elsewhere["nats"] == ("tls://elsewhere:4222",)
    assert (elsewhere["nats_tls_ca"], elsewhere["nats_tls_hostname"]) == (FILE, None)


def test_a_tenant_without_a_certificate_inherits_the_requirement_of_tls() -> None:
    assert "nats" not in changes({}, {})
    found = changes({}, {"nats_tls_cert": FILE, "nats_tls_key": FILE})
    assert (found["nats"], found["nats_tls_cert"], found["nats_tls_key"]) == (("tls://one:4222",), None, None)
