# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that tests put between a gateway and its nats-server, to cut or stall the connections."""

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

_READ = 65_536


class Proxy:
    """Forwards ``port`` of ``host`` (0: any that is free) to 127.0.0.1:``target``.

    :meth:`cut` ends all connections and refuses new ones; :meth:`stall` keeps them and forwards nothing, as
    a broken network does; :meth:`slow` delays what it forwards; :meth:`restore` ends each.
    """

    def __init__(self, target: int, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._target = target
        self._host = host
        self._listener = socket.create_server((host, port), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        """Connections forwarded so far."""
        self._flowing = threading.Event()
        self._flowing.set()
        self._down = False
        self._delay = 0.0
        self._ended = False
        self._pairs: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """URL for NATS clients."""
        return f"nats://{self._host}:{self.port}"

    @property
    def open(self) -> int:
        """How many connections there are."""
        with self._lock:
            return len(self._pairs) // 2

    def cut(self) -> None:
        """End every connection, and end new ones at once."""
        with self._lock:
            self._down = True
        self._flowing.set()
        self._end_all()

    def stall(self) -> None:
        """Forward nothing, and tell nobody."""
        self._flowing.clear()

    def slow(self, seconds: float) -> None:
        """Forward each piece of data so much later."""
        self._delay = seconds

    def restore(self) -> None:
        """Forward again."""
        self._delay = 0.0
        with self._lock:
            self._down = False
        self._flowing.set()

    def close(self) -> None:
        """End for good."""
        self._ended = True
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _end_all(self) -> None:
        with self._lock:
            pairs = list(self._pairs)
        for end in pairs:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._ended:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target), 5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                if self._down:
                    client.close()
                    server.close()
                    continue
                self.accepted += 1
                self._pairs |= {client, server}
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            left = [2]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, sink, left), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_READ):
                self._flowing.wait()
                time.sleep(self._delay)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            left[0] -= 1
            if not left[0]:
                self._pairs -= {source, sink}
                source.close()
                sink.close()
