# SPDX-License-Identifier: Apache-2.0
"""Packet identifiers count from 1 in every process, and do not depend on what is stored."""

from __future__ import annotations

from mqtt_nats.cli import main
from mqtt_nats.protocol import durable_sender as durable


class _Restarted(int):
    """``sequence % space`` is how many sequences were seen before this one."""

    seen: dict[int, int] = {}  # noqa: RUF012

    def __rmod__(self, sequence: int) -> int:
        return self.seen.setdefault(sequence, len(self.seen)) % int(self)


if __name__ == "__main__":
    durable.ID_SPACE = _Restarted(durable.ID_SPACE)  # type: ignore[misc]
    main()
