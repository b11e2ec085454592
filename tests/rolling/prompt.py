# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.rolling.prompt serve ...``: a gateway that soon hears only the claims that concern it."""

from __future__ import annotations

from mqtt_nats.shared_reader import eligibility

if __name__ == "__main__":
    eligibility.CHECK_IDLE_S, eligibility.QUIET_BEFORE_USE_S = 0.2, 1.0  # type: ignore[misc]

    from mqtt_nats.cli import main

    main()
