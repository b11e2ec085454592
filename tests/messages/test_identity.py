# SPDX-License-Identifier: Apache-2.0
"""Identity of a gateway: its names are unique, also among gateways of one id."""

from __future__ import annotations

from mqtt_nats.messages.identity import Identity
from mqtt_streams.fields import is_token


def test_names_of_consumers_are_unique_tokens() -> None:
    gateways = Identity("gateway0"), Identity("gateway0")
    names = [one.new_nuid() for _ in range(100) for one in gateways]
    assert len(set(names)) == 200
    assert {len(name) for name in names} == {22}
    assert all(map(is_token, names))
