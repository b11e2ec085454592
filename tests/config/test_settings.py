# SPDX-License-Identifier: Apache-2.0
"""Settings: what wins over what, what is refused, what is never shown."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr, ValidationError

from mqtt_nats.access.settings import KINDS
from mqtt_nats.base.errors import StartupError
from mqtt_nats.base.limit_settings import PER_LISTENER
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.supervisor import dump
from mqtt_nats.plugins.delayed import DelayedOptions
from mqtt_nats.transport.listener_settings import ListenerSettings

TLS = f'tls_cert = "{__file__}"\ntls_key = "{__file__}"'
"""Files that exist; Settings does not look into them."""


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MQTT_NATS_"):
            monkeypatch.delenv(name)


def write(path: Path, text: str) -> Path:
    file = path / "gateway.toml"
    file.write_text(text, encoding="utf-8")
    return file


def refusal(values: dict[str, Any], config: Path | None = None) -> str:
    with pytest.raises(StartupError) as caught:
        Settings.load(values, config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_flag_wins_over_the_environment_which_wins_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "max_inflight = 1\nmax_queued = 1\nbacklog = 1\n")
    monkeypatch.setenv("MQTT_NATS_MAX_INFLIGHT", "2")
    monkeypatch.setenv("MQTT_NATS_MAX_QUEUED", "2")
    settings = Settings.load({"max_inflight": "3", "backlog": None}, file)
    assert (settings.max_inflight, settings.max_queued, settings.backlog) == (3, 2, 1)
    assert settings.max_subscriptions == 10_000


def test_the_file_is_found_through_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQTT_NATS_CONFIG", str(write(tmp_path, 'listen = "127.0.0.1:7"')))
    assert Settings.load({}).listen_address == ("127.0.0.1", 7)


def test_operators_read_the_settings_of_nats_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gateway's file, whose other files are not there."""
    monkeypatch.setenv("MQTT_NATS_NATS_PASSWORD", "p")
    text = 'nats = "tls://h"\nnats_user = "u"\nacl_file = "/does/not/exist"\nmax_inflight = 0\n'
    file = write(tmp_path, text)
    settings = Settings.load_nats({"data": "d"}, file)
    assert (settings.nats, settings.nats_user, settings.data) == (("tls://h",), "u", Path("d"))
    assert settings.nats_password is not None
    assert settings.nats_password.get_secret_value() == "p"
    assert settings.max_inflight == 100
    with pytest.raises(StartupError, match=r"^invalid setting: nats: expected URLs such as .* \(--nats\)$"):
        Settings.load_nats({"nats": "h"}, file)
    file.write_text("lisen = 1", encoding="utf-8")
    with pytest.raises(StartupError, match="unknown setting 'lisen'"):
        Settings.load_nats({}, file)


def test_an_empty_variable_is_not_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQTT_NATS_NATS_TOKEN", "")
    assert Settings.load({}).nats_token is None


def test_unknown_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQTT_NATS_PORT", "tcp://10.0.0.1:1883")  # what Kubernetes sets
    assert Settings.load({}) == Settings()


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"session_expiry_interval": "never"}, "session_expiry_interval", None),
        ({"session_expiry_interval": "60"}, "session_expiry_interval", 60),
        ({"max_packet_size": "2MiB"}, "max_packet_size", 2 * 1024 * 1024),
        ({"max_packet_size": 1000}, "max_packet_size", 1000),
        ({"max_client_id_length": "1KB"}, "max_client_id_length", 1000),
        ({"message_retention": "7d"}, "message_retention", 604_800),
        ({"connect_timeout": "1m30s"}, "connect_timeout", 90.0),
        ({"sys_interval": "500ms"}, "sys_interval", 0.5),
        ({"session_expiry_interval": "1h30m"}, "session_expiry_interval", 5400),
        ({"flapping_ban": "2h"}, "flapping_ban", 7200),
        ({"drain_time": "1.5"}, "drain_time", 1.5),
        ({"nats": "nats://a, tls://b:5"}, "nats", ("nats://a", "tls://b:5")),
        ({"nats": ["nats://a"]}, "nats", ("nats://a",)),
        ({"listen": "[::1]:0"}, "listen_address", ("::1", 0)),
        ({"embedded": "true"}, "embedded", True),
        ({"local_dispatch": "0"}, "local_dispatch", False),
        ({"log_level": "WARNING"}, "log_level", "warning"),
        ({"addresses": "deny 10.0.0.0/8, allow all"}, "addresses", ("deny 10.0.0.0/8", "allow all")),
        ({"byte_rate": "64KiB"}, "byte_rate", 65_536),
        ({"message_rate": "0.5"}, "message_rate", 0.5),
        ({"max_qos": "1"}, "max_qos", 1),
        ({"data": "/var/lib/x"}, "data", Path("/var/lib/x")),
    ],
)
def test_values(given: dict[str, Any], field: str, value: object) -> None:
    assert getattr(Settings.load(given), field) == value


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"listen": "1883"}, "listen = '1883'"),
        ({"listen": "::1:1883"}, "brackets"),
        ({"listen": "127.0.0.1:65536"}, "HOST:PORT"),
        ({"listen": "127.0.0.1:\u0661"}, "HOST:PORT"),
        ({"nats": "127.0.0.1:4222"}, "nats: expected URLs"),
        ({"nats": "ws://a"}, "nats: expected URLs"),
        ({"nats": ""}, "nats: expected URLs"),
        ({"nats": "nats://a:x"}, "nats: expected URLs"),
        ({"nats": []}, "nats:"),
        ({"max_inflight": "many"}, "max_inflight = 'many'"),
        ({"max_inflight": 0}, "max_inflight = '0'"),
        ({"max_inflight": 16385}, "max_inflight"),
        ({"connect_timeout": "nan"}, "connect_timeout"),
        ({"connect_timeout": "1x"}, "connect_timeout = '1x': expected a duration such as 30s, 1h30m or 7d"),
        ({"connect_timeout": "-1s"}, "expected a duration"),
        ({"connect_timeout": "5 m 3"}, "expected a duration"),
        ({"message_retention": "1.5s"}, "message_retention = '1.5s': input should be a valid integer"),
        ({"message_retention": "999999999999d"}, "message_retention"),
        ({"max_packet_size": "1 XB"}, "max_packet_size = '1 XB': could not interpret byte unit"),
        ({"connect_timeout": "inf"}, "connect_timeout"),
        ({"max_packet_size": "268435461"}, "max_packet_size"),
        ({"session_expiry_interval": "0"}, "session_expiry_interval"),
        ({"session_positions": "memory"}, "session_positions = 'memory'"),
        ({"message_ids": "sometimes"}, "message_ids = 'sometimes'"),
        ({"log_level": "loud"}, "log_level = 'loud'"),
        ({"addresses": "deny 10.0.0.0/8"}, "addresses = 'deny 10.0.0.0/8': the last entry must be `allow all` or"),
        ({"addresses": "deny 10.0.0.1/8,allow all"}, "is an address in a network, not the network"),
        ({"addresses": "allow everybody"}, "'everybody' is not a network such as 10.0.0.0/8"),
        ({"addresses": "all"}, "expected `allow NETWORK` or `deny NETWORK`"),
        ({"message_rate": "0"}, "message_rate = '0': input should be greater than 0"),
        ({"byte_rate": "much"}, "byte_rate = 'much'"),
        ({"connect_rate": "nan"}, "connect_rate = 'nan'"),
        ({"max_qos": "3"}, "max_qos = '3': input should be 0, 1 or 2"),
        ({"max_topic_length": "65536"}, "max_topic_length = '65536'"),
        ({"flapping_window": "-1"}, "flapping_window = '-1'"),
        ({"max_backlog": "0"}, "max_backlog = '0'"),
        ({"nats_creds": "/does/not/exist"}, "nats_creds = '/does/not/exist'"),
        ({"nats": "nats://a", "embedded": True}, "--nats or --embedded, not both"),
        ({"nats_user": "u", "nats_token": "t"}, "nats_user and nats_token exclude each other"),
        ({"nats_password": "p"}, "nats_password needs nats_user"),
        ({"nats_tls_cert": __file__}, "nats_tls_cert and nats_tls_key need each other"),
        ({"tenants": {"a": {"nats_user": "u", "nats_token": "t"}}}, "tenants.a: nats_user and nats_token exclude"),
        ({"tenants": {"a": {"nats_usr": "u"}}}, "tenants.a.nats_usr: unknown setting: did you mean 'nats_user'?"),
        ({"tenants": {"a": {"nats": "http://me:hunter2@h"}}}, "tenants.a.nats: expected URLs"),
        ({"tenants": {"a/b": {}}}, "tenants.a/b: string should match pattern"),
        ({"tenants": {"a": {"mappings": {"a.*": "b.$2"}}}}, "tenants.a.mappings: 'a.*' has no wildcard 2"),
        ({"mappings": {"a.*": "b.$2"}}, "mappings: 'a.*' has no wildcard 2"),
        ({"mappings": 5}, "mappings: input should be a table"),
        ({"tenants": [1]}, "tenants: input should be a table"),
        ({"listeners": [5]}, "listeners[1]: input should be a table"),
        ({"listeners": {}}, "listeners: input should be a list"),
        ({"addresses": 5}, "addresses = '5': input should be a list"),
        ({"mappings": {"a": 5}}, "mappings.a: input should be a valid string"),
        ({"listeners": [{"listen": "127.0.0.1:1", "tenant": "b"}]}, "listener 127.0.0.1:1: there is no tenant 'b'"),
        (
            {"authenticators": [{"type": "http", "url": "https://a/", "tenant": "b"}]},
            "authenticator http: there is no tenant 'b'",
        ),
    ],
)
def test_refused_values_are_named_in_one_line(given: dict[str, Any], named: str) -> None:
    assert named in refusal(given)


@pytest.mark.parametrize("model", [Settings, ListenerSettings, *KINDS.values(), DelayedOptions])
def test_every_number_has_a_bound(model: type[BaseModel]) -> None:
    """What fits into no integer of C, of JSON or of NATS is refused, and not met later. Rates may be any."""
    schema = model.model_json_schema()
    numbers = {
        name
        for name, one in schema["properties"].items()
        if {"integer", "number"} & {kind.get("type") for kind in (one, *one.get("anyOf", ()))}
    }
    assert model is not Settings or {"backlog", "message_retention", "flapping_ban"} < numbers
    for name in numbers - {"message_rate", "connect_rate", "connect_rate_per_address", "consumer_rate", "session_rate"}:
        with pytest.raises(ValidationError, match=f"{name}\n  "):
            model(**{name: 10**20})


def test_what_nats_server_can_keep() -> None:
    """A ban's end has to fit into 64 bits in nanoseconds, the age of messages by itself."""
    assert "flapping_ban" in refusal({"flapping_ban": "2147483648"})
    assert "message_retention" in refusal({"message_retention": "9223372037"})
    assert Settings.load({"flapping_ban": "2147483647", "message_retention": "9223372036"}).flapping_ban == 2**31 - 1
    assert "backlog" in refusal({"backlog": "2147483648"})


def test_all_that_is_wrong_is_said_at_once() -> None:
    message = refusal({"max_inflight": "x", "backlog": "y"})
    assert "max_inflight" in message
    assert "backlog" in message


def test_an_unknown_key_of_the_file_is_named_with_the_nearest_setting(tmp_path: Path) -> None:
    message = refusal({}, write(tmp_path, "max_in_flight = 3"))
    assert "'max_in_flight'" in message
    assert "'max_inflight'" in message
    assert "gateway.toml" in message
    assert "docs/configuration.md" in refusal({}, write(tmp_path, "zzzzzz = 3"))


def test_a_bad_file_is_one_line(tmp_path: Path) -> None:
    assert "No such file" in refusal({}, tmp_path / "none.toml")
    assert "directory" in refusal({}, tmp_path)
    assert "line 1" in refusal({}, write(tmp_path, "listen = x"))
    (tmp_path / "latin").write_bytes(b"listen = '\xff'")
    assert "UTF-8" in refusal({}, tmp_path / "latin")


def test_secrets_are_shown_nowhere() -> None:
    settings = Settings.load({"nats_user": "u", "nats_password": "hunter2", "nats": "nats://me:hunter2@h:1,tls://h"})
    for text in (repr(settings), str(settings), settings.nats_display):
        assert "hunter2" not in text
    assert settings.nats[0] == "nats://me:hunter2@h:1"
    assert settings.nats_display == "nats://h:1,tls://h"
    assert settings.nats_password == SecretStr("hunter2")
    assert "hunter2" not in refusal({"nats_password": ["hunter2"], "nats": "http://me:hunter2@h"})


def test_settings_do_not_change() -> None:
    settings = Settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.listen = "127.0.0.1:1"


def test_what_holds_at_a_listener(tmp_path: Path) -> None:
    """Everything that both can set, and only that."""
    own = {
        "max_connections_per_address": 3,
        "connect_rate": 1.5,
        "connect_rate_per_address": 2.5,
        "connect_timeout": 3.5,
        "connect_packet_size": 100,
        "max_packet_size": 200,
        "message_rate": 4.5,
        "byte_rate": 300,
        "max_subscriptions": 5,
        "max_inflight": 6,
        "max_queued": 7,
        "receive_maximum": 8,
        "temporary_refusals": "connack",
        "max_qos": 1,
        "durable_sessions": False,
        "carried_messages": True,
    }
    assert set(own) == set(PER_LISTENER)
    settings = Settings.load(
        {"max_held": 9, "max_connections": 10}, listeners(tmp_path, 'listen = "127.0.0.1:1"\nmax_connections = 2')
    )
    assert settings.at(settings.all_listeners[0]) is settings
    found = settings.at(ListenerSettings.model_validate({"listen": "h:1", "max_connections": 2, **own}))
    assert {name: getattr(found, name) for name in own} == own
    assert (found.max_held, found.max_connections) == (9, 10)


def listeners(path: Path, *entries: str) -> Path:
    return write(path, "".join(f"[[listeners]]\n{entry}\n" for entry in entries))


def test_listeners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = listeners(
        tmp_path, 'listen = "127.0.0.1:1"', f'listen = "[::1]:2"\ntype = "tls"\n{TLS}\nmax_connections = 3'
    )
    found = Settings.load({}, file).all_listeners
    assert [(one.listen, one.type, one.max_connections) for one in found] == [
        ("127.0.0.1:1", "tcp", None),
        ("[::1]:2", "tls", 3),
    ]
    found = Settings.load({"listen": "127.0.0.1:3"}, file).all_listeners
    assert [one.listen for one in found] == ["127.0.0.1:3", "127.0.0.1:1", "[::1]:2"]
    assert [one.listen for one in Settings.load({}).all_listeners] == ["127.0.0.1:1883"]
    monkeypatch.setenv("MQTT_NATS_LISTENERS", '[{"listen": "127.0.0.1:4"}]')
    assert [one.listen for one in Settings.load({}, file).all_listeners] == ["127.0.0.1:4"]
    monkeypatch.setenv("MQTT_NATS_LISTENERS", "127.0.0.1:4")
    assert "MQTT_NATS_LISTENERS is not valid JSON" in refusal({}, file)


def test_workers_get_the_listeners(tmp_path: Path) -> None:
    """Also ``listen`` when it was set to what it is anyway."""
    file = listeners(tmp_path, 'listen = "127.0.0.1:1"', f'listen = "127.0.0.1:2"\ntype = "tls"\n{TLS}')
    secret = {"listen": "127.0.0.1:1883", "nats_password": "p", "nats_user": "u", "nats_creds": None}
    for flags in ({}, {"plugins": {"delayed": {"load": False}}}, secret):
        settings = Settings.load(flags, file)
        again = Settings(**json.loads(json.dumps(dump(settings))))
        assert again == settings
        assert again.all_listeners == settings.all_listeners


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("", "listeners[1].listen: field required"),
        ('listen = "1883"', "listeners[1].listen: expected HOST:PORT"),
        ('listen = "h:1"\ntype = "quic"', "listeners[1].type: input should be 'tcp'"),
        ('listen = "h:1"\ntype = "tls"', "listeners[1]: type tls needs tls_cert and tls_key"),
        (f'listen = "h:1"\ntype = "tls"\ntls_cert = "{__file__}"', "type tls needs tls_cert and tls_key"),
        (f'listen = "h:1"\n{TLS}', "listeners[1]: tls_cert needs a type with TLS, not tcp"),
        ('listen = "h:1"\ntype = "tls"\ntls_cert = "/none"', "listeners[1].tls_cert: path does not point to a file"),
        (f'listen = "h:1"\ntype = "tls"\n{TLS}\ntls_minimum = "1.1"', "listeners[1].tls_minimum: input should be"),
        ('listen = "h:1"\nmax_connections = 0', "listeners[1].max_connections: input should be greater"),
        ('listen = "h:1"\nmax_connection = 1', "listeners[1].max_connection: unknown setting: did you mean 'max_conn"),
        ('listen = "h:1"\nzzz = 1', "listeners[1].zzz: unknown setting"),
        ('listen = "h:1"\nproxy_protocol = ["here"]', "listeners[1].proxy_protocol: 'here' is not a network such as"),
        ('listen = "h:1"\norigins = ["https://a"]', "listeners[1]: origins needs a type with WebSocket, not tcp"),
        ('listen = "h:1"\npaths = ["/"]', "listeners[1]: paths needs a type with WebSocket, not tcp"),
        ('listen = "h:1"\ntype = "ws"\npaths = []', "listeners[1].paths: no client can connect"),
        ('listen = "h:1"\ntype = "ws"\npaths = ["mqtt"]', "listeners[1].paths: 'mqtt' is no path"),
        ('listen = "h:1"\ntype = "ws"\npaths = ["/a?b"]', "listeners[1].paths: '/a?b' is no path"),
        ('listen = "h:1"\naddresses = ["deny 10.0.0.0/8"]', "listeners[1].addresses: the last entry must be"),
        ('listen = "h:1"\nmax_qos = 3', "listeners[1].max_qos: input should be 0, 1 or 2"),
        ('listen = "h:1"\nmessage_rate = -1', "listeners[1].message_rate: input should be greater than 0"),
        ('listen = "h:1"\n[[listeners]]\nlisten = "h:1"', "two listeners have the address h:1"),
    ],
)
def test_listeners_that_are_refused(entry: str, named: str, tmp_path: Path) -> None:
    assert named in refusal({}, listeners(tmp_path, entry))


@pytest.mark.parametrize(
    ("drain_time", "clients", "seconds"), [(0, 0, 0.0), (0, 500, 0.25), (0, 50_000, 5.0), (30, 2, 30.0)]
)
def test_clients_of_a_stopping_gateway_are_disconnected_at_a_pace(
    drain_time: float, clients: int, seconds: float
) -> None:
    assert Settings(drain_time=drain_time).drain_seconds(clients) == seconds
