#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gmqtt 0.8.0: a QoS 2 message is given to `on_message` at PUBLISH, and packet identifiers of received messages are not
# remembered. When the connection ends before the broker has PUBREC, the broker has to send the message again with DUP, and the
# program gets it twice; the flag `dup` in the properties is the only trace.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check gmqtt==0.8.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, sys

import gmqtt
from gmqtt.mqtt.constants import MQTTv311


async def read(reader):
    first, size = await reader.readexactly(2)
    assert size < 128
    return first, await reader.readexactly(size)


async def main():
    received, answered, connections = [], [], []
    released = asyncio.Event()

    async def serve(reader, writer):
        connections.append(writer)
        await read(reader)
        again = len(connections) > 1
        writer.write(bytes([0x20, 2, again, 0]))
        writer.write(bytes([0x34 | again << 3, 6]) + b"\x00\x01t\x00\x05x")  # QoS 2, packet identifier 5
        if not again:
            while not received:
                await asyncio.sleep(0.05)
            writer.transport.abort()  # PUBREC is lost
            return
        answered.append(await read(reader))
        writer.write(b"\x62\x02\x00\x05")
        answered.append(await read(reader))
        released.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = gmqtt.Client("c", clean_session=False)
    client.set_config({"reconnect_retries": 5, "reconnect_delay": 1})

    async def on_message(_client, _topic, payload, _qos, properties):
        received.append((payload, properties["dup"]))
        return 0

    client.on_message = on_message
    await client.connect("127.0.0.1", server.sockets[0].getsockname()[1], version=MQTTv311)
    await asyncio.wait_for(released.wait(), 30)
    await client.disconnect()
    server.close()
    print(f"gmqtt 0.8.0: one QoS 2 message reaches the program as {received}, (payload, dup)")
    if received != [(b"x", 0), (b"x", 1)] or answered != [(0x50, b"\x00\x05"), (0x70, b"\x00\x05")]:
        sys.exit("the behaviour has changed")


asyncio.run(main())
PYTHON
