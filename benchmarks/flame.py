# SPDX-License-Identifier: Apache-2.0
"""Flame graphs of folded stacks: one SVG without scripts, a box for each function, as wide as its part of the CPU."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks import svg

LAYERS: Final = {
    "codec": "#f4b183",
    "transport": "#ffd966",
    "protocol": "#c5e0b4",
    "gateway": "#9dc3e6",
    "pubsub": "#b4a7d6",
    "backbone": "#f8a5c2",
    "streams": "#d9b38c",
    "python": "#c9ced6",
    "native": "#e3e6ea",
}
"""The package of a function (``gateway`` for those that are not named), and its colour, readable with dark text."""

LEAST: Final = 0.002
"""Boxes narrower than this part of the whole are left out."""

COMMON: Final = 0.97
"""What has this part of all samples or more is below everything, and tells nothing."""

_WIDTH, _ROW, _LETTER = 1200, 18, 6.4
_FRAME: Final = re.compile(r"^(?P<name>.*) \((?P<file>[^()]*?)(?::\d+)?\)$")


@dataclass
class Node:
    """A function where it is called: ``own`` samples end in it, ``total`` also in what it calls."""

    name: str
    layer: str
    own: int = 0
    total: int = 0
    calls: dict[str, Node] = field(default_factory=dict)


WAITING: Final = ("epoll_pwait", "epoll_wait", "kevent")
"""Where a process is that has nothing to do."""


def place(frame: str) -> tuple[str, str]:
    """What a frame of a folded stack is called, and its layer."""
    found = _FRAME.match(frame)
    if found is None:
        return frame, "native"
    name, file = found["name"], found["file"].replace("\\", "/")
    if name.startswith("0x"):  # an address, another one each time
        name = "unnamed"
    if "mqtt_nats/" in file:
        inside = file.rpartition("mqtt_nats/")[2]
        layer = inside.partition("/")[0]
        return f"{name} ({inside})", layer if layer in LAYERS else "gateway"
    if "mqtt_streams/" in file:
        return f"{name} ({file.rpartition('mqtt_streams/')[2]})", "streams"
    if file.endswith(".py") or file.startswith("<"):
        return f"{name} ({file.rpartition('/')[2]})", "python"
    return f"{name} ({file.rpartition('/')[2]})", "native"


def tree(lines: Iterable[str]) -> Node:
    """The stacks of lines such as ``outer (a.py);inner (b.py) 12``; raises ValueError for another line.

    Samples of a process that waits are left out.
    """
    root = Node("all", "python")
    for line in lines:
        if not line.strip():
            continue
        stack, _, count = line.strip().rpartition(" ")
        samples = int(count)
        if stack.rpartition(";")[2].startswith(WAITING):
            continue
        node = root
        node.total += samples
        for frame in stack.split(";"):
            name, layer = place(frame)
            node = node.calls.setdefault(name, Node(name, layer))
            node.total += samples
        node.own += samples
    return root


def own_shares(root: Node) -> dict[tuple[str, str], float]:
    """The part of all samples that end in each function (name and layer), the largest first."""
    found: dict[tuple[str, str], int] = {}
    todo = [root]
    while todo:
        node = todo.pop()
        todo += node.calls.values()
        if node.own:
            key = node.name, node.layer
            found[key] = found.get(key, 0) + node.own
    ordered = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return {key: count / root.total for key, count in ordered}


def layer_shares(root: Node) -> dict[str, float]:
    """The part of all samples that end in each layer, the largest first."""
    found: dict[str, float] = {}
    for (_, layer), share in own_shares(root).items():
        found[layer] = found.get(layer, 0.0) + share
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def trimmed(root: Node) -> Node:
    """Without the calls that nearly all samples have in common at the bottom: interpreter, event loop, entry points."""
    node = root
    while node.calls:
        largest = max(node.calls.values(), key=lambda each: each.total)
        if largest.total < COMMON * root.total:
            break
        node = largest
    return node


def _depth(node: Node, least: float) -> int:
    below = [_depth(each, least) for each in node.calls.values() if each.total >= least]
    return 1 + max(below, default=0)


def graph(root: Node, title: str) -> str:
    """The picture, callers below what they call. The same samples give the same file."""
    base = trimmed(root)
    least = LEAST * base.total
    height = (_depth(base, least) + 1) * _ROW + 44
    boxes: list[str] = []

    def draw(node: Node, left: float, level: int) -> None:
        width = _WIDTH * node.total / base.total
        y = height - 26 - (level + 1) * _ROW
        shade = zlib.crc32(node.name.encode()) % 12 / 100
        share = node.total / base.total
        boxes.append(
            f'<g><title>{svg.escape(node.name)}: {share:.1%}</title><rect class="{node.layer}" x="{left:.1f}" y="{y}" '
            f'width="{max(width - 0.5, 0.3):.1f}" height="{_ROW - 1}" opacity="{1 - shade:.2f}"/>'
        )
        letters = int((width - 6) / _LETTER)
        if letters >= 4:
            name = node.name if len(node.name) <= letters else node.name[: letters - 1] + "…"
            boxes.append(svg.text(left + 3, y + 13, name, "n"))
        boxes.append("</g>")
        for each in sorted(node.calls.values(), key=lambda child: child.name):
            if each.total >= least:
                draw(each, left, level + 1)
            left += _WIDTH * each.total / base.total

    draw(base, 0.0, 0)
    legend, left = [], 0.0
    for layer, share in layer_shares(root).items():
        legend.append(f'<rect class="{layer}" x="{left:.0f}" y="{height - 16}" width="12" height="12"/>')
        words = f"{layer} {share:.0%}"
        legend.append(svg.text(left + 17, height - 6, words))
        left += 34 + len(words) * 7.2
    style = {
        "text": (f"{svg.FONT};font-size:12px;fill:#24292f", "fill:#e6edf3"),
        ".n": ("font-family:monospace;font-size:10.5px;fill:#1f2328", "fill:#1f2328"),
        ".h": ("font-weight:600", "font-weight:600"),
    } | {f".{name}": (f"fill:{colour}", f"fill:{colour}") for name, colour in LAYERS.items()}
    body = [svg.text(0, 14, title, "h"), *boxes, *legend]
    return svg.picture(_WIDTH, height, title, svg.rules(style), body)


def longest(root: Node, count: int) -> Sequence[tuple[str, float]]:
    """The functions that take most by themselves."""
    return [(name, share) for (name, _), share in own_shares(root).items()][:count]
