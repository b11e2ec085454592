# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/internals/protocol.md say what the code does."""

from __future__ import annotations

import re

from mqtt_nats.codec import ProtocolError, ack_bytes
from mqtt_nats.codec.wire import PUBACK, PUBCOMP, PUBREC
from mqtt_nats.protocol import inflight as delivery
from mqtt_nats.protocol import transient_sender as regular
from mqtt_nats.protocol.qos2_receiver import ON_PUBLISH, ON_PUBREL, Action, State
from mqtt_nats.protocol.transient_sender import TransientSender
from tests.harness.nats import ROOT

PAGE = ROOT / "docs" / "internals" / "protocol.md"
STATES = {regular.PUBLISHED1: "PUBLISHED1", regular.PUBLISHED2: "PUBLISHED2", regular.RELEASED: "RELEASED", None: "–"}


def table(heading: str) -> list[list[str]]:
    """The rows of the first table below a heading."""
    text = PAGE.read_text(encoding="utf-8")
    section = text.split(f"### {heading}\n")[1]
    found = re.search(r"((?:^\|.*\n)+)", section, re.MULTILINE)
    assert found is not None
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found.group(1).splitlines()]
    return [rows[0], *rows[2:]]


def test_inbound() -> None:
    def cell(step: tuple[Action, State | None] | None, state: State | None) -> str:
        if step is None:
            return "violation"
        action, after = step
        return action.name if after is state else f"{action.name} → {after.name if after else '–'}"

    rows = [["state", "PUBLISH", "PUBREL"]]
    for state in (None, *State):
        name = state.name if state else "–"
        rows.append([name, cell(ON_PUBLISH[state], state), cell(ON_PUBREL[state], state)])
    assert table("QoS 2 from the client") == rows


def test_regular() -> None:
    rows = [["state", "PUBACK", "PUBREC", "PUBCOMP"]]
    for state in (None, regular.PUBLISHED1, regular.PUBLISHED2, regular.RELEASED):
        row = [STATES[state]]
        for kind in (PUBACK, PUBREC, PUBCOMP):
            written: list[bytes] = []
            machine = TransientSender(1, 1, written.append)
            if state is not None:
                machine.inflight[1] = state
            try:
                machine.acknowledged(kind, [1])
            except ProtocolError:
                row.append("violation")
                continue
            after = machine.inflight.get(1)
            assert written in ([], [ack_bytes(6, 1)])
            answer = "PUBREL" if written else "free" if state is not None else "ignored"
            row.append(answer if after == state or after is None else f"{answer} → {STATES[after]}")
        rows.append(row)
    assert table("QoS 1 and 2 to a regular session") == rows


def test_durable_states() -> None:
    states = {row[0].split(" ")[0] for row in table("QoS 1 and 2 to a durable session")[1:]}
    assert states == {name for name in vars(delivery) if name.isupper()} | {"released"}
