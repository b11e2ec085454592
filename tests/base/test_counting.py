# SPDX-License-Identifier: Apache-2.0
"""Buckets, networks, bans and flapping clients, without sockets or clocks."""

from __future__ import annotations

from ipaddress import ip_network
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqtt_nats.base.admission import (
    ADMITTED,
    CONNACK_REFUSAL,
    Admission,
    ConnectionLimit,
    ListenerAdmission,
    Verdict,
)
from mqtt_nats.base.bans import Ban, Bans, ban, pair
from mqtt_nats.base.bucket import Bucket, Buckets, depth
from mqtt_nats.base.flapping import SLOWEST, Flapping
from mqtt_nats.base.networks import Networks, admitted, household, parse_host, parse_rules
from mqtt_nats.config.settings import Settings
from mqtt_nats.transport.listener_settings import ListenerSettings


def test_a_bucket_lets_a_burst_through_and_then_the_rate() -> None:
    bucket = Bucket(2.0, 10.0, 100.0)
    assert [bucket.add_if_room(100.0) for _ in range(11)] == [True] * 10 + [False]
    assert not bucket.add_if_room(100.4)
    assert bucket.add_if_room(100.5)
    assert not bucket.add_if_room(100.6)
    assert bucket.level(200.0) == 0
    assert bucket.pour(15, 200.0) == 2.5
    assert bucket.pour(1, 202.5) == 0.5
    assert bucket.pour(0, 210.0) == 0


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 40)), max_size=60), st.floats(0.1, 50), st.floats(0.1, 10))
def test_who_waits_as_told_sends_no_more_than_the_rate(
    steps: list[tuple[float, int]], rate: float, burst: float
) -> None:
    """Whatever is sent when, the sum never exceeds the burst, the rate and the last portion."""
    bucket = Bucket(rate, depth(rate, burst), 0.0)
    now = total = last = 0.0
    for pause, amount in steps:
        now += pause
        assert total <= bucket.depth + rate * now + last + 1e-6
        wait = bucket.pour(amount, now)
        total, last = total + amount, max(last, amount)
        now += wait


def test_buckets_of_many_keys_are_bounded() -> None:
    buckets = Buckets(1.0, 1.0, most=3)
    assert buckets.of("a", 0).add_if_room(0)
    for key in "bcabd":
        buckets.of(key, 0)
    assert len(buckets) == 3
    assert not buckets.of("a", 0).add_if_room(0)  # used lately, so kept
    buckets.forget("a")
    assert buckets.of("a", 0).add_if_room(0)


@pytest.mark.parametrize(
    ("rules", "host", "let_in"),
    [
        ((), "192.0.2.1", True),
        ((), "", True),
        (("deny 10.0.0.0/8", "allow all"), "10.1.2.3", False),
        (("deny 10.0.0.0/8", "allow all"), "::ffff:10.1.2.3", False),
        (("deny 10.0.0.0/8", "allow all"), "11.1.2.3", True),
        (("allow 10.1.2.3", "deny 10.0.0.0/8", "allow all"), "10.1.2.3", True),
        (("allow 2001:db8::/32", "deny all"), "2001:db8::1", True),
        (("allow 2001:db8::/32", "deny all"), "2001:db9::1", False),
        (("allow 2001:db8::/32", "deny all"), "10.0.0.1", False),
        (("allow fe80::/10", "deny all"), "fe80::1%eth0", True),
        (("deny all",), "127.0.0.1", False),
        (("allow all",), "no address", False),
    ],
)
def test_rules(rules: tuple[str, ...], host: str, let_in: bool) -> None:
    assert admitted(parse_rules(rules), host) is let_in


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        (("deny 10.0.0.0/8",), "the last entry must be"),
        (("deny 10.0.0.1/8", "allow all"), "not the network"),
        (("deny ten", "allow all"), "not a network such as"),
        (("refuse all",), "expected `allow NETWORK` or `deny NETWORK`"),
        (("allow",), "expected `allow NETWORK`"),
    ],
)
def test_rules_that_cannot_be_read(rules: tuple[str, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_rules(rules)


def test_what_counts_as_one_address() -> None:
    assert household("192.0.2.7") == household("::ffff:192.0.2.7") == "192.0.2.7"
    assert household("2001:db8:1:2:3:4:5:6") == household("2001:db8:1:2::1") == "2001:db8:1:2::"
    assert household("2001:db8:1:3::1") != household("2001:db8:1:2::1")
    assert parse_host("") is None


@given(st.lists(st.tuples(st.ip_addresses(v=4), st.integers(0, 32)), max_size=20), st.ip_addresses(v=4))
def test_networks_are_found_as_one_by_one(pairs: list[tuple[object, int]], address: object) -> None:
    found: Networks[str] = Networks()
    networks = {ip_network(f"{one}/{bits}", strict=False) for one, bits in pairs}
    for network in networks:
        found.put(network, str(network))
    expected = {str(network) for network in networks if parse_host(str(address)) in network}
    assert set(found.covering(str(address))) == expected
    for network in networks:
        found.remove(network)
    assert found.covering(str(address)) == []


def test_bans() -> None:
    bans = Bans()
    bans.put(ban("client", "thermostat", 50.0))
    bans.put(ban("user", "mallory", 0.0))
    bans.put(ban("address", "192.0.2.0/24", 100.0))
    bans.put(ban("address", "2001:db8::1", 100.0))
    assert bans.find(10.0, client="thermostat") == Ban("client", "thermostat", 50.0)
    assert bans.find(50.0, client="thermostat") is None
    assert bans.find(1e12, user="mallory") is not None
    assert bans.find(10.0, user="thermostat", client="mallory") is None
    assert bans.find(10.0, client="x", user=None, host="192.0.2.9") is not None
    assert bans.find(10.0, host="::ffff:192.0.2.9") is not None
    assert bans.find(10.0, host="192.0.3.9") is None
    assert bans.find(10.0, host="2001:db8::1") is not None
    assert bans.find(10.0, host="2001:db8::2") is None
    bans.put(ban(*pair("a/b", "u/v", "2001:db8::1"), 100.0))
    bans.put(ban(*pair("lamp", None, "2001:db8:1::1"), 100.0))
    assert bans.find(10.0, client="a/b", user="u/v", proved=True) == Ban("user-client", "u%2Fv/a/b", 100.0)
    assert bans.find(10.0, client="a/b", user="u", proved=True) is None
    assert bans.find(10.0, client="lamp", host="2001:db8:1::2", proved=True) is not None
    assert bans.find(10.0, client="lamp", host="2001:db8:1::2") is None
    assert bans.find(10.0, client="lamp", user="u", host="2001:db8:1::2", proved=True) is None
    bans.remove("address", "192.0.2.0/24")
    bans.remove("address", "203.0.113.0/24")
    assert bans.find(10.0, host="192.0.2.9") is None
    bans.expire(1000.0)
    assert [str(one) for one in bans] == ["user 'mallory'"]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("client", ""),
        ("planet", "x"),
        ("address", "x"),
        ("address", "10.1.2.3/8"),
        ("user-client", "x"),
        ("address-client", "192.0.2.1/"),
    ],
)
def test_bans_of_nobody(kind: str, value: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        ban(kind, value, 0)


def test_who_flaps_waits_longer_and_longer_and_is_banned() -> None:
    flapping = Flapping(10, 60.0)
    found = [flapping.connects("a", number / 100) for number in range(10)]
    assert found[:5] == [0.0] * 5
    assert found[9] is not None
    assert all(one is not None and later is not None and one < later for one, later in pairwise(found[5:]))
    assert all(one <= SLOWEST for one in found if one is not None)
    assert flapping.connects("b", 0.2) == 0.0
    assert flapping.connects("a", 0.2) is None
    assert flapping.connects("a", 0.3) == 0.0  # after the ban it begins anew
    assert [flapping.connects("slow", number * 10.0) for number in range(50)] == [0.0] * 50


def admission_of(rate_burst: float = 5.0, **given: object) -> tuple[ListenerAdmission, ConnectionLimit]:
    listener = ListenerSettings.model_validate({"listen": "h:1", **given})
    settings = Settings(rate_burst=rate_burst).at(listener)
    process = ConnectionLimit(settings)
    return ListenerAdmission(process, settings, listener.addresses, listener.max_connections), process


def test_connections_of_a_listener_an_address_and_the_process() -> None:
    one, process = admission_of(max_connections=3, max_connections_per_address=2)
    assert [one.admit_address("192.0.2.1", 0).verdict for _ in range(3)] == [
        Verdict.ADMITTED,
        Verdict.ADMITTED,
        Verdict.CROWD,
    ]
    assert one.admit_address("192.0.2.2", 0).verdict is Verdict.ADMITTED
    one.release_address("192.0.2.1")
    assert one.admit_address("192.0.2.1", 0).verdict is Verdict.ADMITTED
    assert [one.admit_connection() for _ in range(4)] == [True] * 3 + [False]
    one.release_connection()
    process.limit = 2
    assert not one.admit_connection()
    one.release_connection()
    assert one.admit_connection()
    assert (one.connections, process.connections) == (2, 2)


def test_connections_beyond_a_rate_have_turns_then_are_told_and_then_not_even_told() -> None:
    one, _ = admission_of(connect_rate=1, rate_burst=2)
    waits = [1.0, 2.0, 3.0, 4.0]
    told, refused = [CONNACK_REFUSAL] * 2, [Admission(Verdict.RATE)] * 2
    assert [one.admit_address(f"192.0.2.{number}", 10) for number in range(10)] == [
        *[ADMITTED] * 2,
        *(Admission(Verdict.ADMITTED, 10 + wait) for wait in waits),
        *told,
        *refused,
    ]
    assert [one.admit_address("a", 12) for _ in range(5)] == [
        *(Admission(Verdict.ADMITTED, 12 + wait) for wait in waits[2:]),
        *told,
        Admission(Verdict.RATE),
    ]
    assert one.admit_address("a", 30) == ADMITTED
    one, _ = admission_of(connect_rate_per_address=0.5, rate_burst=2)
    assert [one.admit_address("a", 10) for _ in range(5)] == [
        ADMITTED,
        *(Admission(Verdict.ADMITTED, 10 + wait) for wait in waits[1::2]),
        *told[:1],
        *refused[:1],
    ]
    assert one.admit_address("b", 10) == ADMITTED
    assert one.admit_address("a", 20) == ADMITTED


def test_who_exceeds_the_rate_of_its_address_does_not_delay_others() -> None:
    """Others do not wait for connections that their address refuses, however many these are."""
    one, _ = admission_of(connect_rate=1.25, connect_rate_per_address=0.5, rate_burst=4)
    found = [one.admit_address("a", 10).verdict for _ in range(20)]
    assert found == [Verdict.ADMITTED] * 4 + [Verdict.CONNACK_REFUSAL] * 2 + [Verdict.RATE] * 14
    assert one.admit_address("b", 10) == ADMITTED
    assert one.admit_address("b", 10) == Admission(Verdict.ADMITTED, 10.8)
    assert one.admit_address("b", 10) == Admission(Verdict.ADMITTED, 12.0)  # of its address; the listener's is earlier
    one.refuse_banned(lambda host: host == "banned")
    assert {one.admit_address("banned", 10).verdict for _ in range(20)} == {Verdict.BANNED}
    assert one.admit_address("c", 10) == Admission(Verdict.ADMITTED, 12.4)
    assert [one.name for one in Verdict if not one.closes] == ["ADMITTED", "CONNACK_REFUSAL"]


def test_addresses_of_the_listener_and_of_the_gateway_have_both_to_let_in() -> None:
    listener = ListenerSettings.model_validate({"listen": "h:1", "addresses": ["deny 10.0.0.1", "allow all"]})
    settings = Settings(addresses=("allow 10.0.0.0/8", "deny all"))
    one = ListenerAdmission(ConnectionLimit(settings), settings, listener.addresses, listener.max_connections)
    assert [one.admits(f"{host}") for host in ("10.0.0.1", "10.0.0.2", "11.0.0.1")] == [False, True, False]
