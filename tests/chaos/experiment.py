# SPDX-License-Identifier: Apache-2.0
"""What an experiment is given, and what it gives back."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.chaos.moving import Moves, arguments_for
from tests.harness.cluster import Cluster
from tests.harness.gateway import Gateway
from tests.harness.nats import NatsServer, make_server
from tests.harness.waiting import aeventually

LONGEST_MOVE: Final = 60.0
"""Seconds in which some session has moved in each direction, while clients connect again."""


@dataclass
class Setting:
    """Starts servers and gateways for one experiment; :meth:`close` ends them.

    Attributes:
        directory: an empty directory for stores, logs and histories.
        long: the long version (`make chaos`); otherwise the one of `make test-long`, at most 25 seconds.
        seed: for everything that is left to chance.
        positions: `session_positions` of gateways whose experiment does not say it; empty: none is given.
        urls: NATS URLs of the servers that were started.
        moves: counts sessions that move between consumers and records, where they are to do that.
    """

    directory: Path
    long: bool = False
    seed: int = 1
    positions: str = ""
    urls: list[str] = field(default_factory=list)
    moves: Moves | None = None
    gateways: list[Gateway] = field(default_factory=list)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def nats(self, *, config: str = "", mqtt: bool = False) -> NatsServer:
        """A nats-server that runs."""
        server = make_server("process", self.fresh("nats"), config=config, mqtt=mqtt)
        self._stack.callback(server.discard)
        server.start()
        self.urls.append(server.url)
        return server

    def cluster(self, *, config: str = "", mqtt: bool = False) -> Cluster:
        """Three nats-servers that run."""
        cluster = Cluster(self.fresh("cluster"), config=config, mqtt=mqtt)
        self._stack.callback(cluster.discard)
        cluster.start()
        self.urls.append(cluster.url)
        return cluster

    def gateway(
        self, nats: str, *arguments: str, env: Mapping[str, str] | None = None, start: bool = True, module: str = ""
    ) -> Gateway:
        """A gateway at the NATS URLs ``nats``; ``module`` is run in place of ``mqtt_nats``."""
        arguments = (*arguments_for(self.positions), *arguments)
        gateway = Gateway(self.fresh("gateway") / "log", nats, arguments=arguments, env=env, module=module)
        self._stack.callback(gateway.process.discard)
        self.gateways.append(gateway)
        if start:
            gateway.start()
        return gateway

    async def moved(self) -> None:
        """Wait until sessions have moved in both directions, where they are to; ``Moves.violations`` says if not."""
        moves = self.moves
        if moves is not None:
            with contextlib.suppress(AssertionError):
                await aeventually(lambda: not moves.violations, LONGEST_MOVE)

    def on_close(self, function: Callable[[], Any]) -> None:
        """Have ``function`` called at the end, before what was started earlier is ended."""
        self._stack.callback(function)

    def close(self) -> None:
        """End everything."""
        self._stack.close()

    def fresh(self, name: str) -> Path:
        """A new empty directory."""
        for number in itertools.count(len(list(self.directory.iterdir()))):
            directory = self.directory / f"{name}{number}"
            with contextlib.suppress(FileExistsError):  # of another thread
                directory.mkdir(parents=True)
                return directory
        raise AssertionError("the numbers do not end")


@dataclass
class Result:
    """What came out.

    Attributes:
        figures: name and value in the order of the report: messages, kills, lost, duplicated, longest pause, ...
        violations: one line for each broken promise; none when the experiment has passed.
        remarks: what a reader of the figures must know.
        peers: further rows of the report, by their names: the same script with other brokers, which promise nothing, or
            rounds of an experiment.
    """

    figures: dict[str, int | float | str] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    peers: dict[str, Result] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One experiment, by the name under which it is run.

    Attributes:
        name: such as ``R1``.
        title: what is done, in a line.
        passes: what must come out, in a line.
        run: does it.
    """

    name: str
    title: str
    passes: str
    run: Callable[[Setting], Awaitable[Result]]


@contextlib.contextmanager
def running(directory: Path, *, long: bool = False, seed: int = 1, positions: str = "") -> Iterator[Setting]:
    """A setting that is closed at the end."""
    setting = Setting(directory, long, seed, positions)
    try:
        yield setting
    finally:
        setting.close()
