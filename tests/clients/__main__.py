# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.clients [NAME...] [--report FILE]``: run the clients of the kit, and print a table.

Exit status: 0 when every client that can be had here passed, 1 when one did not, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.clients.build import MissingError
from tests.clients.kit import CLIENTS, Client
from tests.clients.place import Place, place
from tests.clients.report import HEAD, Row, terminal, write
from tests.clients.scenarios import MQTT, Command, Scenario


def main() -> int:
    """Parse the command line, run, and print what came out."""
    known = {client.name: client for client in CLIENTS}
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description="Clients that people use.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(known)}; all when left out")
    parser.add_argument("--report", type=Path, metavar="FILE", help="Markdown file whose table gets the rows")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers and programs end with us
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"no client is called {', '.join(unknown)}; there are {', '.join(known)}")
    missing: list[str] = []
    rows: list[Row] = []
    print(HEAD, flush=True)
    for name in arguments.names or known:
        try:
            command = known[name].prepare()
        except MissingError as error:
            missing.append(f"skipped: {name}: {error}")
            print(missing[-1], flush=True)
            continue
        rows += [_run(known[name], command, version) for version in known[name].versions]
    if arguments.report is not None:
        order = [(client.name, MQTT[version]) for client in CLIENTS for version in client.versions]
        write(arguments.report, rows, order)
    failed = sum(not row.passed for row in rows)
    print(f"{len(rows) - failed} passed, {failed} failed, {len(missing)} skipped")
    return 1 if failed else 0


def _run(client: Client, command: Command, version: str) -> Row:
    """All scenarios of a client with a version of MQTT, on a gateway of their own."""
    directory = Path(tempfile.mkdtemp(prefix="clients-"))
    began = time.monotonic()
    with place(directory) as where:
        scenarios = client.scenarios(command, where, version)
        outcomes = {name: _outcome(where, name, scenarios[name]) for name in scenarios}
    row = Row(client.name, command.version, MQTT[version], outcomes, time.monotonic() - began)
    print(terminal(row.cells()), flush=True)
    for name, outcome in outcomes.items():
        if outcome:
            print(f"  {name}: {outcome}", flush=True)
    if row.passed:
        shutil.rmtree(directory)
    else:
        print(f"  logs are in {directory}", flush=True)
    return row


def _outcome(where: Place, name: str, scenario: Scenario) -> str:
    """Run one scenario: empty, or what went wrong."""
    try:
        scenario()
        assert "Traceback" not in where.gateway.process.log.read_text(encoding="utf-8"), (
            "an error of the gateway is in its log"
        )
    except Exception as error:  # the others are run all the same
        (where.directory / f"{name}.traceback").write_text(traceback.format_exc(), encoding="utf-8")
        return " ".join(str(error).split())[:300] or type(error).__name__
    return ""


if __name__ == "__main__":
    sys.exit(main())
