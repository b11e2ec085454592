# SPDX-License-Identifier: Apache-2.0
"""nats-server as the chart of NATS configures it with the values of deploy/: rendered by helm, and run."""

from __future__ import annotations

import contextlib
import re
import ssl
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import nats
import nats.errors
import pytest
import yaml

from mqtt_nats.gateway.embedded import find_binary
from tests.harness.gateway import Gateway
from tests.harness.installation import Secrets
from tests.harness.nats import IMAGE
from tests.harness.process import LoggedProcess, wait_ready
from tests.harness.raw5 import Raw5
from tests.harness.shell import BUILD_WAIT, find_helm, find_program
from tests.harness.waiting import aeventually, free_port
from tests.test_helm import CHART_OF_NATS, CLUSTER, VALUES_OF_NATS, run, with_chart_of_nats

PATIENCE: Final = 30.0

pytestmark = [pytest.mark.timeout(BUILD_WAIT + 120), pytest.mark.processes]
if find_program("helm") is None:
    pytestmark.append(pytest.mark.soak)  # to build it takes minutes of CPU: `make test-soak`


@pytest.fixture(scope="module", params=["nats-values.yaml", "the chart of the gateways"])
def documents(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What helm makes of the chart of NATS, by itself or with the gateways."""
    if request.param == VALUES_OF_NATS.name:
        arguments: tuple[str | Path, ...] = ("nats", CHART_OF_NATS, "--values", VALUES_OF_NATS)
    else:
        chart = with_chart_of_nats(tmp_path_factory.mktemp("charts") / "mqtt-nats")
        arguments = ("site", chart, "--set", "nats.enabled=true")
    done = run(find_helm(), "template", *arguments, *CLUSTER)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def found(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (one,) = [one for one in documents if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return one


class Rendered:
    """Three nats-servers with the rendered configuration, and files and ports of this machine.

    Args:
        directory: for configurations, stores and logs.
        text: of nats.conf.
    """

    def __init__(self, directory: Path, text: str) -> None:
        self.directory = directory
        self.secrets = Secrets(directory / "secrets")
        self.ports = [free_port() for _ in range(3)]
        self.routes = [free_port() for _ in range(3)]
        self.processes: list[LoggedProcess] = []
        for number in range(3):
            self._write(number, text)

    def _write(self, number: int, text: str) -> None:
        place = self.directory / f"nats-{number}"
        place.mkdir()
        changes = {
            "/etc/nats-certs/nats/tls.crt": f"{self.secrets.directory}/nats.pem",
            "/etc/nats-certs/nats/tls.key": f"{self.secrets.directory}/nats-key.pem",
            "/etc/nats-certs/cluster/tls.crt": f"{self.secrets.directory}/route.pem",
            "/etc/nats-certs/cluster/tls.key": f"{self.secrets.directory}/route-key.pem",
            "/etc/nats-certs/cluster/ca.crt": f"{self.secrets.directory}/routes-ca.pem",
            '"store_dir": "/data"': f'"store_dir": "{place}/data"',
            "/var/run/nats/nats.pid": f"{place}/nats.pid",
            '"port": 4222': f'"listen": "127.0.0.1:{self.ports[number]}"',
            '"port": 6222': f'"listen": "127.0.0.1:{self.routes[number]}"',
            '"http_port": 8222': f'"http": "127.0.0.1:{free_port()}"',
        }
        changes |= {f"nats-{other}.nats-headless:6222": f"127.0.0.1:{port}" for other, port in enumerate(self.routes)}
        for old, new in changes.items():
            assert old in text or "certs/nats" in old, old
            text = text.replace(old, new)
        (place / "nats.conf").write_text(text, encoding="utf-8")

    def start(self) -> None:
        """Start them, and wait until clients can connect."""
        for number in range(3):
            process = LoggedProcess("nats-server", self.directory / f"nats-{number}" / "nats-server.log")
            self.processes.append(process)
            environment = {**self.secrets.env("nats.env"), "SERVER_NAME": f"nats-{number}"}
            process.start([str(find_binary()), "-c", str(self.directory / f"nats-{number}" / "nats.conf")], environment)
        for process in self.processes:
            wait_ready(process, "(Server is ready)", PATIENCE)

    @contextlib.contextmanager
    def stranger(self, certificate: str) -> Iterator[str]:
        """Run a nats-server without users that wants to be a route; its URL."""
        place = self.directory / f"stranger-{certificate}"
        place.mkdir()
        others = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self.routes)
        files, port = self.secrets.directory, free_port()
        (place / "nats.conf").write_text(
            f"""
server_name: "stranger"
listen: "127.0.0.1:{port}"
cluster {{
  name: "nats", listen: "127.0.0.1:{free_port()}", routes: [ {others} ]
  tls {{
    cert_file: "{files}/{certificate}.pem", key_file: "{files}/{certificate}-key.pem"
    ca_file: "{files}/routes-ca.pem", insecure: true
  }}
}}
""",
            encoding="utf-8",
        )
        process = LoggedProcess("nats-server", place / "nats-server.log")
        try:
            process.start([str(find_binary()), "-c", str(place / "nats.conf")])
            wait_ready(process, "(Listening for route connections)", PATIENCE)
            yield f"nats://127.0.0.1:{port}"
        finally:
            process.discard()

    async def publish(self) -> None:
        """Publish a message at a server of the cluster."""
        context = ssl.create_default_context(cafile=str(self.secrets.authority))
        password = self.secrets.text("gateway-password")
        url = f"tls://127.0.0.1:{self.ports[0]}"
        client = await nats.connect(url, user="gateway", password=password, tls=context)
        await client.publish("plant.secret", b"secret")
        await client.flush()
        await client.close()


@pytest.fixture(scope="module")
def servers(documents: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rendered]:
    text = found(documents, "ConfigMap", "nats-config")["data"]["nats.conf"]
    made = Rendered(tmp_path_factory.mktemp("rendered"), text)
    try:
        made.start()
        yield made
    finally:
        for process in made.processes:
            process.discard()


async def test_nobody_gets_in_without_a_login(servers: Rendered) -> None:
    context = ssl.create_default_context(cafile=str(servers.secrets.authority))
    for login in ({}, {"user": "gateway", "password": "guessed"}, {"user": "nobody", "password": "x"}):
        with pytest.raises(nats.errors.Error, match="Authorization Violation"):
            await nats.connect(f"tls://127.0.0.1:{servers.ports[0]}", tls=context, allow_reconnect=False, **login)


def test_a_gateway_serves(servers: Rendered, tmp_path: Path) -> None:
    """With TLS and the user that the manifests and the chart give it."""
    password = servers.secrets.text("gateway-password")
    urls = ",".join(f"tls://127.0.0.1:{port}" for port in servers.ports)
    login = {"NATS": urls, "NATS_USER": "gateway", "NATS_PASSWORD": password}
    login["NATS_TLS_CA"] = str(servers.secrets.authority)
    gateway = Gateway(tmp_path / "gateway.log", "", env={f"MQTT_NATS_{name}": one for name, one in login.items()})
    try:
        gateway.start()
        with Raw5.open(gateway.port, "client") as client:
            client.deliver("plant/a", b"x", qos=1)
    finally:
        gateway.process.discard()


def test_routes_find_their_names_in_the_certificate(documents: list[dict[str, Any]], servers: Rendered) -> None:
    """And gateways those of the Service."""
    text = found(documents, "ConfigMap", "nats-config")["data"]["nats.conf"]
    names = re.findall(r"tls://(\S+):6222", text)
    assert len(names) == 3
    service = found(documents, "Service", "nats")["metadata"]["name"]
    for certificate, name in (*(("route", name) for name in names), ("nats", service), ("nats", f"{service}.nats.svc")):
        file = servers.secrets.directory / f"{certificate}.pem"
        command = ["openssl", "x509", "-in", str(file), "-noout", "-checkhost", name]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        assert "does match certificate" in said


def test_passwords_come_from_a_secret(documents: list[dict[str, Any]]) -> None:
    pod = found(documents, "StatefulSet", "nats")["spec"]["template"]["spec"]
    (server,) = [one for one in pod["containers"] if one["name"] == "nats"]
    text = found(documents, "ConfigMap", "nats-config")["data"]["nats.conf"]
    wanted = set(re.findall(r"\$(\w+_PASSWORD)", text))
    assert len(wanted) == 4
    given = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in server["env"] if one["name"] in wanted}
    assert given == {name: {"name": "nats-users", "key": name} for name in wanted}
    assert server["image"] == IMAGE
    volumes = {one["name"]: one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in server["volumeMounts"] if one["name"] in volumes}
    assert mounts == {"/etc/nats-certs/nats": "nats-tls", "/etc/nats-certs/cluster": "nats-routes-tls"}


async def test_a_device_makes_no_route(servers: Rendered) -> None:
    """Whoever is a route reads every subject, and publishes for everybody, without a login."""
    with servers.stranger("device") as url:
        client = await nats.connect(url)
        heard = await client.subscribe(">")
        await client.flush()
        for process in servers.processes:
            await aeventually(partial(_has_refused, process), PATIENCE)
        await servers.publish()
        await client.publish("end", b"")
        assert (await heard.next_msg(PATIENCE)).subject == "end"
        await client.close()


def _has_refused(process: LoggedProcess) -> bool:
    return "TLS route handshake error" in process.text


async def test_a_certificate_of_the_authority_of_routes_makes_one(servers: Rendered) -> None:
    """So the test above could fail."""
    with servers.stranger("route") as url:
        client = await nats.connect(url)
        heard = await client.subscribe("plant.>")
        await client.flush()

        async def arrives() -> bool:
            await servers.publish()
            return heard.pending_msgs > 0

        await aeventually(arrives, PATIENCE)
        await client.close()
