# SPDX-License-Identifier: Apache-2.0
"""Gateways with an admin listener, and what asks them."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import httpx

from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.gateway import serve
from mqtt_nats.transport.listener_settings import Bound
from tests.harness.gateway import Gateway
from tests.harness.waiting import eventually

TOKEN = "a-token-for-tests-0123456789"
PATIENCE = 60.0


def address(gateway: Gateway) -> str:
    """Where the admin listener of a gateway process is, as it announces it."""

    def said() -> re.Match[str] | None:
        return re.search(r"\bADMIN +(https?://\S+)/ ", gateway.log, re.MULTILINE)

    eventually(said, PATIENCE, what="the admin listener")
    found = said()
    assert found is not None
    return found[1]


class Admin:
    """A client of an admin listener."""

    def __init__(self, url: str, port: int, token: str = "") -> None:
        self.url = url
        self.port = port
        """Where MQTT clients connect."""
        self.http = httpx.Client(
            base_url=self.url, timeout=PATIENCE, headers={"Authorization": f"Bearer {token}"} if token else {}
        )

    def get(self, path: str, **query: Any) -> Any:
        """Return the answer to GET, as JSON."""
        answer = self.http.get(f"/api/v1{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, **values: Any) -> httpx.Response:
        """Have something done."""
        return self.http.post(f"/api/v1{path}", json=values)

    def metrics(self, query: str = "") -> str:
        """All of ``/metrics``."""
        answer = self.http.get(f"/metrics{query}")
        assert answer.status_code == 200, answer.text
        return answer.text


@contextmanager
def serving(nats: str, **others: Any) -> Iterator[Admin]:
    """A gateway in this process, in a thread of its own, that asks administrators for a token.

    Args:
        others: more settings.
    """
    settings = Settings.load(
        {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", "nats": nats, "admin_token": TOKEN, **others}
    )
    ready = threading.Event()
    bound: list[Bound] = []
    failures: list[BaseException] = []
    loop: asyncio.AbstractEventLoop | None = None
    stop: anyio.Event | None = None

    async def main() -> None:
        nonlocal loop, stop
        loop, stop = asyncio.get_running_loop(), anyio.Event()

        def on_ready(found: list[Bound]) -> None:
            bound.extend(found)
            ready.set()

        await serve(settings, on_ready=on_ready, stop=stop)

    def run() -> None:
        try:
            anyio.run(main, backend_options={"use_uvloop": True})
        except BaseException as error:
            failures.append(error)
        ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(PATIENCE)
    assert not failures
    mqtt, admin = bound
    found = Admin(f"http://127.0.0.1:{admin.port}", mqtt.port, TOKEN)
    try:
        yield found
    finally:
        found.http.close()
        assert loop is not None
        assert stop is not None
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not failures
