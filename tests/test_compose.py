# SPDX-License-Identifier: Apache-2.0
"""compose.yaml, as far as it can be checked without a container engine."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mqtt_nats.config.settings import Settings, env_name
from mqtt_nats.gateway.embedded import find_binary
from pyspark_mqtt_nats.jobs.commands import jobs as spark_jobs
from tests.harness.gateway import Gateway
from tests.harness.nats import IMAGE, ROOT
from tests.harness.process import LoggedProcess, wait_ready
from tests.harness.waiting import free_port
from tests.integration.test_ctl import ctl

SERVERS = ("nats-1", "nats-2", "nats-3")
GATEWAYS = {"gateway-1": 1883, "gateway-2": 1884}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    document = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    found: dict[str, Any] = document["services"]
    assert set(document) == {"x-nats", "x-gateway", "services", "configs", "volumes"}
    assert set(found) == {*SERVERS, *GATEWAYS, "archive", "prometheus", "grafana"}
    assert set(document["volumes"]) == {*SERVERS, "archive", "prometheus", "grafana"}
    return found


def plain(text: str) -> str:
    """What compose makes of a text when no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


@pytest.mark.parametrize("name", GATEWAYS)
def test_the_gateways_get_settings_that_exist_and_are_valid(services: dict[str, Any], name: str) -> None:
    environment = services[name]["environment"]
    names = {env_name(name): name for name in Settings.model_fields}
    settings = Settings.load({names[variable]: plain(value) for variable, value in environment.items()})
    assert settings.admin_listen == "0.0.0.0:8080"
    assert "http://127.0.0.1:8080/readyz" in services[name]["healthcheck"]["test"][-1]
    assert settings.nats == ("nats://nats:4222",)
    host, port = settings.listen_address
    assert host == "0.0.0.0"
    assert services[name]["ports"] == [f"127.0.0.1:{GATEWAYS[name]}:{port}"]


@pytest.mark.parametrize("name", SERVERS)
def test_nats_runs_with_the_shipped_configuration(services: dict[str, Any], name: str) -> None:
    nats = services[name]
    assert nats["image"] == IMAGE
    assert nats["networks"] == {"default": {"aliases": ["nats"]}}
    source, target, mode = nats["volumes"][0].split(":")
    assert (ROOT / source).samefile(ROOT / "nats-server.conf")
    assert mode == "ro"
    volume, data = nats["volumes"][1].split(":")
    assert volume == name
    assert nats["command"][:2] == [f"-c={target}", f"-sd={data}"]
    assert nats["command"][-1] == f"--server_name={name}"
    assert nats["command"][:-1] == services["nats-1"]["command"][:-1]


def test_the_servers_form_a_cluster_and_two_gateways_use_it(services: dict[str, Any], tmp_path: Path) -> None:
    """The command lines of the containers, with ports of loopback in place of their names."""
    routes = {name: free_port() for name in SERVERS}
    ports = {name: free_port() for name in SERVERS}
    processes: list[LoggedProcess] = []
    gateways: list[Gateway] = []
    try:
        for name in SERVERS:
            command = [_local(one, name, routes, tmp_path) for one in services[name]["command"]]
            processes.append(process := LoggedProcess(name, tmp_path / f"{name}.log"))
            process.start([str(find_binary()), *command, f"-p={ports[name]}"])
        for process in processes:
            wait_ready(process, "(Server is ready)", 30.0)
        urls = ",".join(f"nats://127.0.0.1:{port}" for port in ports.values())
        for name in GATEWAYS:  # without waiting for a leader, as in the containers
            gateways.append(gateway := Gateway(tmp_path / f"{name}.log", urls))
            gateway.start()
        text = ctl(urls, "status")
        assert re.findall(r"^(nats-\d) +2\.15\S* +mqtt +yes ", text, re.MULTILINE) == list(SERVERS), text
        assert text.count("  running  ") == len(GATEWAYS), text
        streams = re.findall(r"^(?:\$MQTT|KV)_\S+ +(\d) ", text, re.MULTILINE)
        assert set(streams) == {"3"}, text
    finally:
        for each in (*(gateway.process for gateway in gateways), *processes):
            each.discard()


def _local(argument: str, name: str, routes: dict[str, int], directory: Path) -> str:
    """An argument of nats-server for this machine."""
    for other, port in routes.items():
        argument = argument.replace(f"nats://{other}:6222", f"nats://127.0.0.1:{port}")
    flag, _, value = argument.partition("=")
    replaced = {
        "-c": str(ROOT / "nats-server.conf"),
        "-sd": str(directory / name),
        "-a": "127.0.0.1",
        "-m": "0",
        "--cluster": f"nats://127.0.0.1:{routes[name]}",
    }
    return f"{flag}={replaced.get(flag, value)}"


def test_only_loopback_is_published(services: dict[str, Any]) -> None:
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_the_gateways_wait_for_healthy_nats_servers(services: dict[str, Any]) -> None:
    for name in GATEWAYS:
        assert services[name]["depends_on"] == {server: {"condition": "service_healthy"} for server in SERVERS}
    for name in SERVERS:
        assert "healthz" in " ".join(services[name]["healthcheck"]["test"])


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


def test_prometheus_asks_the_gateways_with_their_token(services: dict[str, Any]) -> None:
    text = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["configs"]["prometheus"]["content"]
    (job,) = yaml.safe_load(plain(text))["scrape_configs"]
    token = plain(services["gateway-1"]["environment"]["MQTT_NATS_ADMIN_TOKEN"])
    assert job["authorization"]["credentials"] == token
    assert job["static_configs"] == [{"targets": [f"{name}:8080" for name in GATEWAYS]}]
    (source,) = services["prometheus"]["configs"]
    assert f"--config.file={source['target']}" in services["prometheus"]["command"]
    assert services["prometheus"]["profiles"] == services["grafana"]["profiles"] == ["metrics"]


def test_what_is_mounted_is_there(services: dict[str, Any]) -> None:
    for service in services.values():
        for volume in service.get("volumes", ()):
            if volume.startswith("."):
                assert (ROOT / volume.split(":")[0]).exists(), volume


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
