# SPDX-License-Identifier: Apache-2.0
"""Session records as mqtt-nats 0.1 wrote them, in ``golden/``, and what they promise to their clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

_DIRECTORY: Final = Path(__file__).with_name("golden")


@dataclass(frozen=True)
class Golden:
    """One record.

    Attributes:
        client_id: whose it is, and the name of the file.
        durable: whether the session goes on.
        topics: for messages at QoS 2, the QoS at which they come, and the subscription identifiers that they have.
    """

    client_id: str
    durable: bool
    topics: tuple[tuple[str, int, list[int]], ...] = ()

    @property
    def data(self) -> bytes:
        """The stored bytes."""
        return (_DIRECTORY / f"{self.client_id}.json").read_bytes().rstrip()


_ALL = (
    Golden("golden-0", False),
    Golden("golden-4", True, (("g", 2, []), ("g/one", 2, []), ("g/two", 2, []), ("zero", 0, []))),
    Golden("golden-5", True, (("g", 1, [7]), ("g/one", 1, [7, 8]), ("g/a/b", 1, [7]), ("s/x", 1, []))),
)
GOLDEN: Final = {one.client_id: one for one in _ALL}
