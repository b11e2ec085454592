# SPDX-License-Identifier: Apache-2.0
"""Counters of a gateway, for ``/metrics``, ``$SYS`` topics and ``mqtt-nats ctl``.

The message path only adds to integers, once for a run of packets or a fan-out; other values are computed on request.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Any, Final

from mqtt_nats.hooks.session_notices import DISCONNECTS

LATENCIES: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histogram of acknowledgement times, in seconds."""

LAGS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds of the histogram of the event loop's delay, in seconds."""

FILTER_LIMITS: Final = (
    *("max_subscriptions", "max_subscriptions_per_gateway", "filter_levels", "max_payload"),
    *("consumers", "overlapping_filters", "jetstream"),
)
"""Limits that refuse filters: settings, session record size (`max_payload` of nats-server), quotas, JetStream."""


class Histogram:
    """Histogram of observations, in the form of Prometheus."""

    __slots__ = ("bounds", "counts", "last", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Number of observations in each bucket; the last bucket has no upper bound."""
        self.sum = 0.0
        self.last = 0.0

    def observe(self, value: float) -> None:
        """Count an observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        self.last = value

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def state(self) -> dict[str, Any]:
        """Return the histogram as JSON values."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum, "last": self.last}


class Counters:
    """Totals since the start of the gateway. Lists have one entry for each QoS; bytes are bytes of payloads."""

    def __init__(self, sent: list[int], sent_bytes: list[int]) -> None:
        """Use the lists in which the fan-out counts."""
        self.since = time.time()
        """Start of the gateway, Unix time in seconds."""
        self.received = [0, 0, 0]
        """Allowed PUBLISH packets from clients; a repeated QoS 2 publish counts once."""
        self.received_bytes = [0, 0, 0]
        self.sent = sent
        """PUBLISH packets for clients, by the QoS of the delivery; packets that are dropped later are included."""
        self.sent_bytes = sent_bytes
        self.connects = 0
        """Connections accepted by CONNACK."""
        self.refused: dict[str, int] = {}
        """Refused connections, by the name of the reason code."""
        self.limited: dict[str, int] = {}
        """Sessions and SUBSCRIBE packets of which a limit has refused a part or all, by the setting."""
        self.filters_refused: dict[str, int] = dict.fromkeys(FILTER_LIMITS, 0)
        """Filters of SUBSCRIBE packets that a limit has refused, by the limit."""
        self.disconnects = dict.fromkeys(DISCONNECTS, 0)
        """Ends of accepted connections, by cause."""
        self.dropped: dict[str, int] = {}
        """Messages that a client did not get, by reason; :meth:`drops` returns all reasons."""
        self.passed_over = 0
        """Messages that were not sent to a session because too many waited."""
        self.not_retained = 0
        """Messages that were not retained because of a limit."""
        self.reconnects = 0
        """Number of reconnects to NATS."""
        self.stored = Histogram(LATENCIES)
        """Seconds from a store to its acknowledgement by JetStream; one store at a time is measured."""
        self.lag = Histogram(LAGS)
        """Seconds by which the event loop was late, measured twice a second."""

    def connect(self) -> None:
        """Count a connection accepted by CONNACK."""
        self.connects += 1

    def reconnect(self) -> None:
        """Count a reconnect to NATS."""
        self.reconnects += 1

    def receive(self, qos: int, size: int) -> None:
        """Count a client's message that does not take the usual path, which counts itself."""
        self.received[qos] += 1
        self.received_bytes[qos] += size

    def send(self, qos: int, size: int) -> None:
        """Count a message for one client that no fan-out has counted."""
        self.sent[qos] += 1
        self.sent_bytes[qos] += size

    def drop(self, reason: str, count: int = 1) -> None:
        """Count messages that a client does not get."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def refuse(self, reason: str) -> None:
        """Count a refused CONNECT."""
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def limit(self, setting: str) -> None:
        """Count a refusal by a limit."""
        self.limited[setting] = self.limited.get(setting, 0) + 1

    def refuse_filters(self, limit: str, count: int) -> None:
        """Count refused filters of a SUBSCRIBE packet; ``limit`` is one of `FILTER_LIMITS`."""
        self.filters_refused[limit] += count

    def leave(self, cause: str) -> None:
        """Count the end of an accepted connection; ``cause`` is one of `DISCONNECTS`."""
        self.disconnects[cause] += 1

    def pass_over(self, count: int = 1) -> None:
        """Count messages that are not sent to a session because too many wait."""
        self.passed_over += count

    def not_retain(self) -> None:
        """Count a message that is not retained because of a limit."""
        self.not_retained += 1

    def drops(self, slow: int) -> dict[str, int]:
        """Return the numbers of messages that a client did not get, by reason; ``slow``: those of `FlushRound`."""
        return {
            "denied": 0,
            "expired": 0,
            "hook": 0,
            "not permitted": 0,
            "too large": 0,
            "session ended": 0,
            "copy": 0,
            "gap": 0,
            **self.dropped,
            "slow client": slow,
            "backlog": self.passed_over,
            "not retained": self.not_retained,
        }
