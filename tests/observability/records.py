# SPDX-License-Identifier: Apache-2.0
"""What a gateway in this process says about messages, as the JSON that it would write."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from typing import Any

from mqtt_nats.base.logs import Json


class Records(logging.Handler):
    """Keeps records."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []
        self.setFormatter(Json())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@contextlib.contextmanager
def of_messages() -> Iterator[Records]:
    """Records about messages, of gateways that start meanwhile."""
    log = logging.getLogger("mqtt_nats.messages")
    found = Records()
    log.addHandler(found)
    log.setLevel(logging.DEBUG)
    try:
        yield found
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(found)
