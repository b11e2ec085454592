# SPDX-License-Identifier: Apache-2.0
"""compose.yaml, as far as it can be checked without a container engine."""

import re
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr

from mqtt_nats.admin.access.administrators import Administrator, Administrators
from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.settings import Settings
from pyspark_mqtt_nats.jobs.commands import jobs as spark_jobs
from pyspark_mqtt_nats.jobs.flags import SOURCE
from pyspark_mqtt_nats.nats.access import INBOX_PREFIX
from tests.harness import raw
from tests.harness.gateway import Gateway
from tests.harness.installation import INSIDE, Secrets, SecuredNats
from tests.harness.nats import IMAGE, IMAGES, ROOT
from tests.harness.raw import Raw
from tests.harness.waiting import free_port
from tests.integration.test_ctl import ctl
from tests.transport.support import ports

SERVERS = ("nats-1", "nats-2", "nats-3")
GATEWAYS = {"gateway-1": 8883, "gateway-2": 8884}
DASHBOARDS = {"gateway-1": 8080, "gateway-2": 8081}
CONFIGURATION = ROOT / "deploy" / "compose" / "gateway.toml"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    assert set(found) == {"x-nats", "x-gateway", "services", "secrets", "configs", "networks", "volumes"}
    assert set(found["volumes"]) == {*SERVERS, "archive", "prometheus", "grafana"}
    return found


@pytest.fixture(scope="module")
def services(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["services"]
    assert set(found) == {*SERVERS, *GATEWAYS, "archive", "prometheus", "grafana"}
    return found


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return Secrets(tmp_path_factory.mktemp("secrets") / "made")


def configured(secrets: Secrets, directory: Path) -> Path:
    """The configuration of the gateways, with the paths of this machine."""
    file = directory / "gateway.toml"
    text = CONFIGURATION.read_text(encoding="utf-8").replace(INSIDE, str(secrets.directory))
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.processes
@pytest.mark.parametrize("name", GATEWAYS)
def test_the_gateways_get_settings_that_exist_and_are_valid(
    services: dict[str, Any], name: str, secrets: Secrets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = services[name]
    source, target, mode = service["volumes"][0].split(":")
    assert service["environment"] == {"MQTT_NATS_CONFIG": target}
    assert (ROOT / source).samefile(CONFIGURATION)
    assert mode == "ro"
    for variable, value in secrets.env("gateway.env").items():
        monkeypatch.setenv(variable, value)
    settings = Settings.load({}, configured(secrets, tmp_path))
    assert settings.admin_listen == "0.0.0.0:8080"
    assert "http://127.0.0.1:8080/readyz" in service["healthcheck"]["test"][-1]
    assert settings.nats == ("tls://nats:4222",)
    assert settings.nats_user == "gateway"
    (listener,) = settings.listeners
    assert settings.all_listeners == (listener,)
    assert (listener.listen, listener.type, listener.use_identity) == ("0.0.0.0:8883", "tls", "cn")
    assert service["ports"] == [f"127.0.0.1:{GATEWAYS[name]}:8883", f"127.0.0.1:{DASHBOARDS[name]}:8080"]
    for file in (CONFIGURATION, ROOT / "compose.yaml"):
        assert "ALLOW_ANONYMOUS" not in file.read_text(encoding="utf-8").upper()


@pytest.mark.processes
def test_without_secrets_nothing_starts(
    document: dict[str, Any], secrets: Secrets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No secret has a default: the files have to be there, and the gateway wants the token."""
    assert "${" not in (ROOT / "compose.yaml").read_text(encoding="utf-8")
    for name, one in document["secrets"].items():
        assert one == {"file": f"deploy/secrets/{name}"}
        assert (secrets.directory / name).stat().st_mode & 0o444 == 0o444  # containers have users of their own
    used = {name for service in document["services"].values() for name in service.get("secrets", ())}
    assert used == set(document["secrets"])
    assert not any(name.endswith("ca-key.pem") for name in used)
    for service in document["services"].values():
        if "env_file" in service:
            assert secrets.env(Path(service["env_file"]).name)
    assert "/deploy/secrets/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    monkeypatch.delenv("MQTT_NATS_ADMIN_TOKEN", raising=False)
    file = configured(secrets, tmp_path)
    without = [line for line in file.read_text(encoding="utf-8").splitlines() if "admin_tokens_file" not in line]
    file.write_text("\n".join(without), encoding="utf-8")
    with pytest.raises(StartupError, match="admin_token"):
        Settings.load({}, file)


@pytest.mark.parametrize("name", SERVERS)
def test_nats_runs_with_the_shipped_configuration(services: dict[str, Any], name: str) -> None:
    nats = services[name]
    assert nats["image"] == IMAGE
    assert nats["networks"] == {"core": {"aliases": ["nats"]}}
    source, target, mode = nats["volumes"][0].split(":")
    assert (ROOT / source).samefile(ROOT / "deploy" / "nats")
    assert mode == "ro"
    volume, data = nats["volumes"][1].split(":")
    assert volume == name
    assert nats["command"] == [f"-c={target}/cluster.conf", f"-sd={data}", f"--server_name={name}"]
    text = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "deploy" / "nats").iterdir())
    assert set(re.findall(rf"{INSIDE}/([\w.-]+)", text)) == set(nats["secrets"])
    plain = (ROOT / "nats-server.conf").read_text(encoding="utf-8")
    for line in ("max_payload: 8MB", 'sync_interval: "1s"'):  # as on a machine of one's own
        assert line in plain
        assert line in text


@pytest.mark.long
@pytest.mark.processes
def test_the_servers_form_a_cluster_and_two_gateways_use_it(
    services: dict[str, Any], secrets: Secrets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the containers run, with ports of loopback in place of their names."""
    routes = {name: free_port() for name in SERVERS}
    servers: list[SecuredNats] = []
    gateways: list[Gateway] = []
    try:
        for name in SERVERS:
            places = {"0.0.0.0:6222": f"127.0.0.1:{routes[name]}"}
            places |= {f"{other}:6222": f"127.0.0.1:{port}" for other, port in routes.items()}
            arguments = (services[name]["command"][-1],)
            servers.append(
                SecuredNats(tmp_path / name, secrets, main="cluster.conf", replaced=places, arguments=arguments)
            )
            servers[-1].launch()
        for server in servers:
            server.wait()
        urls = ",".join(server.url for server in servers)
        file = configured(secrets, tmp_path)
        text = file.read_text(encoding="utf-8").replace("0.0.0.0", "127.0.0.1")
        file.write_text(text.replace(":8080", ":0").replace(":8883", ":0"), encoding="utf-8")
        for name in GATEWAYS:  # without waiting for a leader, as in the containers
            flags = ("--config", str(file))
            gateway = Gateway(tmp_path / f"{name}.log", urls, arguments=flags, env=secrets.env("gateway.env"))
            gateways.append(gateway)
            gateway.start()
        with monkeypatch.context() as operator:
            for variable, value in servers[0].login("operator").items():
                operator.setenv(variable, value)
            text = ctl(urls, "status")
        assert re.findall(r"^(nats-\d) +2\.15\S* +mqtt +yes ", text, re.MULTILINE) == list(SERVERS), text
        assert text.count("  running  ") == len(GATEWAYS), text
        streams = re.findall(r"^(?:\$MQTT|KV)_\S+ +(\d) ", text, re.MULTILINE)
        assert set(streams) == {"3"}, text
        _devices(secrets, [port for gateway in gateways for port in ports(gateway, "MQTTS")])
    finally:
        for process in (*(gateway.process for gateway in gateways), *(server.process for server in servers)):
            process.discard()


class Device(Raw):
    """MQTT by hand over TLS, to a gateway of the containers."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        super().__init__(port, patience=30.0)
        self.socket = context.wrap_socket(self.socket, server_hostname="localhost")


def _answer(stranger: ssl.SSLSocket) -> bytes:
    """What somebody is answered who connects; nothing when it is closed."""
    try:
        stranger.sendall(raw.connect("stranger"))
        return stranger.recv(10)
    except OSError:
        return b""


def _devices(secrets: Secrets, at: list[int]) -> None:
    """A device publishes by one gateway and gets it from the other; nobody does without a certificate."""
    context = ssl.create_default_context(cafile=str(secrets.authority))
    plain = socket.create_connection(("127.0.0.1", at[0]), 30)
    with context.wrap_socket(plain, server_hostname="localhost") as stranger:
        assert _answer(stranger) == b""
    context.load_cert_chain(secrets.directory / "device.pem", secrets.directory / "device-key.pem")
    with Device(at[0], context) as one, Device(at[1], context) as other:
        for client, name in ((one, "one"), (other, "other")):
            client.send(raw.connect(name))
            assert client.expect(raw.CONNACK).body == b"\0\0"
        assert other.subscribe(("plant/#", 1)) == [1]
        one.send(raw.publish("plant/x", b"21", qos=1, id=1))
        assert one.expect(raw.PUBACK).id == 1
        assert other.expect(raw.PUBLISH).payload == b"21"


def test_who_reaches_whom(services: dict[str, Any]) -> None:
    """Prometheus and Grafana do not reach nats-server, nor a Spark job the metrics."""
    reached = {name: set(service["networks"]) for name, service in services.items()}
    assert reached == {
        **{name: {"core"} for name in SERVERS},
        **{name: {"core", "metrics"} for name in GATEWAYS},
        "archive": {"core"},
        "prometheus": {"metrics"},
        "grafana": {"metrics"},
    }


def test_containers_have_no_privileges(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service.get("read_only") or name == "grafana"


def test_images_are_pinned(services: dict[str, Any]) -> None:
    for name in ("prometheus", "grafana"):
        assert services[name]["image"] == IMAGES[name]


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
    assert archive["env_file"] == "deploy/secrets/spark.env"
    given = context.meta[SOURCE]
    assert given["servers"].startswith("tls://")
    assert given["readMode"] == "direct"  # its user may create no consumers
    users = (ROOT / "deploy" / "nats" / "users.conf").read_text(encoding="utf-8")
    assert f"user: {given['user']}," in users
    assert f'subscribe: [ "{given.get("inboxPrefix", INBOX_PREFIX)}.>" ]' in users


@pytest.mark.processes
def test_prometheus_is_a_viewer(services: dict[str, Any], secrets: Secrets, tmp_path: Path) -> None:
    """Nobody but the gateways has the administrator's token, and they know Prometheus as one who changes nothing."""
    (secret,) = services["prometheus"]["secrets"]
    token = secrets.text(secret)
    assert token != secrets.env("gateway.env")["MQTT_NATS_ADMIN_TOKEN"]
    assert not any("admin-token" in service.get("secrets", ()) for service in services.values())
    for name in GATEWAYS:
        assert "admin-tokens.toml" in services[name]["secrets"]
    text = configured(secrets, tmp_path).read_text(encoding="utf-8")
    (tokens_file,) = re.findall(r'^admin_tokens_file = "(.*)"$', text, re.MULTILINE)
    settings = Settings(admin_listen="127.0.0.1:0", admin_token=SecretStr("x" * 16), admin_tokens_file=tokens_file)
    assert Administrators.load(settings).of(token.encode()) == Administrator("prometheus", "viewer")


def test_prometheus_asks_the_gateways_with_its_token(document: dict[str, Any], services: dict[str, Any]) -> None:
    (job,) = yaml.safe_load(document["configs"]["prometheus"]["content"])["scrape_configs"]
    (secret,) = services["prometheus"]["secrets"]
    assert job["authorization"] == {"credentials_file": f"{INSIDE}/{secret}"}
    assert job["static_configs"] == [{"targets": [f"{name}:8080" for name in GATEWAYS]}]
    (source,) = services["prometheus"]["configs"]
    assert f"--config.file={source['target']}" in services["prometheus"]["command"]
    assert services["prometheus"]["profiles"] == services["grafana"]["profiles"] == ["metrics"]


def test_grafana_has_no_known_password(services: dict[str, Any]) -> None:
    grafana = services["grafana"]
    (secret,) = grafana["secrets"]
    assert grafana["environment"] == {"GF_SECURITY_ADMIN_PASSWORD__FILE": f"{INSIDE}/{secret}"}


def test_what_is_mounted_is_there(services: dict[str, Any]) -> None:
    for service in services.values():
        for volume in service.get("volumes", ()):
            if volume.startswith("."):
                assert (ROOT / volume.split(":")[0]).exists(), volume


@pytest.mark.processes
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
