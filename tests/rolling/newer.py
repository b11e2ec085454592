# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.rolling.newer serve ...``: a gateway whose session records have the next version."""

from __future__ import annotations

from mqtt_streams import sessions

VERSION = sessions.V5_VERSION + 1

if __name__ == "__main__":
    encode = sessions.encode_v5
    sessions.V5_VERSION = VERSION  # type: ignore[misc]
    sessions.encode_v5 = lambda v5: encode(v5) | {"version": VERSION}

    from mqtt_nats.cli import main

    main()
