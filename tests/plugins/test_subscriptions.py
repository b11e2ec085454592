# SPDX-License-Identifier: Apache-2.0
"""Automatic subscriptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mqtt_nats.plugins.subscriptions import SubscriptionOptions
from tests.harness.rawclient import RawClient
from tests.harness.rawclient5 import RawClient5
from tests.harness.waiting import aeventually
from tests.plugins.conftest import Start

pytestmark = pytest.mark.anyio

WANTED: list[dict[str, Any]] = [
    {"filter": "news/#", "qos": 1},
    {"filter": "inbox/%c", "qos": 2, "retain_handling": 1},
    {"filter": "users/%u"},
    {"filter": "secret/#"},
]


async def test_every_client_gets_what_it_may_have(start: Start, tmp_path: Path) -> None:
    """Of both versions, and the same session once; names that would mean more get nothing."""
    acl = tmp_path / "acl.toml"
    acl.write_text('[[rules]]\neffect = "deny"\ntopics = "secret/#"\n[[rules]]\neffect = "allow"\ntopics = "#"\n')
    inside = start({"subscriptions": {"subscriptions": WANTED}}, acl_file=acl)

    def filters(client_id: str) -> set[str]:
        one = inside.account.registry.clients[client_id]
        return {found.text for found in one.filters}

    def nothing_owed() -> bool:
        side = inside.account.registry.clients["two"].durable_side
        if side is None or side.position_writer is None:
            return False
        return not side.machine.releases and not side.position_writer.ledger.released

    async def have(client_id: str, *wanted: str) -> None:
        await aeventually(lambda: inside.call(lambda: filters(client_id)) == set(wanted), 30.0)

    async with (
        await RawClient.connect(inside.port, "one") as one,
        await RawClient5.connect5(inside.port, "two", session_expiry_interval=100) as two,
        await RawClient.connect(inside.port, "+") as smuggler,
        await RawClient.connect(inside.port, "a/#") as other,
    ):
        await have("one", "news/#", "inbox/one")
        await have("two", "news/#", "inbox/two")
        await have("+", "news/#")
        await have("a/#", "news/#")
        await one.deliver("inbox/two", b"hello", 2, retain=True)
        await one.quiet()
        await two.receive("inbox/two", b"hello", qos=2)
        await two.deliver("news/x", b"n", 1)
        for each in (one, smuggler, other):
            await each.receive("news/x", b"n", qos=1)
        await two.receive("news/x", b"n", qos=1)
        await aeventually(lambda: inside.call(nothing_owed))  # else PUBREL is sent once more
        await two.disconnect5()
        async with await RawClient5.connect5(inside.port, "two", clean=False, session_expiry_interval=100) as two:
            assert two.session_present
            await have("two", "news/#", "inbox/two")
            await one.deliver("inbox/two", b"again", 1)
            await two.receive("inbox/two", b"again", qos=1)  # and nothing of what is retained: it is not new
            await two.unsubscribe("news/#")
            await one.deliver("inbox/two", b"", 1, retain=True)
            await two.receive("inbox/two", b"")
            await two.quiet()
            await two.disconnect5(session_expiry_interval=0)


@pytest.mark.parametrize(
    ("one", "wrong"),
    [
        ({"filter": "a/#/b"}, "filter: # is not"),
        ({"filter": ""}, "filter: topic filter is empty"),
        ({"filter": "$share/g/a"}, "filter: a shared subscription"),
        ({"filter": "a", "qos": 3}, "qos"),
        ({"filter": "a", "retain_handling": 3}, "retain_handling"),
        ({"filters": "a"}, "filter"),
    ],
)
def test_subscriptions_that_are_refused(one: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong):
        SubscriptionOptions.model_validate({"subscriptions": [one]})
