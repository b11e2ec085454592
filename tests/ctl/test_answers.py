# SPDX-License-Identifier: Apache-2.0
"""Pages of the answers of gateways to the question of a command."""

from __future__ import annotations

import pytest

from mqtt_nats.ctl.gateway_requests import _Answers


@pytest.mark.parametrize("headers", [b"NATS/1.0 503\r\n\r\n", b""])
async def test_an_empty_message_tells_that_no_gateway_listens(headers: bytes) -> None:
    """Whoever waits looks again at once."""
    answers = _Answers()
    answers.arrived(b"subject", b"", headers, b"")
    assert answers.nobody
    assert answers.change.is_set()
    assert answers.complete == set()


async def test_a_gateway_has_answered_with_its_last_page() -> None:
    answers = _Answers()
    answers.arrived(b"subject", b"", b"", b'{"id":"a","more":true,"items":[1]}')
    assert answers.complete == set()
    answers.arrived(b"subject", b"", b"", b'{"id":"a","more":false,"items":[2]}')
    assert answers.complete == {"a"}
    assert [page["items"] for page in answers.pages["a"]] == [[1], [2]]
    assert not answers.nobody
