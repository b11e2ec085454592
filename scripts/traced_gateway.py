# SPDX-License-Identifier: Apache-2.0
"""`mqtt-nats` with a trace: a line `start` on standard input begins one, `stop SECONDS` ends it after that time.

The answer to each is a line of JSON: the modules that the main thread has entered since, as `package/module`.
"""

from __future__ import annotations

import json
import sys
import threading
from types import FrameType

entered: set[str] = set()


def note(frame: FrameType, event: str, argument: object) -> None:
    """Note the module of a function of the product that is called."""
    if event == "call":
        name = str(frame.f_globals.get("__name__", "")).split(".")
        if name[0] in ("mqtt_nats", "mqtt_streams"):
            entered.add("/".join(name[name[0] == "mqtt_nats" :]))


def obey() -> None:
    """Carry out the orders of standard input."""
    for line in sys.stdin:
        order, _, seconds = line.partition(" ")
        if seconds:
            threading.Event().wait(float(seconds))
        print(json.dumps(sorted(entered)), flush=True)
        if order.strip() == "start":
            entered.clear()


if __name__ == "__main__":
    from mqtt_nats.__main__ import main

    sys.path.pop(0)  # the folder of this file
    sys.argv[0] = "mqtt-nats"
    threading.Thread(target=obey, daemon=True).start()
    sys.setprofile(note)
    main()
