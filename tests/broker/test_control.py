# SPDX-License-Identifier: Apache-2.0
"""Answers of a gateway that are too large for NATS."""

from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from mqtt_nats.broker.control import Control


@pytest.mark.parametrize(("size", "refused"), [(1000, False), (1001, True)])
def test_an_answer_that_nats_would_end_the_connection_over_is_not_sent(size: int, refused: bool) -> None:
    link = SimpleNamespace(max_payload=1000, out=[], kick=lambda: None)
    control: Any = SimpleNamespace(_broker=SimpleNamespace(link=link, identity="g"))
    Control.tell(control, b"reply", b"x" * size)
    head, body, end = link.out[0].split(b"\r\n")
    assert head == b"PUB reply %d" % len(body)
    assert not end
    if refused:
        found = orjson.loads(body)
        assert (found["id"], found["more"], found["items"]) == ("g", False, [])
        assert "1001 bytes" in found["error"]
    else:
        assert body == b"x" * size
