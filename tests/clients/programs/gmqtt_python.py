# SPDX-License-Identifier: Apache-2.0
"""A program of the kit on gmqtt."""

import asyncio
import sys
from typing import Any

import gmqtt
from gmqtt.mqtt.constants import UNLIMITED_RECONNECTS, MQTTv50, MQTTv311
from gmqtt.storage import PersistentStorage

EXPIRY_S = 300


def say(*words: object) -> None:
    print(*words, flush=True)


def received(topic: str, payload: bytes, qos: int) -> int:
    """Say what came; 0 is the reason code of its acknowledgement."""
    say("message", topic, qos, payload.decode())
    return 0


async def main() -> None:
    """Connect, and carry out the commands of standard input."""
    address, version, client_id, clean, *will = sys.argv[1:]
    host, _, port = address.partition(":")
    storage = PersistentStorage()
    options: dict[str, Any] = {"clean_session": clean == "1", "persistent_storage": storage}
    if version == "5":
        options["session_expiry_interval"] = 0 if clean == "1" else EXPIRY_S
    if will:
        options["will_message"] = gmqtt.Message(will[0], "gone", qos=1)
    client = gmqtt.Client(client_id, **options)
    client.set_config({"reconnect_retries": UNLIMITED_RECONNECTS, "reconnect_delay": 0.2})
    client.on_connect = lambda _, flags, __, ___: say("connected", flags)
    client.on_message = lambda _, topic, payload, qos, __: received(topic, payload, qos)
    client.on_subscribe = lambda _, __, codes, ___: say("subscribed", codes[0])
    await client.connect(host, int(port), keepalive=30, version=MQTTv50 if version == "5" else MQTTv311)
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        command, *words = line.decode().split()
        if command == "subscribe":
            client.subscribe(words[0], int(words[1]))
        elif command == "publish":
            client.publish(words[0], words[2], qos=int(words[1]))
            await storage.wait_empty()
            say("published")
        else:
            break
    await client.disconnect()


asyncio.run(main())
