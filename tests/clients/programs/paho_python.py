# SPDX-License-Identifier: Apache-2.0
"""A program of the kit on paho-mqtt, 1.6 or 2."""

import sys
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

EXPIRY_S = 300


def say(*words: object) -> None:
    print(*words, flush=True)


def make(version: str, client_id: str, clean: bool) -> Any:
    """A client with the callbacks of its version of the library."""
    options: dict[str, Any] = {"client_id": client_id, "protocol": paho.MQTTv311}
    if version == "5":
        options["protocol"] = paho.MQTTv5
    else:
        options["clean_session"] = clean
    callbacks = getattr(paho, "CallbackAPIVersion", None)
    return paho.Client(*([callbacks.VERSION2] if callbacks else []), **options)


def present(flags: Any) -> bool:
    return bool(flags["session present"] if isinstance(flags, dict) else flags.session_present)


def message(received: Any) -> None:
    say("message", received.topic, received.qos, received.payload.decode())


def main() -> None:
    """Connect, and carry out the commands of standard input."""
    address, version, client_id, clean, *will = sys.argv[1:]
    host, _, port = address.partition(":")
    client = make(version, client_id, clean == "1")
    client.reconnect_delay_set(0.1, 0.2)
    if will:
        client.will_set(will[0], "gone", 1)
    client.on_connect = lambda _, __, flags, *___: say("connected", int(present(flags)))
    client.on_message = lambda _, __, received: message(received)
    client.on_publish = lambda *_: say("published")
    client.on_subscribe = lambda _, __, ___, codes, *____: say("subscribed", getattr(codes[0], "value", codes[0]))
    options: dict[str, Any] = {}
    if version == "5":
        options["properties"] = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        options["properties"].SessionExpiryInterval = 0 if clean == "1" else EXPIRY_S
        options["clean_start"] = clean == "1"
    client.connect(host, int(port), 30, **options)
    client.loop_start()
    for line in sys.stdin:
        command, *words = line.split()
        if command == "subscribe":
            client.subscribe(words[0], int(words[1]))
        elif command == "publish":
            client.publish(words[0], words[2], int(words[1]))
        else:
            client.disconnect()
            break
    client.loop_stop()


main()
