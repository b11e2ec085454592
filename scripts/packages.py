# SPDX-License-Identifier: Apache-2.0
"""The packages of the gateway in their order, and the imports between them, read from the source."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = ROOT / "mqtt_nats"

PACKAGES: Final = {
    "base": "errors, log, tasks, the clock of nats-server, configuration files; counting: buckets, bans, admission",
    "codec": "bytes to packets and back, both protocol versions; limits are arguments",
    "protocol": "state machines of QoS 1 and 2: senders, receiver, packet identifiers, position of a session",
    "backbone": "connections to NATS, requests, acknowledged publishes, retry",
    "transport": "a client's socket: TCP, TLS, WebSocket, PROXY protocol, reads, writes, rates, listeners",
    "access": "credentials and rules: who may connect, publish and subscribe. Verdicts only",
    "hooks": "hook points, chains of hooks and their events",
    "messages": "a message, its headers and properties; PUBLISH as one subscriber gets it; identity of the gateway",
    "pubsub": "routing table, fan-out, topics as subjects, backfill after NATS was lost",
    "authenticators": "authenticators that need threads or connections; those of the settings",
    "config": "settings, accounts, NATS options, limits of the process",
    "observability": "counters, `$SYS` topics, presence, the service in NATS, messages in the log",
    "sessions": "session, its record, takeover; services of an account; consumers of a session; shared subscriptions",
    "ingress": "PUBLISH from a client or from the gateway: QoS 0, 1, 2, requests, scheduled and retained messages",
    "delivery": "durable delivery to one client: resume, position, dormant consumers, draining, slow clients",
    "shared_reader": "the gateway's one reader of stored messages, and sessions that catch up to it",
    "lifecycle": "claim and end of a session: deadline, expiry, will, timers; leases, failover, readiness of gateways",
    "client": "one client: CONNECT, SUBSCRIBE, UNSUBSCRIBE, DISCONNECT, AUTH, keep alive; packets to their packages",
    "plugins": "plugins: the interface, those that come with the gateway, loading",
    "control": "answers to questions and orders over NATS",
    "mqtt_clients": "MQTT clients of the command line: `pub`, `sub`, `request`",
    "ctl": "`mqtt-nats ctl`: questions to gateways and JetStream, verbs in `ctl/commands`; `mqtt-nats migrate`",
    "admin": "HTTP: metrics, health, the verbs of `ctl`, dashboard",
    "gateway": "composition: accounts, start, reconnect, end, workers, the embedded nats-server",
}
"""Subject of each package. From low to high: a package imports only those before it."""

PURE: Final = ("codec", "protocol")
"""Packages without input or output, clock, randomness and log."""


class Edge(NamedTuple):
    """An import of one module by another."""

    source: str
    target: str
    types: bool
    """For types alone: below ``if TYPE_CHECKING``."""


def modules() -> dict[str, Path]:
    """Every module of the gateway, by its dotted name; a package by the name of its folder."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def package(module: str) -> str:
    """The package of a module, or "" for what stands at the top."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (SOURCE / parts[1]).is_dir() else ""


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(node: ast.AST, types: bool = False) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and not child.level and child.module:
            yield from ((f"{child.module}.{one.name}", types) for one in child.names)
        elif isinstance(child, ast.Import):
            yield from ((one.name, types) for one in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from _imports(ast.Module(child.body, []), True)
            yield from _imports(ast.Module(child.orelse, []), types)
        else:
            yield from _imports(child, types)


@cache
def edges() -> tuple[Edge, ...]:
    """Every import of one module of the gateway by another, wherever it stands in the file."""
    return tuple(_edges(modules()))


def _edges(known: dict[str, Path]) -> Iterator[Edge]:
    for name, path in known.items():
        for full, types in _imports(parsed(path)):
            target = full if full in known else full.rpartition(".")[0]
            if target in known and target != name:
                yield Edge(name, target, types)


def upward() -> set[Edge]:
    """Imports of a package that comes later. One for types is left out where the same is imported at run time."""
    rank = {name: number for number, name in enumerate(PACKAGES)}
    found = {one for one in edges() if rank.get(package(one.target), -1) > rank.get(package(one.source), len(rank))}
    return {one for one in found if not one.types or one._replace(types=False) not in found}


def cycle() -> list[str]:
    """Modules that import each other in a circle at run time, sorted; empty where there is none."""
    needs: dict[str, set[str]] = {name: set() for name in modules()}
    for one in edges():
        if not one.types and not one.target.startswith(one.source + "."):
            needs[one.source].add(one.target)
    while free := [name for name, others in needs.items() if not others & needs.keys()]:
        for name in free:
            del needs[name]
    return sorted(needs)


@cache
def imported_packages() -> dict[str, Counter[str]]:
    """For each package, which others its modules import at run time, with the number of imports."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for one in {edge for edge in edges() if not edge.types}:
        source, target = package(one.source), package(one.target)
        if source != target and source in PACKAGES and target in PACKAGES:
            found[source][target] += 1
    return found


def table() -> str:
    """The packages, as a table: topic, number of modules, packages that are imported at run time."""
    rows = ["| package | is about | modules | imports at run time |", "|---|---|---|---|"]
    uses = imported_packages()
    for name, about in PACKAGES.items():
        count = sum(path.stem != "__init__" for path in (SOURCE / name).rglob("*.py"))
        others = ", ".join(f"`{one}`" for one in PACKAGES if one in uses[name]) or "–"
        rows.append(f"| `mqtt_nats/{name}` | {about} | {count} | {others} |")
    return "\n".join(rows)


def neighbours(name: str) -> str:
    """The packages that a package imports at run time, and those that import it, in one line."""
    uses = imported_packages()
    below = ", ".join(f"`{one}`" for one in PACKAGES if one in uses[name]) or "no package"
    above = ", ".join(f"`{one}`" for one in PACKAGES if name in uses[one]) or "no package"
    return f"At run time it imports {below}. It is imported by {above}."


def diagram() -> str:
    """The packages, as a Mermaid diagram. An arrow that follows from two others is left out."""
    uses = imported_packages()
    reach: dict[str, set[str]] = {}
    for name in PACKAGES:  # those that it imports come before it
        reach[name] = set(uses[name]).union(*(reach.get(one, set()) for one in uses[name]))
    lines = ["```mermaid", "flowchart BT"]
    for name in PACKAGES:
        direct = [one for one in uses[name] if not any(one in reach.get(other, ()) for other in uses[name])]
        lines += [f"  {name} --> {one}" for one in PACKAGES if one in direct]
    return "\n".join([*lines, "```"])
