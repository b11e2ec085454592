# SPDX-License-Identifier: Apache-2.0
"""A gateway that remembers the ids of messages for a tenth of the time, and says when it has forgotten some."""

from __future__ import annotations

import logging

from mqtt_nats.cli import main
from mqtt_nats.gateway import account as tenant
from mqtt_nats.ingress import qos2 as inbound
from mqtt_nats.pubsub.fanout import SEEN_FOR, Fanout

_rotate = Fanout.rotate


def _say(self: Fanout) -> None:
    _rotate(self)
    logging.getLogger("mqtt_nats").info("has forgotten what it has seen before")


if __name__ == "__main__":
    vars(tenant)["SEEN_FOR"] = SEEN_FOR / 10
    vars(inbound)["RELEASED_REMEMBERED_S"] = inbound.RELEASED_REMEMBERED_S / 10
    Fanout.rotate = _say  # type: ignore[method-assign]
    main()
