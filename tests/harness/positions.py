# SPDX-License-Identifier: Apache-2.0
"""Which tests need consumers of sessions: `tests/conftest.py` gives them the mark ``consumers`` by this table.

Gateways of tests have consumers for their sessions, up to a million of them. `make test-records` runs tests of sessions
once more with positions in records, as in a large deployment, without the tests that stand here. These look at the
consumers of a session, or begin gateways without a shared reader.
"""

from __future__ import annotations

from typing import Final

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
        "tests/integration/test_durable.py::test_nothing_is_sent_again_to_a_connected_client",
        "tests/integration/test_ended_lost.py",
        "tests/integration/test_expiry.py::test_expires_while_no_gateway_runs",
        "tests/integration/test_expiry.py::test_never",
        "tests/integration/test_expiry5.py::test_disconnect_changes_the_interval",
        "tests/integration/test_late_resets.py",
        "tests/integration/test_leaving.py::test_a_connection_ends_while_its_gateway_waits_for_an_answer",
        "tests/integration/test_leaving.py::test_what_is_on_its_way_from_a_consumer_as_a_connection_ends_was_not_sent",
        "tests/integration/test_lowering.py::test_what_is_lost_meanwhile",
        "tests/integration/test_new_positions.py::test_a_gateway_dies_before_it_removes_a_consumer",
        "tests/integration/test_operators_hands.py::test_a_paused_consumer_of_a_session",
        "tests/integration/test_operators_hands.py::test_removed_shared_records",
        "tests/integration/test_reader_corners.py::test_a_consumer_that_was_made_again_elsewhere",
        "tests/integration/test_reconciling.py",
        "tests/integration/test_session_positions.py::test_a_session_gets_consumers_and_loses_them_again",
        "tests/integration/test_session_positions.py::test_what_waits_for_an_absent_client_comes",
        "tests/integration/test_session_positions.py::test_window_of_mixed_states",
        "tests/integration/test_shared_reader.py::test_deleted_consumer_and_reader_are_made_again",
        "tests/integration/test_shared_reader.py::test_window_of_mixed_states",
        "tests/integration/test_subscribe.py::test_unsubscribe_leaves_the_overlapping_filter_its_messages",
    )
)
"""Files, tests with all their cases, or single cases."""


def needs_consumers(test: str) -> bool:
    """Whether a test needs consumers of sessions, by its node id."""
    return bool({test, test.partition("[")[0], test.partition("::")[0]} & CONSUMERS)
