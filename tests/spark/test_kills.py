# SPDX-License-Identifier: Apache-2.0
"""Kills of the rig, against a job whose JVM is about to start a process."""

import sys
from pathlib import Path
from typing import cast

import pytest

from tests.harness.nats import NatsServer
from tests.harness.waiting import eventually
from tests.spark import kills
from tests.spark.kills import Job, kill_driver

# The background process is a copy, as what a JVM is about to start: the same name, the same arguments.
JVM = """\
#!/bin/sh
(while kill -0 $$ 2>/dev/null; do sleep 0.05; done) &
wait
exec sleep 300
"""

JOB = """\
import subprocess, sys
sys.exit(abs(subprocess.call([sys.argv[1], "org.apache.spark.deploy.SparkSubmit"])))
"""


@pytest.mark.processes
def test_the_driver_is_killed_while_there_is_a_copy_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "PATIENCE", 30.0)
    java = tmp_path / "java"
    java.write_text(JVM, encoding="utf-8")
    java.chmod(0o755)
    job = Job(tmp_path, tmp_path / "checkpoint", [])
    try:
        job.process.start([sys.executable, "-c", JOB, str(java)])
        eventually(lambda: len(job.children("SparkSubmit", "java")) == 2, 30)
        kill_driver(job, cast(NatsServer, None))
        assert not job.process.alive
    finally:
        job.process.discard()
