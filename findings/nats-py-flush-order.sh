#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-py 2.16.0: `flush` writes PING before the commands that it has collected, and its PONG says nothing about them. After
# `await subscribe(...)` and `await flush()` a message of another connection may be too early and is lost; a publish that was
# flushed may still be in this process. A second `flush` in a row confirms them.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-py==2.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, sys

import nats

INFO = b'INFO {"server_id":"A","version":"2.15.1","proto":1,"headers":true,"max_payload":1048576}\r\n'


async def main():
    lines = []

    async def serve(reader, writer):
        writer.write(INFO)
        while line := await reader.readline():
            lines.append(line.split()[0].decode())
            if line.startswith(b"PUB"):
                await reader.readline()
            if line == b"PING\r\n":
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = await nats.connect(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}", allow_reconnect=False)
    lines.clear()
    await client.subscribe("orders")
    await client.flush()
    subscribed = list(lines)
    await client.publish("orders", b"1")
    await client.flush()
    published = list(lines)
    await client.flush()
    twice = list(lines)
    await client.close()
    server.close()
    print(f"nats-py 2.16.0: the server has seen {subscribed} when the flush after subscribe has returned, {published} when")
    print(f"the one after publish has, and {twice} after one more flush")
    if subscribed[0] != "PING" or published.index("PUB") < published.index("PING", 1):
        sys.exit("the behaviour has changed")


asyncio.run(main())
PYTHON
