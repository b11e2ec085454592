# SPDX-License-Identifier: Apache-2.0
"""Mutated packets against a running gateway with two pairs of other clients.

``FUZZ_PACKETS`` sets how many (default 4,000), ``FUZZ_SEED`` repeats a run whose seed a failure has shown.
"""

import os
import secrets
from collections.abc import Iterator

import pytest

from tests.fuzz.engine import fuzz
from tests.fuzz.gateway import besiege
from tests.fuzz.targets import TARGETS
from tests.harness.bystanders import Bystanders
from tests.harness.gateway import Gateway

PACKETS = int(os.environ.get("FUZZ_PACKETS", "4000"))


@pytest.fixture
def bystanders(gateway: Gateway) -> Iterator[list[Bystanders]]:
    with Bystanders(gateway.port) as one, Bystanders(gateway.port) as two:
        yield [one, two]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(90 + PACKETS // 50)
def test_mutated_packets(gateway: Gateway, bystanders: list[Bystanders]) -> None:
    seed = os.environ.get("FUZZ_SEED") or secrets.token_hex(8)
    print(f"FUZZ_SEED={seed}")
    besiege(gateway, bystanders, PACKETS, seed, [data for _, data in fuzz(TARGETS["decoder"], seed, 5000).corpus])
