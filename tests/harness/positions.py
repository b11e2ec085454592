# SPDX-License-Identifier: Apache-2.0
"""Where the gateways of a test keep the positions of sessions: in consumers, or in records.

Each test runs with both: a file of `FOLDERS` with consumers or with records in CI, as the checksum of its name says,
and with records in `make test-records`. The chaos kit has experiments with each. Gateways of other tests have consumers
for their sessions, up to a million of them.

Some tests need consumers: `tests/conftest.py` gives them the mark ``consumers`` by the table. They look at consumers of
sessions.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Final
from zlib import crc32

FOLDERS: Final = ("crash", "delivery", "integration", "lifecycle", "pubsub", "sessions", "v5")
"""Below ``tests/``: those of which half of the files have sessions without consumers."""

CONSUMERS: Final[frozenset[str]] = frozenset(
    (
        "tests/crash/test_forgotten.py::test_a_client_that_is_back_at_once_may_be_asked_again",
        "tests/delivery/test_draining.py::test_a_subscription_that_has_brought_nothing",
        "tests/integration/test_auto_positions.py",
        "tests/integration/test_connect.py::test_clean_start_ends_the_stored_session",
        "tests/integration/test_consumer_descriptions.py",
        "tests/integration/test_deleted_streams.py::test_a_consumer_of_a_connected_client",
        "tests/integration/test_deleted_streams.py::test_a_consumer_of_an_absent_client",
        "tests/integration/test_deleted_streams.py::test_a_stream[$MQTT_out]",
        "tests/integration/test_expiry.py::test_expires_while_no_gateway_runs",
        "tests/integration/test_expiry.py::test_never",
        "tests/integration/test_expiry5.py::test_disconnect_changes_the_interval",
        "tests/integration/test_late_resets.py",
        "tests/integration/test_leaving.py::test_a_connection_ends_while_its_gateway_waits_for_an_answer",
        "tests/integration/test_new_positions.py::test_a_gateway_dies_before_it_removes_a_consumer",
        "tests/integration/test_operators_hands.py::test_a_paused_consumer_of_a_session",
        "tests/integration/test_operators_hands.py::test_removed_shared_records",
        "tests/integration/test_reader_corners.py::test_a_consumer_that_was_made_again_elsewhere",
        "tests/integration/test_session_positions.py::test_a_session_gets_consumers_and_loses_them_again",
        "tests/integration/test_session_positions.py::test_what_waits_for_an_absent_client_comes",
        "tests/integration/test_session_positions.py::test_window_of_mixed_states",
        "tests/integration/test_shared_reader.py::test_deleted_consumer_and_reader_are_made_again",
    )
)
"""Files, tests with all their cases, or single cases."""


def needs_consumers(test: str) -> bool:
    """Whether a test needs consumers of sessions, by its node id."""
    return bool({test, test.partition("[")[0], test.partition("::")[0]} & CONSUMERS)


def has_records(test: str) -> bool:
    """Whether the sessions of a test have positions in records, by its node id: all tests of a file, or none."""
    file = test.partition("::")[0]
    folder = file.split("/")[1:2]
    return (
        bool(folder and folder[0] in FOLDERS)
        and not any(entry.partition("::")[0] == file for entry in CONSUMERS)
        and bool(crc32(file.encode()) & 1)
    )


def settings(arguments: Sequence[str], environment: Collection[str]) -> dict[str, str]:
    """Return the environment variables for a gateway of the present test, unless what it is given decides."""
    given = {one.partition("=")[0].removeprefix("--").replace("-", "_") for one in arguments}
    given |= {one.removeprefix("MQTT_NATS_").lower() for one in environment}
    if "session_positions" in given:
        return {}
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    return {"MQTT_NATS_SESSION_POSITIONS": "records"} if has_records(test) else {}
