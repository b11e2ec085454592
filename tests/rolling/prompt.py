# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.rolling.prompt serve ...``: a gateway that soon hears only the claims that concern it."""

from __future__ import annotations

from mqtt_nats.sessions import listener_clients

if __name__ == "__main__":
    listener_clients.CHECK_IDLE_S, listener_clients.QUIET_BEFORE_USE_S = 0.2, 1.0  # type: ignore[misc]

    from mqtt_nats.cli import main

    main()
