# SPDX-License-Identifier: Apache-2.0
"""Monitor of NATS: a connection of its own that tells when NATS is lost, and when it is back."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

from pyspark_mqtt_nats.errors import ConnectError, SourceError
from pyspark_mqtt_nats.nats import protocol
from pyspark_mqtt_nats.nats.connection import Connection
from pyspark_mqtt_nats.options import Options

INTERVAL_S: Final = 2.0
"""Seconds from one PING to the next, and from one attempt to connect to the next."""

ANSWER_S: Final = 3.0
"""Seconds for an answer to PING, and for the first attempt to connect after a loss."""


class Monitor:
    """Context manager that looks at NATS in a thread of its own while the block runs.

    It does not tell of a connection that is lost and made again at once, as queries go on, too. Nor does it tell of
    failures before its first connection is made, as queries then fail by themselves.

    Args:
        options: of the source; files of credentials are read again for each connection.
        say: tells the user something, one line; it is called in the thread.
    """

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self.error = ""
        """Why NATS does not answer, "" while it does."""
        self._options = options
        self._say = say
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()  # the thread may be connecting, which takes up to `connectTimeout`

    def _run(self) -> None:
        answered = False
        lost_at = 0.0
        while not self._ended.is_set():
            self._options = self._options.renewed()
            access = self._options.access
            if answered and not self.error:
                access = replace(access, connect_timeout=min(ANSWER_S, access.connect_timeout))
            try:
                with Connection(access) as connection:
                    answered = True
                    if self.error:
                        self.error = ""
                        self._tell(f"the connection to NATS is back after {time.monotonic() - lost_at:.0f} s")
                    self._stay(connection)
            except SourceError as error:
                if answered and not self.error:
                    self.error = str(error)
                    lost_at = time.monotonic()
                    self._tell(f"the connection to NATS is lost: {error}")
            self._ended.wait(INTERVAL_S if self.error or not answered else 0)

    def _tell(self, text: str) -> None:
        """Tell the user something, unless the block has ended: the summary of the job is the last line."""
        if not self._ended.is_set():
            self._say(text)

    def _stay(self, connection: Connection) -> None:
        """Return when the connection is lost, or the block has ended."""
        try:
            while not self._ended.wait(INTERVAL_S):
                connection.send(protocol.PING + b"\r\n")
                if not connection.read(ANSWER_S):
                    return
        except ConnectError:
            return
