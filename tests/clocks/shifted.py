# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.clocks.shifted serve ...``: a gateway whose clock is ``CLOCK_SHIFT`` seconds ahead."""

from __future__ import annotations

import os
import time

if __name__ == "__main__":
    shift = float(os.environ["CLOCK_SHIFT"])
    real, real_ns = time.time, time.time_ns
    time.time = lambda: real() + shift
    time.time_ns = lambda: real_ns() + int(shift * 1e9)

    from mqtt_nats.cli import main

    main()
