# SPDX-License-Identifier: Apache-2.0
"""compose.yaml, as far as it can be checked without a container engine."""

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from mqtt_nats.config import Settings, env_name
from tests.harness.nats import IMAGE, ROOT


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    document = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    found: dict[str, Any] = document["services"]
    assert set(document) == {"services", "volumes"}
    assert set(found) == {"nats", "gateway"}
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
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_the_gateway_waits_for_a_healthy_nats_server(services: dict[str, Any]) -> None:
    assert services["gateway"]["depends_on"] == {"nats": {"condition": "service_healthy"}}
    assert "healthz" in " ".join(services["nats"]["healthcheck"]["test"])


def test_the_image_does_not_run_as_root() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    last_stage = text[text.rindex("\nFROM ") :]
    user = re.search(r"^USER (\d+)$", last_stage, re.MULTILINE)
    assert user is not None
    assert int(user.group(1)) > 0
    assert last_stage.index("\nUSER ") < last_stage.index("\nENTRYPOINT ")


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
