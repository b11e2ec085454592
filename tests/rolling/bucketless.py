# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.rolling.bucketless serve ...``: a gateway of before the subjects of claims named the bucket."""

from __future__ import annotations

from mqtt_streams import gateway_subjects, sessions
from mqtt_streams.gateways import CLAIM_BUCKETS

if __name__ == "__main__":

    def _claim_subject(key: str, gateway: str, nonce: str) -> str:
        return f"$MQTT.JSA.{gateway}.SP.{key}.{nonce}"

    sessions.claim_subject = _claim_subject
    gateway_subjects.NAMES_BUCKETS = b"Mqtt-Older:1"  # type: ignore[misc]

    from mqtt_nats.cli import main
    from mqtt_nats.lifecycle.lease import Lease
    from mqtt_nats.sessions.takeover import Claims

    begin = Lease.begin

    async def _begin(self: Lease) -> None:
        del self.info[CLAIM_BUCKETS]
        await begin(self)

    Lease.begin = _begin  # type: ignore[method-assign]
    Claims.hear_concerned = lambda self: None  # type: ignore[method-assign]
    main()
