# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server in a thread, which answers what the test says."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Answer = tuple[int, bytes]


class Service:
    """What was asked, and what is answered."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        self.answer: Callable[[str, bytes], Answer] = lambda path, body: (200, b'{"result": "allow"}')
        self.running = 0
        self.most = 0
        """Requests at the same time."""
        self._lock = threading.Lock()

    def handle(self, path: str, headers: dict[str, str], body: bytes) -> Answer:
        """One request."""
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.asked.append((path, headers, body))
        try:
            return self.answer(path, body)
        finally:
            with self._lock:
                self.running -= 1


@contextmanager
def serving(certificate: tuple[Path, Path] | None = None) -> Iterator[Service]:
    """Serve on a free port of 127.0.0.1, by TLS where there is a certificate."""
    service = Service()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, answer = service.handle(self.path, dict(self.headers.items()), body)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", f"{service.url}/elsewhere")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Clients may go when they like."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    scheme = "http"
    if certificate is not None:
        scheme = "https"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    service.url = f"{scheme}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
