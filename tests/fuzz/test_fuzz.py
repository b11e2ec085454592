# SPDX-License-Identifier: Apache-2.0
"""A short run of each target, and code with mistakes that the fuzzer has to find."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mqtt_nats.access import acl, passwords
from mqtt_nats.codec import Decoder, Limits, Packet, Subscribe
from mqtt_nats.messages import properties
from mqtt_nats.transport.proxy import HeaderReader
from mqtt_nats.transport.websocket import WebSocket
from mqtt_streams import sessions, subjects
from pyspark_mqtt_nats.decoders import columns
from pyspark_mqtt_nats.reading import decoding
from tests.codec.support import decoder
from tests.fuzz import codec
from tests.fuzz.arcs import Arcs
from tests.fuzz.codec import STARTS
from tests.fuzz.engine import Input, Target, Unexpected, expect, fuzz
from tests.fuzz.targets import TARGETS, fuzz_in_processes
from tests.harness.nats import ROOT

INPUTS = {"decoder": 40_000}
"""How many inputs a target has here; 2,000 where nothing is said."""


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_a_target(name: str) -> None:
    seed = secrets.token_hex(8) if name == "decoder" else "seed"
    target = TARGETS[name]
    inputs = INPUTS.get(name, 2000)
    outcome = fuzz(target, seed, inputs)
    assert not outcome.failures, f"seed {seed}: {outcome.failures}"
    assert outcome.inputs == inputs
    assert 0 < outcome.refused < outcome.inputs
    assert outcome.read
    assert outcome.grown < 64 * 1024 * 1024
    first = fuzz(target, seed, 0)
    assert not first.failures
    assert len(outcome.corpus) > len(first.corpus) > 3  # it has found something that the seeds do not reach
    assert len(outcome.arcs) >= len(first.arcs) > 50


@pytest.mark.long
@pytest.mark.processes
def test_in_processes() -> None:
    names = ["decoder", "proxy"]
    outcomes = {one.name: one for one in fuzz_in_processes(names, "seed", 2, 500)}
    assert [outcomes[name].inputs for name in names] == [500, 500]
    again = {one.name: one for one in fuzz_in_processes(["proxy"], "seed", 1, 500)}
    assert again["proxy"].corpus == outcomes["proxy"].corpus


def test_the_page_says_what_must_hold() -> None:
    page = (ROOT / "docs/internals/fuzzing.md").read_text(encoding="utf-8")
    found = re.findall(r"^### ([\w-]+)\n\n((?:- .*\n)+)", page, re.M)
    said = {name: " ".join(line.removeprefix("- ") for line in bullets.splitlines()) for name, bullets in found}
    assert said == {name: target.invariants for name, target in TARGETS.items()}
    assert list(said) == list(TARGETS)


# -- mistakes -----------------------------------------------------------------------------------------


class Broken(Decoder):
    """Two filters, the first of which is at QoS 2 and the second at QoS 1, end it."""

    __slots__ = ()

    def feed(self, data: bytes) -> list[Packet]:
        packets = super().feed(data)
        for packet in packets:
            if isinstance(packet, Subscribe) and [one.qos for one in packet.filters[:2]] == [2, 1]:
                raise IndexError("index out of range")
        return packets


class Forgetful(Decoder):
    """What is left of a read of exactly seven bytes is forgotten."""

    __slots__ = ()

    def feed(self, data: bytes) -> list[Packet]:
        packets = super().feed(data)
        if len(data) == 7:
            self._held = []
        return packets


class Hoarding(Decoder):
    """Keeps what it has read."""

    __slots__ = ()

    def feed(self, data: bytes) -> list[Packet]:
        packets = super().feed(data)
        if self._held:
            self._held.append(data)
        return packets


def _maker(kind: Callable[[Limits, int], Decoder]) -> Callable[[int, str, Limits], Decoder]:
    return lambda version, side, limits: decoder(version, side, limits) if side == "server" else kind(limits, version)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "text"), [(Broken, "IndexError: index"), (Forgetful, "cut into reads of 7"), (Hoarding, "bytes are kept")]
)
def test_it_finds_a_mistake_of_the_decoder(kind: Callable[[Limits, int], Decoder], text: str) -> None:
    outcome = fuzz(codec.target(_maker(kind)), "a", 100_000, stop=1 if kind is Broken else 100)
    found = [one for one, said in outcome.failures if text in said]
    assert found
    assert all(STARTS[start][1] == "client" for start, _ in found)
    assert not set(found) <= set(codec.seeds())


_decode = sessions.decode
_feed = HeaderReader.feed
_upgrade = WebSocket._upgrade
_parse = passwords._parse
_headers = decoding.decode_headers
_filter = subjects.subject_to_filter


def _greedy(reader: HeaderReader, data: bytes) -> None:
    _feed(reader, data)
    if reader.need == 216:
        reader.need = 217


def _careless(web: WebSocket) -> None:
    web._head += b"\r\n\r\n" if len(web._head) > 300 else b""
    _upgrade(web)


def _generous(one: str, other: str) -> bool:
    return one == other


def _costly(line: str) -> Any:
    name, entry = _parse(line.replace("m=65,", "m=64,"))
    return name, passwords.PasswordHash(entry.text.replace("m=64,", "m=64000000,"), entry.tenant)


def _latin(block: bytes) -> decoding.Decoded:
    found = _headers(block)
    return found._replace(content_type=found.content_type and found.content_type.strip("\x80 \xa0\u3000e"))


def _trusting(raw: bytes) -> bool:
    return len(raw) < 60_000


def _short(subject: str) -> str:
    return _filter(subject).replace("//", "/")


MISTAKES = [
    (
        "session-record",
        sessions,
        "decode",
        lambda data, client_id=None, key="": _decode(data, key=key),
        "another client id",
    ),
    ("proxy", HeaderReader, "feed", _greedy, "version 2 ends at"),
    ("websocket", WebSocket, "_upgrade", _careless, "in reads of"),
    ("acl-file", acl, "overlaps", _generous, "may be subscribed and brings"),
    ("password-files", passwords, "_parse", _costly, "costs"),
    ("spark-headers", decoding, "decode_headers", _latin, "content type"),
    ("spark-payloads", columns, "json_of", lambda value: repr(value), "JSONDecodeError"),
    ("headers", properties, "_legal", _trusting, "is not legal in a packet"),
    ("topics", subjects, "subject_to_filter", _short, "is '"),
]


@pytest.mark.parametrize(("name", "owner", "function", "mistake", "text"), MISTAKES, ids=[one[0] for one in MISTAKES])
def test_it_finds_a_mistake(
    name: str, owner: object, function: str, mistake: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each target has an invariant that another mistake breaks."""
    monkeypatch.setattr(owner, function, mistake)
    outcome = fuzz(TARGETS[name], "seed", 30_000, stop=1)
    assert text in outcome.failures[0][1]


def test_what_is_slow_or_grows_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(one: Input, number: int) -> tuple[int, bool]:
        """Nothing."""
        expect(b"x" not in one[1], "there is an x")
        return sum(range(2_000_000 if len(one[1]) > 20 else 0)), False

    monkeypatch.setattr("tests.fuzz.engine.SLOW_S", 0.005)
    target = Target("slow", (sys.modules[__name__],), lambda: [(0, b"abc")], check)
    outcome = fuzz(target, "seed", 10_000, stop=1)
    assert "processor time" in outcome.failures[0][1]
    assert target.invariants == "Nothing."
    with pytest.raises(Unexpected, match="there is an x"):
        check((0, b"x"), 0)


def test_seeds_are_checked_and_time_is_kept() -> None:
    def check(one: Input, number: int) -> tuple[int, bool]:
        raise Unexpected("always")

    target = Target("never", (sys.modules[__name__],), lambda: [(0, b"abc")], check)
    assert fuzz(target, "seed", 0).failures == [((0, b"abc"), "always")]
    quick = Target("quick", (sys.modules[__name__],), lambda: [(0, b"abc")], lambda one, number: (1, False))
    outcome = fuzz(quick, "seed", seconds=0.2)
    assert outcome.inputs > 0
    assert outcome.seconds >= 0.2


def test_steps_between_lines() -> None:
    def branches(number: int) -> int:
        for _ in range(number):
            pass
        if number:
            return 1
        return 2

    arcs = Arcs(Path(__file__).parent)
    steps = [arcs.follow(partial(branches, number)) for number in (0, 0, 1, 1, 50, 51, 50)]
    assert steps == [True, False, True, False, True, False, False]
    assert not Arcs(Path(__file__).parent / "elsewhere").follow(partial(branches, 0))
