# SPDX-License-Identifier: Apache-2.0
"""What comes from the socket, cut anywhere, into messages."""

from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyspark_mqtt_nats.errors import ConnectError
from pyspark_mqtt_nats.nats import bulk
from pyspark_mqtt_nats.nats.frames import LINE_MOST, Frames, Loose

OURS = b"P"


class Sent(NamedTuple):
    """A message as the server sends it; without headers it is MSG."""

    subject: bytes
    sid: bytes
    reply: bytes
    headers: bytes | None
    payload: bytes

    @property
    def frame(self) -> bytes:
        where = b" ".join(part for part in (self.subject, self.sid, self.reply) if part)
        if self.headers is None:
            return b"MSG %b %d\r\n%b\r\n" % (where, len(self.payload), self.payload)
        head, size = len(self.headers), len(self.headers) + len(self.payload)
        return b"HMSG %b %d %d\r\n%b%b\r\n" % (where, head, size, self.headers, self.payload)

    @property
    def loose(self) -> Loose:
        return Loose(self.subject, self.sid, self.headers or b"", self.payload)


WORD = st.text("abcXYZ$_>*.|/", min_size=1, max_size=12).map(str.encode)
SMUGGLED = b"x\r\nHMSG a P r 0 1\r\nx\r\n"  # a payload that looks like frames
BYTES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"\r\n", b"PING\r\n", b"MSG a P 1\r\n", SMUGGLED, SMUGGLED[3:], b"HMSG ", b"x" * 3000]),
)
SENT = st.builds(
    Sent, WORD, st.sampled_from([OURS, b"R", b"17"]), st.one_of(st.just(b""), WORD), st.none() | BYTES, BYTES
)
USUAL = st.builds(Sent, WORD, st.just(OURS), WORD, BYTES, BYTES)
CONTROL = st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b'INFO {"x":"y z"}\r\n', b"ping\r\n"])


@pytest.fixture(params=[1, bulk.LEAST], ids=["at once", "one by one"])
def least(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks of this size are taken at once; others are too small for it."""
    monkeypatch.setattr(bulk, "LEAST", request.param)
    found: int = request.param
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(SENT, USUAL, CONTROL), max_size=12), st.lists(st.integers(0, 4000), max_size=5), st.booleans()
)
def test_any_cut_gives_the_same_messages(least: int, sent: list[Sent | bytes], cuts: list[int], bare: bool) -> None:
    whole = b"".join(one if isinstance(one, bytes) else one.frame for one in sent)
    frames = Frames(OURS, bare=bare)
    edges = [0, *sorted(cut % (len(whole) + 1) for cut in cuts), len(whole)]
    for start, end in pairwise(edges):
        frames.feed(whole[start:end])
    messages = [one for one in sent if isinstance(one, Sent)]

    def listed(one: Sent) -> bool:
        if bare:
            return one.sid == OURS and not one.reply and one.headers is not None
        return one.sid == OURS and bool(one.reply)

    usual = [one for one in messages if listed(one)]
    for sid in (OURS, b"R", b"17"):
        expected = [one.loose for one in messages if not listed(one) and one.sid == sid]
        assert (frames.loose(sid), frames.loose(sid)) == (expected, [])
    said = [one[:-2].replace(b"ping", b"PING") for one in sent if isinstance(one, bytes)]
    assert frames.lines() == [line for line in said if line not in (b"PONG", b"+OK")]
    assert frames.lines() == []
    assert len(frames) == len(usual)
    assert frames.size == sum(len(one.headers or b"") + len(one.payload) for one in usual)
    assert frames.rest() == b""
    block = frames.take(len(usual) + 1)
    for part in block:
        part.validate(full=True)
    assert block.subjects.to_pylist() == [one.subject for one in usual]
    assert block.headers.to_pylist() == [one.headers or b"" for one in usual]
    assert block.payloads.to_pylist() == [one.payload for one in usual]
    if not bare:
        assert block.replies.to_pylist() == [one.reply for one in usual]
    assert (len(frames), frames.size) == (0, 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(SENT, USUAL), min_size=1, max_size=5), st.data())
def test_the_rest_can_be_given_back(least: int, sent: list[Sent], data: st.DataObject) -> None:
    """What has not come whole is what another parser needs to go on."""
    whole = b"".join(one.frame for one in sent)
    cut = data.draw(st.integers(0, len(whole)))
    frames = Frames(OURS)
    frames.feed(whole[:cut])
    rest = frames.rest()
    assert whole[:cut].endswith(rest)
    frames.feed(rest + whole[cut:])
    assert len(frames) + sum(len(frames.loose(sid)) for sid in (OURS, b"R", b"17")) == len(sent)


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_messages_are_taken_in_portions(least: int, most: int) -> None:
    sent = [Sent(b"s%d" % index, OURS, b"r%d" % index, b"h" * index, b"p" * 3) for index in range(7)]
    frames = Frames(OURS)
    frames.feed(b"".join(one.frame for one in sent))
    assert frames.last == (b"r6", b"h" * 6)
    found: list[bytes] = []
    while len(frames):
        before = len(frames)
        block = frames.take(most)
        assert len(block.payloads) == min(most, before)
        found += block.subjects.to_pylist()
        assert frames.size == sum(len(one.headers or b"") + 3 for one in sent[len(found) :])
    assert found == [one.subject for one in sent]


def test_a_large_message_is_joined_once() -> None:
    """Else the time would grow with the square of its size: 64 MiB in pieces of 64 KiB, each joined with all before."""
    piece = b"x" * 65_536
    frames = Frames(OURS)
    frames.feed(b"HMSG a P r 4 %d\r\nhead" % (4 + 1024 * len(piece)))
    for _ in range(1024):
        frames.feed(piece)
        assert not len(frames)
    frames.feed(b"\r\n")
    block = frames.take(1)
    assert block.headers.to_pylist() == [b"head"]
    assert block.payloads[0].as_buffer().size == 1024 * len(piece)


def test_what_is_between_messages_costs_no_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is not of the usual form is read by itself: here what the server says at the end of a request."""
    usual = [Sent(b"s", OURS, b"r%d" % index, b"NATS/1.0\r\n\r\n", b"p" * 50) for index in range(1000)]
    ended = Sent(b"inbox", OURS, b"", b"NATS/1.0 409 Batch Completed\r\n\r\n", b"")
    cut = len(usual[0].frame) // 2
    alone: list[bytes] = []
    frames_one_by_one = Frames._frames

    def spy(one: Frames, data: bytes, at: int, until: int) -> int:
        end = frames_one_by_one(one, data, at, until)
        alone.append(data[at:end])
        return end

    monkeypatch.setattr(Frames, "_frames", spy)
    frames = Frames(OURS)
    parts = [usual[:400], [ended], usual[400:700], [ended], usual[700:]]
    frames.feed(b"".join(one.frame for part in parts for one in part) + usual[0].frame[:cut])
    assert len(frames) == len(usual)
    assert frames.loose(OURS) == [ended.loose] * 2
    assert b"".join(alone) == ended.frame * 2
    assert frames.rest() == usual[0].frame[:cut]


def test_payloads_that_look_like_frames_are_payloads(least: int) -> None:
    sent = [Sent(b"s", OURS, b"r", b"NATS/1.0\r\n\r\n", SMUGGLED if index % 300 == 7 else b"p") for index in range(900)]
    frames = Frames(OURS)
    frames.feed(b"".join(one.frame for one in sent))
    assert frames.take(900).payloads.to_pylist() == [one.payload for one in sent]


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"HMSG a P r x 5\r\n",
        b"HMSG a P r 9 5\r\n",
        b"HMSG a P r -9 5\r\n",
        b"HMSG a P r 0 -5\r\n",
        b"HMSG a P 9 5\r\n",
        b"MSG a P -1\r\n",
        b"MSG a P\r\n",
        b"MSG\r\n",
        b"HMSG a P b c 1 1\r\n",
        b"\r\n",
        b"x" * (LINE_MOST + 1),
    ],
)
def test_what_is_not_the_protocol(least: int, data: bytes) -> None:
    with pytest.raises(ConnectError, match=r"not NATS.*servers") as caught:
        Frames(OURS).feed(data)
    assert len(str(caught.value)) < 200
