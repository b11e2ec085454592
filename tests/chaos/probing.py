# SPDX-License-Identifier: Apache-2.0
"""A client that publishes to itself: ``python -m tests.chaos.probing PORT``.

A line for each message: when it was published (``time.monotonic()``), seconds until it came, seconds until its PUBACK.
"""

import itertools
import sys
import time

from tests.harness import raw
from tests.harness.raw import Raw

TOPIC = "probe/self"
PAUSE = 0.02
PATIENCE = 60.0


def main() -> None:
    """Go on until the process is ended, or something does not come."""
    with Raw.connected(int(sys.argv[1]), "probe", keepalive=0, patience=PATIENCE) as client:
        client.subscribe((TOPIC, 0))
        for number in itertools.count():
            identifier = number % 65_535 + 1
            begun = time.monotonic()
            client.send(raw.publish(TOPIC, b"%d " % number, qos=1, id=identifier))
            arrived = acked = 0.0
            while not (arrived and acked):
                one = client.receive(PATIENCE)
                if one is None:
                    sys.exit("the gateway has closed the connection")
                if one.kind == raw.PUBLISH:
                    assert one.payload == b"%d " % number, one
                    arrived = time.monotonic() - begun
                else:
                    assert (one.kind, one.id) == (raw.PUBACK, identifier), one
                    acked = time.monotonic() - begun
            print(f"{begun:.6f} {arrived:.6f} {acked:.6f}", flush=True)
            time.sleep(PAUSE)


if __name__ == "__main__":
    main()
