# SPDX-License-Identifier: Apache-2.0
"""A connection to NATS for one command."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson

from mqtt_nats.backbone.inbox import NO_RESPONDERS, RequestInbox
from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.nats_connect import connect_link, open_inbox
from mqtt_nats.config.settings import Settings
from mqtt_streams.api import ApiError, NoResponders, RequestTimeout


@contextlib.asynccontextmanager
async def connected(settings: Settings) -> AsyncIterator[RequestInbox]:
    """Connect to NATS with the ``nats_*`` settings and yield the inbox for requests to NATS and JetStream.

    Raises:
        StartupError: NATS cannot be reached, or JetStream has refused a request.
    """

    async def offline() -> None:
        return

    async def online() -> None:
        if inbox is not None:
            inbox.renew()
        link.go_online()

    inbox: RequestInbox | None = None

    try:
        link = await connect_link(settings, name="mqtt-nats ctl", no_echo=False, on_online=online, on_offline=offline)
    except StartupError as error:
        if "nats" in settings.model_fields_set or "--data" in str(error):
            raise
        raise StartupError(f"{error}, or --data to the directory of an embedded one") from None
    try:
        inbox = await open_inbox(settings, link)
        yield inbox
    except NoResponders:
        domain = settings.jetstream_domain
        which, hint = f" of the domain {domain!r} (jetstream_domain)", ""
        if not domain:
            which, hint = "", "; if this nats-server is a leafnode, set jetstream_domain to the domain of the hub"
        raise StartupError(
            f"JetStream{which} does not answer at {settings.nats_display}, or no gateway has run there yet{hint}"
        ) from None
    except (ApiError, RequestTimeout) as error:
        raise StartupError(f"JetStream refuses the request: {' '.join(str(error).split())}") from None
    finally:
        await link.close()


async def ask_all(inbox: RequestInbox, subject: bytes, seconds: float, body: bytes = b"") -> list[dict[str, Any]]:
    """Send a request and return all answers that arrive within ``seconds``."""
    link = inbox.link
    answers: list[dict[str, Any]] = []

    def arrived(subject: bytes, reply: bytes, headers: bytes, payload: bytes) -> None:
        if payload and not headers.startswith(NO_RESPONDERS):
            answers.append(orjson.loads(payload))

    reply = inbox.prefix + b"all." + inbox.token()
    sid = link.subscribe_raw(reply, arrived)
    link.out.append(b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(body), body))
    link.kick()
    await asyncio.sleep(seconds)
    link.unsubscribe_raw(sid)
    return answers


def run_connected(settings: Settings, work: Callable[[RequestInbox], Awaitable[Any]]) -> Any:
    """Run ``work`` in an event loop with a connection to NATS, and return its result. Raises StartupError."""

    async def run() -> Any:
        async with connected(settings) as inbox:
            return await work(inbox)

    return asyncio.run(run())  # uvloop takes longer to import than it saves
