# SPDX-License-Identifier: Apache-2.0
"""An authenticator of one tenant lets nobody into another one."""

from __future__ import annotations

import pytest

from mqtt_nats.access.authenticator import IGNORE, Allow, Credentials, Denied, Ignore
from mqtt_nats.authenticators.tenancy import bound
from tests.access.test_chain import credentials


class Answering:
    """Gives one verdict on everybody."""

    name = "answering"

    def __init__(self, verdict: Allow | Ignore | Denied) -> None:
        self._verdict = verdict

    async def check(self, credentials: Credentials) -> Allow | Ignore | Denied:
        return self._verdict


CREDENTIALS = credentials("user", b"secret")


@pytest.mark.parametrize("named", [None, "north"])
async def test_its_users_are_of_its_tenant(named: str | None) -> None:
    verdict = await bound(Answering(Allow("user", tenant=named)), "north").check(CREDENTIALS)
    assert isinstance(verdict, Allow)
    assert verdict.tenant == "north"


async def test_a_user_of_another_tenant_is_denied() -> None:
    verdict = await bound(Answering(Allow("user", tenant="south")), "north").check(CREDENTIALS)
    assert verdict == Denied("the user is of tenant 'south', not of 'north'")


async def test_other_verdicts_stay() -> None:
    for verdict in (IGNORE, Denied("wrong password")):
        assert await bound(Answering(verdict), "north").check(CREDENTIALS) is verdict


def test_without_a_tenant_it_is_the_authenticator_itself() -> None:
    one = Answering(IGNORE)
    assert bound(one, None) is one
