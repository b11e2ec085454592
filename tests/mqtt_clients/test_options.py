# SPDX-License-Identifier: Apache-2.0
"""Options of `mqtt-nats pub`, `sub` and `request`: the server, and the CONNECT packet."""

from __future__ import annotations

from typing import Any

import click
import pytest

from mqtt_nats.codec import Connect
from mqtt_nats.mqtt_clients.options import EXPIRY_NEVER, PASSWORD_VARIABLE, connect_of, connection_options, server_of
from mqtt_nats.mqtt_clients.stream import Server, Tls


def given(*words: str) -> tuple[Server, Connect]:
    """What a command line means."""

    @click.command()
    @connection_options
    def command(**options: Any) -> tuple[Server, Connect]:
        return server_of(options), connect_of(options)

    found: tuple[Server, Connect] = command.main(words, standalone_mode=False)
    return found


@pytest.mark.parametrize(
    ("words", "server"),
    [
        ([], Server("localhost", 1883, None)),
        (["--tls"], Server("localhost", 8883, Tls())),
        (["-h", "there", "-p", "7"], Server("there", 7, None)),
        (["--url", "mqtt://there"], Server("there", 1883, None)),
        (["--url", "mqtts://there:7"], Server("there", 7, Tls())),
        (["--url", "ws://there"], Server("there", 80, None, "/mqtt")),
        (["--url", "wss://[::1]/x"], Server("::1", 443, Tls(), "/x")),
    ],
)
def test_server(words: list[str], server: Server) -> None:
    assert given(*words)[0] == server


def test_a_session_does_not_expire_unless_it_is_said() -> None:
    _, connect = given("-c", "-i", "one")
    assert (connect.clean_start, connect.properties) == (False, {"session_expiry_interval": EXPIRY_NEVER})
    _, connect = given("-c", "-i", "one", "-x", "60")
    assert connect.properties == {"session_expiry_interval": 60}
    assert given("-c", "-i", "one", "-V", "3.1.1")[1].properties is None


def test_a_will() -> None:
    _, connect = given("--will-topic", "a", "--will-payload", "gone", "--will-qos", "1", "--will-delay", "5")
    assert connect.will is not None
    assert (connect.will.payload, connect.will.qos, connect.will.retain) == (b"gone", 1, False)
    assert connect.will.properties == {"will_delay_interval": 5}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--url", "http://there"], "--url is mqtt://"),
        (["--url", "mqtt://there", "-h", "here"], "--url is instead of"),
        (["--url", "mqtt://user@there"], "do not belong in --url"),
        (["--url", "mqtt://there/path"], "has no path"),
        (["--url", "ws://there", "--tls"], "is without TLS"),
        (["-c"], "--session needs --id"),
        (["-x", "5"], "--session-expiry needs --session"),
        (["-c", "-i", "one", "-x", "5", "-V", "4"], "--session-expiry is for MQTT 5.0"),
        (["-P", "secret", "-V", "4"], "without --username needs MQTT 5.0"),
        (["--will-qos", "1"], "--will-qos needs --will-topic"),
        (["--will-topic", "a", "--will-delay", "5", "-V", "4"], "--will-delay is for MQTT 5.0"),
        (["--will-topic", "a/#"], "topic"),
        (["-V", "6"], "neither 3.1.1 nor 5.0"),
    ],
)
def test_options_that_exclude_each_other(words: list[str], error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    with pytest.raises(click.UsageError) as found:
        given(*words)
    assert error in found.value.format_message()
