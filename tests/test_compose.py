# SPDX-License-Identifier: Apache-2.0
"""compose.yaml, as far as it can be checked without a container engine."""

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from mqtt_nats.config import Settings, env_name
from pyspark_mqtt_nats.jobs.commands import jobs as spark_jobs
from tests.harness.nats import IMAGE, ROOT


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    document = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    found: dict[str, Any] = document["services"]
    assert set(document) == {"services", "volumes"}
    assert set(found) == {"nats", "gateway", "archive"}
    return found


def test_the_gateway_gets_settings_that_exist_and_are_valid(services: dict[str, Any]) -> None:
    environment = services["gateway"]["environment"]
    names = {env_name(name): name for name in Settings.model_fields}
    settings = Settings.load({names[variable]: value for variable, value in environment.items()})
    assert settings.nats == ("nats://nats:4222",)
    host, port = settings.listen_address
    assert host == "0.0.0.0"
    assert f"127.0.0.1:{port}:{port}" in services["gateway"]["ports"]


def test_nats_runs_with_the_shipped_configuration(services: dict[str, Any]) -> None:
    nats = services["nats"]
    assert nats["image"] == IMAGE
    source, target, mode = nats["volumes"][0].split(":")
    assert (ROOT / source).samefile(ROOT / "nats-server.conf")
    assert mode == "ro"
    assert nats["command"][:4] == ["-c", target, "-sd", nats["volumes"][1].split(":")[1]]


def test_only_loopback_is_published(services: dict[str, Any]) -> None:
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_the_gateway_waits_for_a_healthy_nats_server(services: dict[str, Any]) -> None:
    assert services["gateway"]["depends_on"] == {"nats": {"condition": "service_healthy"}}
    assert "healthz" in " ".join(services["nats"]["healthcheck"]["test"])


def stages() -> dict[str, str]:
    """The stages of the Dockerfile, by name; the last one has none."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    found = {}
    for stage in text.split("\nFROM ")[1:]:
        name = re.match(r"\S+ AS (\S+)\n", stage)
        found[name.group(1) if name else ""] = stage
    return found


@pytest.mark.parametrize("stage", ["", "spark"])
def test_the_images_do_not_run_as_root(stage: str) -> None:
    text = stages()[stage]
    user = re.search(r"^USER (\d+)$", text, re.MULTILINE)
    assert user is not None
    assert int(user.group(1)) > 0
    assert text.index("\nUSER ") < text.index("\nENTRYPOINT ")


def test_the_spark_job_is_one_that_there_is(services: dict[str, Any]) -> None:
    """Only on demand, with a command line that the job understands."""
    archive = services["archive"]
    assert archive["profiles"] == ["spark"]
    assert archive["build"]["target"] in stages()
    name, *arguments = archive["command"]
    job = spark_jobs.commands[name]
    context = job.make_context(name, list(arguments))
    assert context.params["output"].startswith("/archive/")
    assert archive["volumes"] == ["archive:/archive"]


def test_docker_compose_accepts_it() -> None:
    docker = shutil.which("docker")
    if docker is None:
        pytest.skip("the docker command is not installed")
    if subprocess.run([docker, "compose", "version"], capture_output=True, timeout=20).returncode:
        pytest.skip("the docker command has no compose plugin")
    checked = subprocess.run(
        [docker, "compose", "-f", str(ROOT / "compose.yaml"), "config", "--quiet"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert checked.returncode == 0, checked.stderr
