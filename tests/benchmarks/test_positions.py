# SPDX-License-Identifier: Apache-2.0
"""The table of positions of busy sessions, in small."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from benchmarks import peers, positions
from benchmarks.generator.clients import LoadError, Loop
from mqtt_streams.positions import PREFIX


@pytest.mark.processes
def test_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A message changes the position of its session twice: when it is taken, and when it is acknowledged."""
    monkeypatch.setattr(positions, "SETTLE_S", 1.5)
    report = tmp_path / "growth.md"
    positions.main(["--sessions", "5", "--rate", "4", "--seconds", "3", "--report", str(report)])
    assert "## Positions of busy sessions" in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")] for line in report.read_text().splitlines() if line[:2] == "| "]
    (cells,) = rows[1:]
    assert cells[1:4] == ["1", "5", "4"]
    arrived, records, size, total = (int(cell.replace(",", "")) for cell in cells[4:8])
    assert 10 <= arrived <= 30
    assert 0 < records <= 2 * arrived
    assert 150 < size < 500
    assert total == pytest.approx(records * size, rel=0.1)


@pytest.mark.processes
def test_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "SETTLE_S", 1.5)
    row = positions.measure(3, 2, 2, 3)
    assert (row.servers, row.sessions) == (3, 3)
    assert min(row.arrived, row.records, row.size) > 0
    assert "| 3 " in positions.document([row], "command")


def test_bytes_of_a_record() -> None:
    """Its subject, headers and payload; also when they come in parts."""
    loop = Loop()
    with socket.create_server((peers.HOST, 0)) as server:
        counting = positions.Counting(loop, server.getsockname()[1])
        sock, _ = server.accept()
    subject = f"{PREFIX}abc"
    frames = f"INFO {{}}\r\nHMSG {subject} 1 reply 12 19\r\nNATS/1.0\r\n\r\npayload\r\nPING\r\n".encode()
    with sock:
        for part in (frames[:30], frames[30:60], frames[60:]):
            sock.sendall(part)
            loop.turn(5)
        assert (counting.records, counting.bytes) == (1, len(subject) + 19)
        counting.send(b"SUB end 9\r\n")
        data = b""
        while not data.endswith(b"end 9\r\n"):
            data += sock.recv(4096)
        assert data.endswith(b"PONG\r\nSUB end 9\r\n")
        assert f"SUB {PREFIX}> 1\r\n".encode() in data
    loop.close()


def test_a_message_that_is_not_stored() -> None:
    loop = Loop()
    with socket.create_server((peers.HOST, 0)) as server:
        storing = positions.Storing(loop, server.getsockname()[1], 2, 10)
        with pytest.raises(LoadError, match="no room"):
            storing.message(b"bench.stored", b"", b'{"error":{"description":"no room"}}')
    loop.close()
