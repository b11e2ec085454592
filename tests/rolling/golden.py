# SPDX-License-Identifier: Apache-2.0
"""Stores of nats-server that a gateway has filled, in ``golden/``: what a later gateway has to be able to continue.

``python -m tests.rolling.golden`` writes them with the present gateway. They are written anew only when the promise
begins anew: before a first release, or with a new version of session records.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tarfile
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tests.harness.gateway import Gateway
from tests.harness.nats import ProcessNatsServer
from tests.rolling.halves import Left, leave

DIRECTORY: Final = Path(__file__).with_name("golden")

SETTINGS: Final = {
    "consumers": ("--session-positions", "consumers"),
    "records": ("--session-positions", "records"),
}
"""Arguments of the gateway that has written a store, by the name of the store."""

STORES: Final = ("plain", *SETTINGS)
"""Names of the stores; consumers of sessions have delivered at the gateway that has written "plain", an older one."""

RETENTION: Final = "9000000000"
"""Seconds for which messages are kept: a store is read whenever tests run."""

_LEFT: Final = "left.json"


def unpack(name: str, directory: Path) -> Left:
    """Write a store below ``directory``, where nats-server's own is; return what its clients have not completed."""
    directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(DIRECTORY / f"{name}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return Left(**json.loads((directory / _LEFT).read_bytes()))


def write(name: str) -> None:
    """Fill a store with a gateway that dies while a client is connected."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        server = ProcessNatsServer(directory)
        server.start()
        arguments = ("--message-retention", RETENTION, *SETTINGS[name])
        gateway = Gateway(directory / "gateway.log", server.url, arguments=arguments)
        try:
            gateway.start(port=0)
            left = asyncio.run(_leave(gateway))
            server.stop()
        finally:
            gateway.process.discard()
            server.discard()
        (directory / _LEFT).write_text(json.dumps(asdict(left)) + "\n", encoding="utf-8")
        DIRECTORY.mkdir(exist_ok=True)
        with tarfile.open(DIRECTORY / f"{name}.tar.xz", "w:xz") as archive:
            for part in ("store", _LEFT):
                archive.add(directory / part, part, filter=_anonymous)


async def _leave(gateway: Gateway) -> Left:
    left, mortal = await leave(gateway.port)
    gateway.kill()
    mortal.drop()
    return left


def _anonymous(one: tarfile.TarInfo) -> tarfile.TarInfo:
    one.uid = one.gid = 0
    one.uname = one.gname = ""
    return one


if __name__ == "__main__":
    for _name in sys.argv[1:] or SETTINGS:
        write(_name)
