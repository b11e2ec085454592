# SPDX-License-Identifier: Apache-2.0
"""CPU time of single steps of the gateway's own code, for docs/compiled.md: ``python -m benchmarks.steps``.

Alone among the benchmarks this one imports the gateway; with ``PYTHONPATH`` of the compiled copy it measures that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import process_time

from mqtt_nats.codec import Decoder, encode_publish
from mqtt_nats.config.build_info import build
from mqtt_nats.config.settings import Settings
from mqtt_nats.messages.headers import identity, publish_qos
from mqtt_nats.messages.message import Message
from mqtt_nats.protocol.transient_sender import TransientSender
from mqtt_nats.transport.listener import decoder_limits

KEY = b"\0\3a/b"
PAYLOAD = b"x" * 128
HEADERS = b"NATS/1.0\r\nNmqtt-Pub:1\r\nNmqtt-Id:abcdef12345\r\n\r\n"


def _drop(data: bytes) -> None:
    """A client that takes everything."""


def steps() -> dict[str, Callable[[], object]]:
    """Measured steps, by the name of each in the table."""
    decoder = Decoder(decoder_limits(Settings()), 4)
    one = encode_publish(KEY, PAYLOAD, 1, False, False, 5, 4)
    many, run = one * 20, encode_publish(KEY, PAYLOAD, 0, False, False, 0, 4) * 20
    session = TransientSender(100, 100, _drop)
    head = Message(KEY, PAYLOAD, 1, "c").head(1)

    def exchange() -> None:
        session.publish(1, head, PAYLOAD)
        session.acknowledged(4, list(session.inflight))

    return {
        "decode a read of 20 PUBLISH at QoS 1": lambda: decoder.feed(many),
        "decode one PUBLISH at QoS 1": lambda: decoder.feed(one),
        "decode a run of 20 PUBLISH at QoS 0": lambda: decoder.feed(run),
        "decode one acknowledgement": lambda: decoder.feed(b"\x40\2\0\5"),
        "a message and the head of its packet at QoS 1": lambda: Message(KEY, PAYLOAD, 1, "c").head(1),
        "QoS and identity out of the headers of NATS": lambda: (publish_qos(HEADERS), identity(HEADERS)),
        "publish and acknowledge, in a session that ends": exchange,
    }


def measure(step: Callable[[], object], calls: int, rounds: int) -> float:
    """Seconds of CPU for one call, in the best of some rounds."""
    best = float("inf")
    for _ in range(rounds):
        begun = process_time()
        for _ in range(calls):
            step()
        best = min(best, process_time() - begun)
    return best / calls


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=3000, help="calls in a round (3000)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds, of which the best counts (9)")
    given = parser.parse_args()
    print(f"| step ({build()}) | CPU |\n|---|---|")
    for name, step in steps().items():
        print(f"| {name} | {measure(step, given.calls, given.rounds) * 1e6:.2f} µs |")


if __name__ == "__main__":
    main()
