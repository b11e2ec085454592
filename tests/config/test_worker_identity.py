# SPDX-License-Identifier: Apache-2.0
"""The name of a gateway without a configured one, and its place among the workers of a supervisor."""

from __future__ import annotations

import socket

import pytest

from mqtt_nats.config.worker_identity import NAME_LENGTH_MAX, PLACE, WorkerIdentity, default_name, own_place


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("gate-1.example.org", "gate-1.example.org"),
        ("a b*c>d\n", "a-b-c-d-"),
        ("tür", "t-r"),
        ("x" * 100, "x" * NAME_LENGTH_MAX),
        ("", "gateway"),
    ],
)
def test_the_name_is_that_of_the_host(host: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert default_name() == name


@pytest.mark.parametrize(("workers", "name"), [(1, "host"), (3, "host-2")])
def test_workers_have_names_of_their_own(workers: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "host")
    place = WorkerIdentity("group", 2, workers)
    token = PLACE.set(place)
    try:
        assert (default_name(), own_place()) == (name, place)
    finally:
        PLACE.reset(token)


def test_a_gateway_without_a_supervisor_is_a_group_of_its_own() -> None:
    one, other = own_place(), own_place()
    assert one[1:] == other[1:] == (1, 1)
    assert one.group != other.group
