# SPDX-License-Identifier: Apache-2.0
"""The table of moves of consumers, in small."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import consumer_moves, peers
from benchmarks.consumer_moves import Pace, Row
from benchmarks.generator.clients import Loop
from benchmarks.generator.packets import DeliveryError

SMALL = ["--consumers", "12", "--messages", "3", "--among", "2", "--seconds", "0.5", "--rate", "20"]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_moves, "SETTLE_S", 0.2)
    monkeypatch.setattr(consumer_moves, "IDLE_S", 0.2)


@pytest.fixture
def mover() -> Iterator[consumer_moves.Mover]:
    """One whose requests nobody answers."""
    loop = Loop()
    with socket.create_server((peers.HOST, 0)) as server:
        yield consumer_moves.Mover(loop, server.getsockname()[1])
    loop.close()


@pytest.mark.processes
@pytest.mark.parametrize("servers", ["1", "3"])
def test_both_ways(servers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each consumer is where it was moved to: the benchmark asks them."""
    report = tmp_path / "growth.md"
    consumer_moves.main(["--servers", servers, *SMALL, "--report", str(report)])
    assert "## Moves of consumers" in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")] for line in report.read_text().splitlines() if line[:2] == "| "]
    assert [row[1:3] for row in rows[1:]] == [[servers, "reset"], [servers, "delete and create"]]
    assert [row[9] for row in rows[1:]] == ["–", "–"]
    for row in rows[1:]:
        assert all(float(one.replace(",", "")) > 0 for one in row[4].split(", "))


@pytest.mark.processes
def test_a_consumer_that_is_not_where_it_should_be(
    mover: consumer_moves.Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_moves, "PATIENCE_S", 5.0)
    with peers.running("nats") as broker:
        asyncio.run(consumer_moves._make_stream(broker.nats_port, 1))
        consumer_moves._publish(broker.nats_port, 2, 3)
        real = consumer_moves.Mover(mover.loop, broker.nats_port)
        real.begin(0, 1, consumer_moves._create(0, 1), time.monotonic())
        real.finish()
        assert (real.reached, real.failures) == ({0: 1}, {})
        asyncio.run(consumer_moves._check(broker.nats_port, real, 2, 3))
        real.reached[0] = 3
        monkeypatch.setattr(consumer_moves, "PATIENCE_S", 0.5)
        with pytest.raises(DeliveryError, match="3 messages wait for consumer c0, and not 2"):
            asyncio.run(consumer_moves._check(broker.nats_port, real, 2, 3))


def test_answers_that_are_no_success(mover: consumer_moves.Mover, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer whose deletion fails is created all the same; a late answer counts for nothing."""
    monkeypatch.setattr(consumer_moves, "PATIENCE_S", 0.05)
    now = time.monotonic()
    for number in (7, 8, 9):
        mover.begin(number, 1, consumer_moves._recreate(number, 1), now)
    mover.message(b"bench.answer.1", b"", b'{"error":{"description":"consumer not found"}}')
    mover.message(b"bench.answer.2", b"", b'{"success":true}')
    mover.message(b"bench.answer.3", b"NATS/1.0 503\r\n\r\n", b"")
    mover.message(b"bench.answer.4", b"", b"{}")
    mover.message(b"bench.answer.5", b"", b"{}")
    assert mover.reached == {8: 1}
    assert len(mover.took) == 1
    mover.finish()
    assert mover.failures == {"consumer not found": 1, "no responders": 1, "no answer": 1}
    assert (mover.given_up, mover.busy) == ({9}, set())
    mover.message(b"bench.answer.6", b"", b"{}")
    assert len(mover.took) == 1


@pytest.mark.parametrize(("rate", "said"), [(96.0, "96 of 100: keeps up"), (94.0, "94 of 100: does not keep up")])
def test_whether_it_keeps_up(rate: float, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_moves, "machine", lambda _: "a machine")
    pace = Pace(rate, 0.001, 0.002, 0.003)
    text = consumer_moves.document([Row(1, "reset", 0.01, pace, pace, 100.0, pace, "2 × no answer")], "command")
    assert said in text
    assert "2.0 ms, 3.0 ms" in text
    assert "2 × no answer" in text


@pytest.mark.parametrize(
    "arguments", [["--consumers", "0"], ["--messages", "0"], ["--seconds", "0"], ["--rate", "0"], ["--among", "11"]]
)
def test_what_it_cannot_measure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        consumer_moves.main(arguments)
    assert "there has to be" in capsys.readouterr().err
