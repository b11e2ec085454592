# SPDX-License-Identifier: Apache-2.0
"""A gateway that was stopped goes on as if nothing had been."""

from __future__ import annotations

from mqtt_nats.cli import main
from mqtt_nats.lifecycle import pause_detection as standstill

if __name__ == "__main__":
    standstill._begin = standstill._read_clock
    main()
