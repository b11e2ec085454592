# SPDX-License-Identifier: Apache-2.0
"""R20: what a gateway reads again on SIGHUP changes again and again while messages flow."""

from __future__ import annotations

import asyncio
import shutil
import signal
import ssl
import time
from pathlib import Path

from cryptography import x509

from tests.backbone.certificates import Authority, Pair
from tests.chaos.experiment import Experiment, Result, Setting
from tests.chaos.workload import Workload
from tests.harness.gateway import Gateway
from tests.harness.raw import connect, subscribe
from tests.harness.waiting import aeventually
from tests.transport.support import ports, tls, write_config

ROUNDS = 8
ROUNDS_LONG = 600
PAUSE = 0.25
"""Seconds between two changes, at least."""
SPOILT_EVERY = 4
"""Every so many changes is one that cannot be used."""
WAIT = 60.0
PROBES = 4
"""Connections, for each worker, that look for the new certificate after each change."""


RULES = """
[[rules]]
effect = "deny"
topics = "probe/{denied}"

[[rules]]
effect = "allow"
topics = "#"
"""


class Files:
    """What the gateway reads."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.authority = Authority(directory)
        self.pair = Pair(directory / "cert.pem", directory / "key.pem")
        self.trust = ssl.create_default_context(cafile=str(self.authority.file))
        self.serial = 0
        self.rules = directory / "acl.toml"
        self.denied = 0
        """Which of the two topics of the probes the rules deny."""
        self.renew()

    def renew(self) -> None:
        """Another certificate, and other rules."""
        found = self.authority.issue("gateway")
        for new, place in zip(found, self.pair, strict=True):
            shutil.copy(new, place)
        self.serial = x509.load_pem_x509_certificate(found.certificate.read_bytes()).serial_number
        self.denied = 1 - self.denied
        self.rules.write_text(RULES.format(denied=self.denied), encoding="utf-8")

    def spoil(self) -> None:
        """A key that does not belong to the certificate."""
        shutil.copy(self.authority.issue("other").key, self.pair.key)

    def spoil_rules(self) -> None:
        """Rules that cannot be read."""
        self.rules.write_text(RULES.format(denied=self.denied) + "[[rules]]\neffect = 'maybe'\n", encoding="utf-8")


async def _denied(port: int, files: Files, name: str) -> list[int]:
    """Which of the two topics a new client may not subscribe."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=files.trust)
    writer.write(connect(name) + subscribe(("probe/0", 0), ("probe/1", 0)))
    answer = await reader.readexactly(4 + 6)
    writer.transport.abort()
    return [index for index, code in enumerate(answer[-2:]) if code == 0x80]


async def _serial(port: int, files: Files) -> int:
    """Which certificate a new connection is shown."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=files.trust)
    found = writer.get_extra_info("peercert")["serialNumber"]
    writer.transport.abort()
    return int(found, 16)


class Reloads:
    """Changes the files, and tells the gateway."""

    def __init__(self, gateway: Gateway, files: Files, workers: int, result: Result) -> None:
        self.gateway = gateway
        self.files = files
        self.workers = workers
        self.result = result
        self.done = self.refused = 0
        self.longest = 0.0
        (self.port,) = ports(gateway, "MQTTS")

    async def run(self, rounds: int) -> None:
        """All changes."""
        for number in range(1, rounds + 1):
            shown, denied = self.files.serial, self.files.denied
            spoilt = number % SPOILT_EVERY == 0
            spoilt_rules = number % SPOILT_EVERY == 2
            self.files.renew()
            if spoilt:
                self.files.spoil()
            if spoilt_rules:
                self.files.spoil_rules()
                self.files.denied = denied
            begun = time.monotonic()
            self.gateway.process.send(signal.SIGHUP)
            self.done += 1
            self.refused += spoilt or spoilt_rules
            await aeventually(self._read, WAIT, what="the files are read")
            self.longest = max(self.longest, time.monotonic() - begun)
            expected = shown if spoilt else self.files.serial
            self.files.serial = expected
            for probe in range(PROBES * self.workers):
                if await _denied(self.port, self.files, f"probe{probe}") != [self.files.denied]:
                    self.result.violations.append(f"change {number}: a new client is held against other rules")
                if await _serial(self.port, self.files) != expected:
                    self.result.violations.append(f"change {number}: a new connection is shown another certificate")
            await asyncio.sleep(PAUSE)

    def _read(self) -> bool:
        log = self.gateway.log
        read = log.count(": files are read again") == (self.done - self.refused) * self.workers
        return read and log.count("the former files stay in use: ") == self.refused * self.workers


async def _run(setting: Setting) -> Result:
    server = setting.nats()
    result = Result()
    reloads: list[Reloads] = []
    figures: dict[str, int | float | str] = dict.fromkeys(("messages", "lost", "duplicated", "longest_pause_ms"), 0)
    connections = again = 0
    for workers in (1, 2):
        files = Files(setting.directory / f"files {workers}")
        config = write_config(setting.directory / f"{workers}.toml", tls(files.pair))
        acl = ("--acl-file", str(files.rules))
        gateway = setting.gateway(server.url, "--config", config, "--workers", str(workers), *acl)
        one = Reloads(gateway, files, workers, result)
        reloads.append(one)
        load = [
            Workload(
                setting.directory / f"histories {workers} {qos}",
                [one.port],
                publishers=3,
                subscribers=3,
                qos=qos,
                rate=100,
                prefix=f"r{workers}{qos}",
                restless=0.0,
            )
            for qos in (1, 2)
        ]
        clients = [client for part in load for client in part.clients]
        for client in clients:
            client.tls = files.trust
        await asyncio.gather(*(part.start() for part in load))
        await one.run(ROUNDS_LONG if setting.long else ROUNDS)
        for verdict in await asyncio.gather(*(part.finish() for part in load)):
            result.violations += verdict.lines()
            for name in ("lost", "duplicated"):
                figures[name] = int(figures[name]) + int(verdict.figures[name])
            figures["messages"] = int(figures["messages"]) + int(verdict.figures["acked"])
            pause = float(verdict.figures["longest_pause_ms"])
            figures["longest_pause_ms"] = max(float(figures["longest_pause_ms"]), pause)
        connections += len(clients)
        again += sum(client.connections - 1 for client in clients)
        gateway.term()
    if again:
        result.violations.append(f"{again} connections were dropped")
    result.figures = {
        "messages": figures.pop("messages"),
        "changes": sum(one.done for one in reloads),
        "refused_changes": sum(one.refused for one in reloads),
        "connections": connections,
        "dropped": again,
        **figures,
        "longest_change_ms": round(max(one.longest for one in reloads) * 1000),
    }
    return result


EXPERIMENTS = [
    Experiment(
        "R20",
        "Certificates and access rules change, and some cannot be used, while messages flow over TLS; one process, "
        "and two workers",
        "No connection is dropped, no message lost; each new connection is shown the last usable certificate and held "
        "against the last usable rules",
        _run,
    )
]
