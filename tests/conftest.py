# SPDX-License-Identifier: Apache-2.0
"""Fixtures and options for every test."""

import contextlib
import gc
import io
import logging
import signal
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, settings

from mqtt_nats.base.logs import Budgeted
from tests.harness.durations import has_long_tests, is_long, seconds
from tests.harness.gateway import Gateway
from tests.harness.nats import ROOT, NatsServer, container_obstacle, make_server
from tests.harness.positions import needs_consumers
from tests.harness.process import RUNNING
from tests.harness.process_guard import ProcessGuard

# How long an example takes says nothing on a machine that does other work; how long a test may take is `timeout`. A
# failing example prints how to reproduce it.
settings.register_profile("clockless", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("clockless")

_SHOWN = 8000  # characters of each log in the report of a failure


STARTERS = frozenset(("nats_backend", "gateway_factory", "streams_server", "own_server", "spark", "checkout"))
"""Fixtures that start processes: a test that needs one of them gets the mark ``processes``."""


class NatsFactory(Protocol):
    """Starts nats-servers, each with a store of its own."""

    def __call__(self, *, config: str = "", mqtt: bool = False) -> NatsServer: ...


class GatewayFactory(Protocol):
    """Starts gateways; ``start=False`` leaves that to the test, ``module`` is run in place of ``mqtt_nats``."""

    def __call__(
        self,
        nats: NatsServer | str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        port: int = 0,
        start: bool = True,
        module: str = "",
    ) -> Gateway: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    """Choose how nats-server runs, and for how long tests go on that can go on for long."""
    parser.addoption("--unit", action="store_true", help="only tests that start no process; one that does so fails")
    parser.addoption("--kills", type=int, default=4, help="processes that are killed while a job of Spark runs")
    parser.addoption("--rounds", type=int, default=50, help="rounds of each test of the order of packets")
    parser.addoption(
        "--load", action="store_true", help="these rounds beside a process for each processor that computes"
    )
    parser.addoption(
        "--nats-backend",
        choices=("process", "container"),
        default="process",
        help="run nats-server as a process (default) or through testcontainers",
    )


def pytest_configure() -> None:
    """End as after Ctrl-C when a time limit outside sends SIGTERM, so that fixtures end their processes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, one Spark session for all tests that need one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from tests.harness.scheduling import one_spark

    return one_spark(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For `make test-long`, do not load files that have no long test."""
    wanted = config.getoption("markexpr").split(" and ")
    if "long" not in wanted or not collection_path.is_file():
        return None
    return not has_long_tests(collection_path, _name(collection_path)) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, which with several processes (pytest-xdist) are run by one each."""
    items.sort(key=lambda item: (-seconds(_name(item.path)), not _is_spark(item)))
    known: set[str] = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        first = test not in known
        known.add(test)
        if STARTERS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("processes")
        if is_long(item.nodeid, first=first) and any(item.iter_markers("processes")):
            item.add_marker("long")
        if needs_consumers(item.nodeid):
            item.add_marker("consumers")
    if config.getoption("--unit"):
        others = [item for item in items if any(item.iter_markers("processes")) or any(item.iter_markers("soak"))]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def pytest_collection_finish() -> None:
    """Keep the collector of Python from all that has been collected: it stays, and is large."""
    gc.collect()
    gc.freeze()


@cache
def _guard() -> ProcessGuard:
    return ProcessGuard()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """With ``--unit``, no fixture starts a process."""
    with _guard().watch() if item.config.getoption("--unit") else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """With ``--unit``, no test starts a process."""
    with _guard().watch() if item.config.getoption("--unit") else contextlib.nullcontext():
        return (yield)


def _name(path: Path) -> str:
    """A file of the checkout as a node id begins."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


def _is_spark(item: pytest.Item) -> bool:
    return item.path.parent.name == "spark"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Show the logs of all servers and gateways when a test fails."""
    report = yield
    if report.failed:
        for process in RUNNING:
            report.sections.append((f"log of {process.name} {process.pid}", process.text[-_SHOWN:]))
    return report


class Logged(Budgeted):
    """The handler of a gateway's log; it keeps what it writes."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())

    @property
    def messages(self) -> list[str]:
        """Texts of the written records, without levels and times."""
        return self.stream.getvalue().splitlines() if isinstance(self.stream, io.StringIO) else []

    def clear(self) -> None:
        """Forget it."""
        self.setStream(io.StringIO())


@pytest.fixture
def logged() -> Iterator[Logged]:
    """What a gateway in this process would write to its log, within the budgets."""
    handler = Logged()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)
    handler.close()


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Async tests run as the gateway does, on uvloop."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def nats_backend(request: pytest.FixtureRequest) -> str:
    """``process`` or ``container``; the latter skips where no engine answers."""
    backend: str = request.config.getoption("--nats-backend")
    if backend == "container" and (obstacle := container_obstacle()):
        pytest.skip(f"--nats-backend=container: {obstacle}")
    return backend


@contextlib.contextmanager
def _nats_factory(backend: str, directory: Path) -> Iterator[NatsFactory]:
    servers: list[NatsServer] = []

    def start(*, config: str = "", mqtt: bool = False) -> NatsServer:
        server = make_server(backend, directory / f"nats{len(servers)}", config=config, mqtt=mqtt)
        servers.append(server)
        server.start()
        return server

    try:
        yield start
    finally:
        for server in servers:
            server.discard()


@pytest.fixture
def nats_factory(nats_backend: str, tmp_path: Path) -> Iterator[NatsFactory]:
    """Start nats-servers that this test may stop, kill and configure."""
    with _nats_factory(nats_backend, tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def nats_server(nats_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One nats-server for all tests of a module, which must leave it running."""
    with _nats_factory(nats_backend, tmp_path_factory.mktemp("nats")) as start:
        yield start()


@contextlib.contextmanager
def _gateway_factory(directory: Path) -> Iterator[GatewayFactory]:
    gateways: list[Gateway] = []

    def start_gateway(
        nats: NatsServer | str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        port: int = 0,
        start: bool = True,
        module: str = "",
    ) -> Gateway:
        url = nats if isinstance(nats, str) else nats.url
        log = directory / f"gateway{len(gateways)}.log"
        gateway = Gateway(log, url, arguments=arguments, env=env, module=module)
        gateway.port = port
        gateways.append(gateway)
        if start:
            gateway.start()
        return gateway

    try:
        yield start_gateway
    finally:
        for gateway in gateways:
            gateway.process.discard()
    _assert_no_traceback([gateway.process.log for gateway in gateways])


def _assert_no_traceback(logs: Sequence[Path]) -> None:
    """Whatever a test did to a gateway, none of its errors may have gone unhandled."""
    for log in logs:
        if log.exists():
            text = log.read_text(encoding="utf-8", errors="replace")
            assert "Traceback" not in text, text[-_SHOWN:]


@pytest.fixture
def gateway_factory(tmp_path: Path) -> Iterator[GatewayFactory]:
    """Start gateways that this test may stop and kill."""
    with _gateway_factory(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def gateway(nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One gateway on ``nats_server`` for all tests of a module, which must leave it running."""
    with _gateway_factory(tmp_path_factory.mktemp("gateway")) as start:
        yield start(nats_server)
