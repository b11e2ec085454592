# SPDX-License-Identifier: Apache-2.0
"""Things that listen and are no nats-server, and connections for tests."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.options import Options

INFO = b'INFO {"server_id":"X","version":"2.15.1","max_payload":1048576,"headers":true}\r\n'


def connect(servers: str, **options: Any) -> Connection:
    """A connection as the options make it; 5 seconds for it unless they say otherwise."""
    return Connection(Options.parse({"servers": servers, "connectTimeout": 5} | options).access)


@contextlib.contextmanager
def listener(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something on a port of 127.0.0.1, whose URL this is: `serve` has each connection, which then ends."""
    server = socket.create_server(("127.0.0.1", 0), backlog=64)
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                client.settimeout(10)
                serve(client)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"nats://127.0.0.1:{server.getsockname()[1]}"
    finally:
        ended.set()
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(20)


def says(*answers: bytes) -> Callable[[socket.socket], None]:
    """For `listener`: says the first at once, the others each after something was received, then waits for the end."""

    def serve(client: socket.socket) -> None:
        for index, answer in enumerate(answers):
            if index:
                client.recv(65_536)
            client.sendall(answer)
        while client.recv(65_536):
            pass

    return serve


def says_hello(client: socket.socket) -> None:
    """Whatever a client needs to be connected."""
    client.sendall(INFO)
    greeting = b""
    while not greeting.endswith(b"PING\r\n"):
        greeting += client.recv(65_536)
    client.sendall(b"PONG\r\n")
