#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# paho-mqtt 2.2.0 (MQTT 5): limits that CONNACK names bind nothing. With Receive Maximum 2 it sends 10 unacknowledged QoS 1
# messages, with Maximum QoS 0 and Retain Available 0 a retained QoS 2 message, and with Maximum Packet Size 64 a message of
# 1,000 bytes; a server may end such connections. `publish` returns success. `max_inflight_messages_set(2)` before the connect
# keeps the first limit; in `on_connect`, where a program learns the number, it raises RuntimeError.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check paho-mqtt==2.2.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, sys

import paho.mqtt.client as paho


async def read(reader):
    """First byte and size of the next packet."""
    first = (await reader.readexactly(1))[0]
    size = shift = 0
    while True:
        byte = (await reader.readexactly(1))[0]
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    await reader.readexactly(size)
    return first, size


late = []


async def sent(properties, messages, limit=None):
    """PUBLISH packets that a server gets which acknowledges none: QoS, RETAIN and size of each."""
    found = []

    async def serve(reader, writer):
        await read(reader)
        writer.write(bytes([0x20, 3 + len(properties), 0, 0, len(properties)]) + properties)
        while (packet := await read(reader))[0] != 0xE0:  # DISCONNECT
            first, size = packet
            if first >> 4 == 3:
                found.append((first >> 1 & 3, first & 1, size))
        writer.close()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = paho.Client(paho.CallbackAPIVersion.VERSION2, "c", protocol=paho.MQTTv5)
    connected = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_connect(client, *_):
        try:
            client.max_inflight_messages_set(2)
        except RuntimeError:
            late.append("RuntimeError")
        loop.call_soon_threadsafe(connected.set)

    client.on_connect = on_connect
    if limit is not None:
        client.max_inflight_messages_set(limit)
    await asyncio.to_thread(client.connect, "127.0.0.1", server.sockets[0].getsockname()[1])
    client.loop_start()
    await asyncio.wait_for(connected.wait(), 20)
    for qos, retain, size in messages:
        assert client.publish("t", bytes(size), qos, bool(retain)).rc == paho.MQTT_ERR_SUCCESS
    client.disconnect()
    await asyncio.wait_for(ended.wait(), 20)
    client.loop_stop()
    server.close()
    return found


async def main():
    many = len(await sent(b"\x21\x00\x02", [(1, 0, 1)] * 10))
    limited = len(await sent(b"\x21\x00\x02", [(1, 0, 1)] * 10, limit=2))
    better = await sent(b"\x24\x00\x25\x00", [(2, 1, 1)])
    large = await sent(b"\x27\x00\x00\x00\x40", [(0, 0, 1_000)])
    print(f"paho-mqtt 2.2.0: Receive Maximum 2: {many} in flight, {limited} with a limit (later: {late[0]});")
    print(f"Maximum QoS 0: (QoS, RETAIN) {better[0][:2]}; Maximum Packet Size 64: {large[0][2]} bytes and the header")
    if many != 10 or limited != 2 or late != ["RuntimeError"] * 4 or better[0][:2] != (2, 1) or large[0][2] < 1_000:
        sys.exit("the behaviour has changed")


asyncio.run(main())
PYTHON
