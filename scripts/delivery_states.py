# SPDX-License-Identifier: Apache-2.0
"""Diagram of the states of durable delivery, from their table."""

from __future__ import annotations

from typing import Final

from mqtt_nats.delivery.states import TABLE, DeliveryEvent, DeliveryState, Feed

WIDTH: Final = 100
"""Characters of a line after which a chain of transitions goes on in the next line."""


def diagram() -> str:
    """The states and their feeds, as a Mermaid diagram.

    The end of the connection, and events that leave a state as it is, are left out.
    """
    lines = ["```mermaid", "flowchart LR"]
    for feed in Feed:
        states = [one for one in DeliveryState if TABLE[one].feed is feed and one is not DeliveryState.ENDED]
        lines.append("  " + "; ".join(f'{one.name}["{one.value}: {feed.value}"]' for one in states))
    end = ""
    for event in DeliveryEvent:
        sources: dict[DeliveryState, list[str]] = {}
        for state, row in TABLE.items():
            following = row.following.get(event, state)
            if following not in (state, DeliveryState.ENDED):
                sources.setdefault(following, []).append(state.name)
        for target, names in sources.items():
            step = f" -->|{event.value}| {target.name}"
            if names == [end] and len(lines[-1]) < WIDTH:
                lines[-1] += step
            else:
                lines.append(f"  {' & '.join(names)}{step}")
            end = target.name
    return "\n".join([*lines, "```"])
