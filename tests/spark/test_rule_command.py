# SPDX-License-Identifier: Apache-2.0
"""The command `rule` as a service runs it: its log is a file, and nats-server goes away for a while."""

import re
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import GatewayFactory, NatsFactory
from tests.harness.nats import ROOT
from tests.harness.process import LoggedProcess, wait_ready
from tests.harness.waiting import eventually

WAIT: Final = 200.0  # seconds; a busy machine

RULES: Final = """
checkpoint = "state"
[[rules]]
name = "hot"
topics = ["site/#"]
query = "SELECT topic FROM messages"
topic = "alerts/{topic}"
"""


@pytest.mark.timeout(600)
def test_an_outage_is_told_and_nothing_is_coloured(
    nats_factory: NatsFactory, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    server = nats_factory()
    gateway_factory(server)  # makes the streams
    file = tmp_path / "rules.toml"
    file.write_text(RULES, encoding="utf-8")
    job = LoggedProcess("rule", tmp_path / "rule.log")
    words = ["rule", str(file), "--servers", server.url, "--metrics-port", "0", "--log", str(tmp_path / "spark.log")]
    try:
        job.start([sys.executable, "-m", "mqtt_nats", "spark", *words], {"NO_COLOR": "1"}, ROOT)
        page = wait_ready(job, r"metrics at (http://\S+)$", WAIT)
        wait_ready(job, "(rule hot: it runs)$", WAIT)

        def metrics() -> str:
            with urllib.request.urlopen(page, timeout=10) as answer:
                return str(answer.read().decode())

        eventually(lambda: 'rule_up{rule="hot"} 1' in metrics(), WAIT)
        server.kill()
        refused = wait_ready(job, "^rule: the connection to NATS is lost: (cannot connect to .* refused .*)$", 30)
        eventually(lambda: f'error_info{{rule="hot",error="{refused}"}} 1' in metrics(), 30)
        assert 'rule_up{rule="hot"} 0' in metrics()
        server.start()
        wait_ready(job, r"^rule: the (connection to NATS is back after \d+ s)$", 60)
        eventually(lambda: 'rule_up{rule="hot"} 1' in metrics(), WAIT)
        job.send(signal.SIGTERM)
        assert job.wait(60) == 0
    finally:
        job.discard()
    for text in (job.text, (tmp_path / "spark.log").read_text(encoding="utf-8")):
        assert re.search(r"[\x1b\r]", text) is None, repr(text)
