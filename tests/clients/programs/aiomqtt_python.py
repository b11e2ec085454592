# SPDX-License-Identifier: Apache-2.0
"""A program of the kit on aiomqtt, which leaves it to programs to connect again."""

import asyncio
import sys

import aiomqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

EXPIRY_S = 300
RETRY_S = 0.1


def say(*words: object) -> None:
    print(*words, flush=True)


def make() -> aiomqtt.Client:
    """A client as the arguments want it."""
    address, version, client_id, clean, *will = sys.argv[1:]
    host, _, port = address.partition(":")
    last = aiomqtt.Will(will[0], "gone", 1) if will else None
    if version != "5":
        return aiomqtt.Client(host, int(port), identifier=client_id, clean_session=clean == "1", will=last)
    properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    properties.SessionExpiryInterval = 0 if clean == "1" else EXPIRY_S
    return aiomqtt.Client(
        host,
        int(port),
        identifier=client_id,
        protocol=aiomqtt.ProtocolVersion.V5,
        clean_start=clean == "1",
        properties=properties,
        will=last,
    )


async def receive(client: aiomqtt.Client) -> None:
    """Say what comes, until the connection ends."""
    async for one in client.messages:
        say("message", one.topic, one.qos, bytes(one.payload).decode())


async def carry_out(client: aiomqtt.Client, commands: asyncio.StreamReader) -> bool:
    """Carry out commands; whether the last one was to disconnect."""
    receiving = asyncio.create_task(receive(client))
    while not receiving.done():
        reading = asyncio.create_task(commands.readline())
        await asyncio.wait({receiving, reading}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            reading.cancel()
            break
        command, *words = reading.result().decode().split() or ["disconnect"]
        if command == "subscribe":
            codes = await client.subscribe(words[0], int(words[1]))
            say("subscribed", getattr(codes[0], "value", codes[0]))
        elif command == "publish":
            await client.publish(words[0], words[2], int(words[1]))
            say("published")
        else:
            receiving.cancel()
            return True
    await receiving
    return False


async def main() -> None:
    """Connect, and again whenever the connection is lost."""
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    client = make()
    while True:
        try:
            async with client:
                say("connected", "?")
                if await carry_out(client, commands):
                    return
        except aiomqtt.MqttError:
            await asyncio.sleep(RETRY_S)


asyncio.run(main())
