# SPDX-License-Identifier: Apache-2.0
"""The places of sessions that are being claimed: who holds one, and when it is given back."""

from __future__ import annotations

import asyncio

import pytest

from mqtt_nats.sessions.quotas import CLAIMS_WAITING_MOST
from mqtt_streams.hashing import name_hash
from mqtt_streams.quotas import note_subject
from tests.sessions.test_quotas import OTHER, QUOTA, WHO, Bench, record


async def test_a_connect_that_fails_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that claims its session again, as another connection has claimed it meanwhile, counts once."""
    bench = Bench(monkeypatch, max_sessions=2)
    assert await bench.admits(client_id="c")
    assert await bench.admits(client_id="c")
    assert await bench.admits()
    assert not await bench.admits()
    for _ in range(2):  # once is enough
        bench.quotas.give_back("c")
    assert [await bench.admits() for _ in range(2)] == [True, False]


async def test_claims_of_one_session_have_one_place_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one that fails gives it back; when one succeeds, the others have none any more."""
    bench = Bench(monkeypatch, max_sessions=2)
    found = await asyncio.gather(*(bench.admits(client_id="c", claim=claim) for claim in ("one", "two", "three")))
    assert found == [True] * 3
    bench.quotas.give_back("one")
    assert [await bench.admits() for _ in range(2)] == [True, False]
    bench.quotas.give_back("two")
    bench.quotas.store_note(record("c"))
    bench.quotas.give_back("three")
    assert bench.quotas._uses[QUOTA].sessions == 2


async def test_a_claim_has_one_place_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may find that its session has to have another key, or counts for another user."""
    bench = Bench(monkeypatch, max_sessions=2)
    assert await bench.admits(client_id="first key", claim="claim")
    assert await bench.admits(OTHER, client_id="second key", claim="claim")
    assert await bench.admits(client_id="second key", claim="claim")
    assert [await bench.admits() for _ in range(2)] == [True, False]
    assert [await bench.admits(OTHER) for _ in range(3)] == [True, True, False]


async def test_a_claim_that_is_refused_has_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, max_sessions=1)
    assert await bench.admits(client_id="first key", claim="claim")
    assert await bench.admits(OTHER)
    assert not await bench.admits(OTHER, client_id="second key", claim="claim")
    assert await bench.admits()


async def test_a_session_that_was_begun_although_its_client_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts until its claim is known to be stored, and then has a note, once; no connection has it."""
    bench = Bench(monkeypatch, max_sessions=1)
    assert await bench.admits(client_id="c")
    for _ in range(2):
        bench.quotas.settle("c", record("c"))
        bench.quotas.give_back("c")
    ((target, _, payload, _),) = bench.store.fake_put
    assert (target, payload) == (b"HPUB %b " % note_subject(QUOTA, name_hash("c")).encode(), b"0")
    assert not await bench.admits()
    assert bench.quotas._noted == {}


async def test_who_comes_back_to_a_session_that_has_no_note_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not known yet whether the claim that has begun it was stored; its record says so now."""
    bench = Bench(monkeypatch, max_sessions=1)
    assert await bench.admits(client_id="c")
    bench.quotas.note_claim(record("c"))
    bench.quotas.store_note(record("c"))
    assert len(bench.store.fake_put) == 1
    assert not await bench.admits()


async def test_a_claim_leaves_the_consumers_that_a_living_connection_may_create(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, max_durable_consumers=3)
    assert await bench.reserve("c", 2) == 2
    assert await bench.admits(client_id="c")
    bench.quotas.give_back("c")
    assert bench.quotas.consumers == 2
    assert await bench.reserve("other", 3) == 1


async def test_a_session_that_counts_for_nobody_replaces_one_that_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with its connection, and has no consumers."""
    bench = Bench(monkeypatch)
    bench.quotas.note_claim(record("c", 2))
    bench.quotas.store_note(record("c", quota=""))
    assert bench.quotas.consumers == 0


async def test_many_claims_that_wait_for_the_same_notes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may wait for long, as others could not claim their sessions meanwhile."""
    bench = Bench(monkeypatch, max_sessions=None)
    go_on, told = bench.hold(monkeypatch), list[str]()

    async def admit(quota: str, name: str) -> None:
        await bench.quotas.admit(name, name_hash(name), quota, WHO, lambda: told.append(name))

    names = [f"client {number}" for number in range(CLAIMS_WAITING_MOST + 2)]
    claims = [asyncio.create_task(admit(QUOTA, name)) for name in names]
    claims.append(asyncio.create_task(admit(OTHER, "other")))
    await asyncio.sleep(0)
    assert told == names[CLAIMS_WAITING_MOST:]
    go_on.set()
    await asyncio.gather(*claims)
    await admit(QUOTA, "late")
    assert told == names[CLAIMS_WAITING_MOST:]
