# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.rolling.keyed serve ...``: the next gateway, which has one key more in its session records."""

from __future__ import annotations

from mqtt_streams import sessions

KEY = "mood"

if __name__ == "__main__":
    encode = sessions.encode_v5
    sessions.encode_v5 = lambda v5: encode(v5) | {KEY: {"since": 1}}

    from mqtt_nats.cli import main

    main()
