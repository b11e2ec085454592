# SPDX-License-Identifier: Apache-2.0
"""Figures of rules for Prometheus, on a port of this machine."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from pyspark_mqtt_nats.jobs import JobError
from pyspark_mqtt_nats.rules.query import Figures

LOOPBACK: Final = "127.0.0.1"
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

TIMEOUT_S: Final = 5.0
"""Seconds for which a client may be silent."""

_ERROR_MOST: Final = 300  # characters of an error

_SERIES: Final = (
    ("rows_read_total", "counter", "Messages that the rule has read.", "read"),
    ("rows_published_total", "counter", "Messages that the rule has given to the sink.", "published"),
    ("batches_total", "counter", "Micro-batches that are complete.", "batches"),
    ("failures_total", "counter", "Times that the query has failed.", "failures"),
    ("lag_messages", "gauge", "Messages of the stream that the rule has not read.", "lag"),
    ("up", "gauge", "Whether the rule runs.", "up"),
)
"""Name, type, help and attribute of each series."""


def text(figures: Mapping[str, Figures]) -> str:
    """Return the figures in the text format of Prometheus."""
    lines = []
    for name, kind, doc, attribute in _SERIES:
        lines += [f"# HELP mqtt_nats_rule_{name} {doc}", f"# TYPE mqtt_nats_rule_{name} {kind}"]
        lines += [f'mqtt_nats_rule_{name}{{rule="{rule}"}} {getattr(one, attribute)}' for rule, one in figures.items()]
    lines += ["# HELP mqtt_nats_rule_error_info Why the rule does not run.", "# TYPE mqtt_nats_rule_error_info gauge"]
    for rule, one in figures.items():
        if one.error:
            lines.append(f'mqtt_nats_rule_error_info{{rule="{rule}",error="{_escaped(one.error)}"}} 1')
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value[:_ERROR_MOST].replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Page:
    """The text that the port answers with."""

    def __init__(self) -> None:
        self.port = 0
        self.body = b""

    def set(self, figures: Mapping[str, Figures]) -> None:
        """Answer with these figures from now on."""
        self.body = text(figures).encode()


@contextmanager
def serving(port: int) -> Iterator[Page]:
    """Answer GET /metrics on a port of loopback, 0 for any, while the block runs; raises JobError."""
    page = Page()

    class Handler(BaseHTTPRequestHandler):
        timeout = TIMEOUT_S

        def do_GET(self) -> None:
            known = self.path == "/metrics"
            body = page.body if known else b"/metrics\n"
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Log nothing."""

    try:
        server = ThreadingHTTPServer((LOOPBACK, port), Handler)
    except OSError as error:
        raise JobError(f"--metrics-port {port}: {error.strerror}") from None
    page.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield page
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
