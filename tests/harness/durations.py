# SPDX-License-Identifier: Apache-2.0
"""Which tests `make test` leaves to `make test-long`: `tests/conftest.py` gives them the mark ``long`` by this table.

Files and folders stand here that need much time for what they prove; of these, tests that start processes are long.
Some of each kind stay in `make test`: those of `SHORT`, and the files that do not stand here. Of those files, a single
test that takes two seconds or more has the mark in its source. Of tests with many cases, some cases stay: `SAMPLED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final
from zlib import crc32

LONG: Final[Mapping[str, int]] = {
    # Faults: experiments, a gateway that dies at each point, broken gateways that are to be noticed.
    "tests/chaos": 60,
    "tests/chaos/points/test_points.py": 157,
    "tests/chaos/test_experiments.py": 550,
    # Killed gateways and nats-servers, clusters without a majority.
    "tests/crash": 50,
    "tests/crash/test_dead_gateway.py": 96,
    "tests/crash/test_group_redelivery.py": 108,
    "tests/crash/test_leader.py": 170,
    "tests/crash/test_majority.py": 175,
    "tests/crash/test_operators_view.py": 103,
    "tests/crash/test_removed_records.py": 103,
    "tests/crash/test_undecided_assignments.py": 184,
    "tests/clocks": 60,
    "tests/federation": 94,
    "tests/rolling": 40,
    # nats-server stands still, has no room, or loses what it was to store.
    "tests/badinput/test_full_store.py": 40,
    "tests/badinput/test_outage.py": 40,
    "tests/badinput/test_partial_outage.py": 40,
    "tests/badinput/test_slow_clients.py": 60,
    "tests/badinput/test_stalled_clients.py": 57,
    "tests/badinput/test_storage_limit.py": 40,
    "tests/integration/test_auto_positions.py": 62,
    "tests/integration/test_backup_command.py": 120,
    "tests/integration/test_catching_up.py": 60,
    "tests/integration/test_changed_qos.py": 50,
    "tests/integration/test_ctl_cluster.py": 40,
    "tests/integration/test_dormant_consumers.py": 80,
    "tests/integration/test_growing_cluster.py": 40,
    "tests/integration/test_kept_by_members.py": 40,
    "tests/integration/test_kept_messages.py": 60,
    "tests/integration/test_late_stores.py": 180,
    "tests/integration/test_lowering_empty.py": 40,
    "tests/integration/test_mixed_positions.py": 40,
    "tests/integration/test_packet_order.py": 70,
    "tests/integration/test_refused_claims.py": 60,
    "tests/integration/test_repeated_stores.py": 78,
    "tests/integration/test_replaced_stream.py": 50,
    "tests/integration/test_retained_order.py": 60,
    "tests/integration/test_standing_server.py": 111,
    "tests/integration/test_suback_cluster.py": 40,
    "tests/integration/test_two_groups.py": 50,
    "tests/integration/test_world.py": 40,
    "tests/lifecycle/test_busy.py": 40,
    "tests/attacks/test_canaries.py": 60,
    "tests/attacks/test_floods.py": 60,
    "tests/attacks/test_waiting_messages.py": 40,
    # Processes of every kind: browsers, packages, programs of others, workers.
    "tests/ctl/test_backup_snapshots.py": 60,
    "tests/gateway/test_supervisor.py": 60,
    "tests/config/test_process_limits.py": 60,
    "tests/admin/test_connections.py": 60,
    "tests/admin/test_page.py": 40,
    "tests/admin/test_page_views.py": 152,
    "tests/benchmarks": 40,
    "tests/clients": 60,
    "tests/interop": 40,
    "tests/test_build.py": 40,
    "tests/test_packaging.py": 40,
    "tests/test_tour.py": 104,
    "tests/test_wheels.py": 40,
    # A Spark session, or one for each command.
    "tests/spark": 60,
    "tests/spark/test_cli_spark.py": 79,
    "tests/spark/test_jobs_archive.py": 99,
}
"""Seconds of a file, or of the longest file of a folder, in one of four processes. What takes longest is run first."""

SHORT: Final[frozenset[str]] = frozenset(
    (
        "tests/badinput/test_stalled_clients.py::test_it_gets_everything_when_it_reads",
        "tests/benchmarks/test_generator_command.py",
        "tests/chaos/mutants/test_mutants.py::test_a_second_owner_is_noticed",
        "tests/chaos/mutants/test_mutants.py::test_one_owner_is_not_suspected",
        "tests/chaos/points/test_points.py::test_the_gateway_dies_there[publish at QoS 1: kill before up {bare} #2]",
        "tests/chaos/points/test_points.py::test_the_gateway_is_held_up_there[publish at QoS 1: hold up {bare} #2]",
        "tests/clocks/test_clocks.py::test_message_expiry",
        "tests/clocks/test_steps.py::test_a_clock_of_a_process_is_set",
        "tests/config/test_process_limits.py::test_fewer_open_files_than_connections",
        "tests/crash/test_dead_gateway.py::test_sessions_of_a_killed_gateway",
        "tests/crash/test_forgotten.py",
        "tests/crash/test_late_hold.py",
        "tests/crash/test_outage_lines.py",
        "tests/crash/test_release_order.py",
        "tests/crash/test_shared.py::test_nats_server_is_killed_at_qos_2",
        "tests/crash/test_standstill.py::test_a_session_that_has_moved",
        "tests/ctl/test_backup_snapshots.py::test_records_that_are_removed_meanwhile",
        "tests/gateway/test_supervisor.py::test_embedded",
        "tests/gateway/test_supervisor.py::test_stopping",
        "tests/integration/test_auto_positions.py::test_below_the_bound_it_costs_nothing",
        "tests/integration/test_auto_positions.py::test_between_the_bounds_nobody_moves",
        "tests/integration/test_auto_positions.py::test_everything_is_killed",
        "tests/integration/test_auto_positions.py::test_new_sessions_beyond_the_bound",
        "tests/integration/test_catching_up.py::test_a_session_goes_on_elsewhere_in_the_middle",
        "tests/integration/test_catching_up.py::test_the_last_subscription_ends",
        "tests/integration/test_changed_qos.py::test_each_message_comes_once[5-2-another filter-elsewhere]",
        "tests/integration/test_dormant_consumers.py::test_during_a_resume[delete-answer-4-2]",
        "tests/integration/test_dormant_consumers.py::test_while_the_client_is_away[edit-5-2]",
        "tests/integration/test_dormant_consumers.py::test_while_the_client_is_connected[replace_by_pull-4-1]",
        "tests/integration/test_late_stores.py::test_a_later_retained_message_stays[durable-set-0]",
        "tests/integration/test_lowering_empty.py::test_lowered_and_absent",
        "tests/integration/test_packet_order.py::test_a_publish_behind_a_subscribe[0-5.0 durable-1-wild]",
        "tests/integration/test_packet_order.py::test_a_publish_behind_an_unsubscribe[0-3.1.1-2]",
        "tests/integration/test_packet_order.py::test_two_subscribes_and_a_publish",
        "tests/integration/test_repeated_stores.py::test_the_stream_recognises_what_it_has",
        "tests/integration/test_replaced_stream.py::test_an_owed_pubrel_of_another_message",
        "tests/integration/test_replaced_stream.py::test_connected_clients",
        "tests/integration/test_replaced_stream.py::test_what_a_limit_has_pushed_out",
        "tests/integration/test_retained_order.py::test_a_new_subscriber[two gateways-2-0-durable-5.0]",
        "tests/integration/test_retained_order.py::test_a_present_subscriber_subscribes_again",
        "tests/integration/test_two_groups.py::test_each_group_gets_each_message",
        "tests/integration/test_two_groups.py::test_filters_of_groups_that_overlap",
        "tests/integration/test_two_groups.py::test_what_one_group_is_done_with_is_still_the_other_ones",
        "tests/lifecycle/test_busy.py::test_a_look_at_others_that_hangs",
        "tests/spark/test_connection.py",
        "tests/spark/test_jetstream.py",
        "tests/spark/test_ranges.py",
        "tests/spark/test_read.py",
        "tests/spark/test_sink.py",
    )
)
"""What of these `make test` runs all the same: files, tests with all their cases, or single cases."""


SAMPLED: Final[frozenset[str]] = frozenset(
    (
        "tests/attacks/test_forged_records.py",
        "tests/attacks/test_presence.py",
        "tests/attacks/test_refusals.py",
        "tests/badinput/test_bridge.py",
        "tests/badinput/test_payload.py",
        "tests/benchmarks/test_generator_command.py",
        "tests/clocks/test_clocks.py",
        "tests/hooks/test_messages.py",
        "tests/integration/libraries/test_messages.py",
        "tests/integration/test_acl_deliver.py",
        "tests/integration/test_durable.py",
        "tests/integration/test_ended_groups.py",
        "tests/integration/test_ended_lost.py",
        "tests/integration/test_lowering.py",
        "tests/integration/test_operators_hands.py",
        "tests/integration/test_repeated_stores.py",
        "tests/integration/test_resumed_groups.py",
        "tests/integration/test_retained.py",
        "tests/integration/test_session_positions.py",
        "tests/integration/test_shared.py",
        "tests/integration/test_subscribe.py",
        "tests/integration/test_two_groups.py",
        "tests/integration/test_wills.py",
        "tests/integration/test_wills5.py",
        "tests/plugins/test_delayed.py",
    )
)
"""Files with tests of many cases: of each test that stays short, one case in `ONE_IN` does, and the first."""

ONE_IN: Final = 4


@cache
def seconds(path: str) -> int:
    """What `LONG` says of a file, by itself or by its innermost folder; 0: it is not long. Paths begin with tests/."""
    parents = PurePosixPath(path).parents
    return next((LONG[str(one)] for one in (path, *parents) if str(one) in LONG), 0)


def is_long(test: str, *, first: bool = True) -> bool:
    """Whether a test is long.

    Args:
        test: its node id.
        first: it is the first case of a test that has several.
    """
    path = test.partition("::")[0]
    if test in SHORT:
        return False
    if seconds(path) > 0 and not {test.partition("[")[0], path} & SHORT:
        return True
    # By a checksum: every n-th case would have the same parameters again and again.
    return path in SAMPLED and not first and crc32(test.encode()) % ONE_IN > 0


def has_long_tests(file: Path, name: str) -> bool:
    """Whether `make test-long` has to load a file of tests; its ``name`` begins with tests/."""
    return name in SAMPLED or seconds(name) > 0 or b"mark.long\n" in file.read_bytes()
