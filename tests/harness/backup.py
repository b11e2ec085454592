# SPDX-License-Identifier: Apache-2.0
"""A stream with its consumers, taken out of JetStream and put back, as ``nats stream backup`` and ``restore`` do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import orjson
from nats.aio.client import Client
from nats.aio.msg import Msg

WAIT = 20.0
"""Seconds for each step."""

IN_USE = (10058, 10062, 10130)
"""There is a stream of that name, which may have come in the middle."""

ATTEMPTS = 20


@dataclass(frozen=True)
class Backup:
    """A stream as it was: its name, configuration and state, and what the server has packed."""

    stream: str
    config: dict[str, Any]
    state: dict[str, Any]
    chunks: list[bytes]


async def _ask(client: Client, subject: str, body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads((await client.request(subject, body, WAIT)).data)
    return found


async def _call(client: Client, subject: str, body: dict[str, Any]) -> dict[str, Any]:
    found = await _ask(client, subject, orjson.dumps(body))
    assert "error" not in found, found
    return found


async def backup(client: Client, stream: str) -> Backup:
    """Take a copy."""
    inbox = client.new_inbox()
    chunks: list[bytes] = []
    done = asyncio.Event()

    async def arrived(message: Msg) -> None:
        if not message.data:
            done.set()
            return
        chunks.append(message.data)
        if message.reply:
            await client.publish(message.reply)

    subscription = await client.subscribe(inbox, cb=arrived)
    answer = await _call(client, f"$JS.API.STREAM.SNAPSHOT.{stream}", {"deliver_subject": inbox, "no_consumers": False})
    async with asyncio.timeout(WAIT):
        await done.wait()
    await subscription.unsubscribe()
    return Backup(stream, answer["config"], answer["state"], chunks)


async def restore(client: Client, saved: Backup) -> None:
    """Put a copy in the place of the stream, which is deleted first."""
    body = orjson.dumps({"config": saved.config, "state": saved.state})
    for _ in range(ATTEMPTS):
        await _call(client, f"$JS.API.STREAM.DELETE.{saved.stream}", {})
        answer = await _ask(client, f"$JS.API.STREAM.RESTORE.{saved.stream}", body)
        if "error" not in answer:
            subject = answer["deliver_subject"]
            for chunk in saved.chunks:
                await client.request(subject, chunk, WAIT)
            answer = await _ask(client, subject, b"")
        if answer.get("error", {}).get("err_code") not in IN_USE:
            break  # else a gateway has made the stream anew meanwhile
    assert "error" not in answer, answer
