# SPDX-License-Identifier: Apache-2.0
"""deploy/helm: linted and rendered by helm, and held against the schemas of Kubernetes and of the gateway."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.specifiers import SpecifierSet

from mqtt_nats.config.settings import Settings
from tests.harness.nats import ROOT
from tests.harness.shell import BUILD_WAIT, find_helm, find_program

CHART = ROOT / "deploy" / "helm"
CHART_OF_NATS = ROOT / "tests" / "charts" / "nats-2.14.2.tgz"
VALUES_OF_NATS = ROOT / "deploy" / "kubernetes" / "nats-values.yaml"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
CLUSTER: list[str] = ["--namespace", "mqtt", "--kube-version", "1.32.0"]
OUTSIDE: list[str] = ["--set", "natsConnection.urls={tls://nats.nats.svc:4222}"]
EVERYTHING: list[str] = [
    *OUTSIDE,
    *("--set", "autoscaling.enabled=true", "--set", "serviceMonitor.enabled=true"),
    *("--set", "prometheusRule.enabled=true", "--set", "rules.existingConfigMap=rules"),
    *("--set", "tls.clientCASecret=clients", "--set", "tls.certManager.enabled=true"),
    *("--set", "tls.certManager.dnsNames={mqtt.example.org}", "--set", "tls.certManager.issuerRef.name=ours"),
    *("--set", "image.digest=sha256:" + "0" * 64, "--set", "networkPolicy.natsNamespace=nats"),
]

pytestmark = [pytest.mark.timeout(BUILD_WAIT + 60), pytest.mark.processes]
if find_program("helm") is None:
    pytestmark.append(pytest.mark.soak)  # to build it takes minutes of CPU: `make test-soak`


@pytest.fixture(scope="module")
def helm() -> str:
    return find_helm()


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chart_of_nats(tmp_path_factory.mktemp("charts") / "mqtt-nats")


def with_chart_of_nats(directory: Path) -> Path:
    """Copy the chart to a new directory, with that of NATS, as `helm dependency build` would."""
    shutil.copytree(CHART, directory)
    (version,) = [one["version"] for one in chart_of(CHART)["dependencies"]]
    assert SpecifierSet(version.replace(" ", ",")).contains(CHART_OF_NATS.stem.removeprefix("nats-"))
    (directory / "charts").mkdir()
    shutil.copy(CHART_OF_NATS, directory / "charts")
    return directory


def chart_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((directory / "Chart.yaml").read_text(encoding="utf-8"))
    return found


def run(helm: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HELM_CONFIG_HOME": "/nonexistent", "HELM_CACHE_HOME": "/nonexistent"}
    command = [helm, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


def rendered(helm: str, chart: Path, *values: str) -> dict[tuple[str, str], dict[str, Any]]:
    done = run(helm, "template", "site", chart, *CLUSTER, *values)
    assert done.returncode == 0, done.stderr
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout) if one}


@pytest.mark.parametrize("values", [OUTSIDE, EVERYTHING, ["--set", "nats.enabled=true"]])
def test_helm_accepts_the_chart(helm: str, chart: Path, values: list[str]) -> None:
    done = run(helm, "lint", "--strict", chart, *values)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", [OUTSIDE, EVERYTHING])
def test_the_manifests_are_what_kubernetes_expects(helm: str, chart: Path, values: list[str]) -> None:
    found = rendered(helm, chart, *values)
    kinds = {kind for kind, _ in found}
    expected = {"ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service"}
    more = {"Certificate", "HorizontalPodAutoscaler", "PrometheusRule", "ServiceMonitor"}
    assert kinds == (expected | more if values is EVERYTHING else expected)
    for (kind, _), document in found.items():
        if kind not in ("Certificate", "PrometheusRule", "ServiceMonitor"):  # kinds of others
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_parts_fit_each_other(helm: str, chart: Path) -> None:
    """Selectors find the pods, ports have the names that services, probes and policies use, volumes are there."""
    found = rendered(helm, chart, *EVERYTHING)
    deployment = found["Deployment", "site-mqtt-nats"]["spec"]
    labels = deployment["template"]["metadata"]["labels"].items()
    container = deployment["template"]["spec"]["containers"][0]
    ports = {one["name"] for one in container["ports"]}
    selectors = [
        deployment["selector"]["matchLabels"],
        found["PodDisruptionBudget", "site-mqtt-nats"]["spec"]["selector"]["matchLabels"],
        found["NetworkPolicy", "site-mqtt-nats"]["spec"]["podSelector"]["matchLabels"],
        *(one["spec"]["selector"] for (kind, _), one in found.items() if kind == "Service"),
    ]
    assert all(selector.items() <= labels for selector in selectors)
    services = [one for (kind, _), one in found.items() if kind == "Service"]
    assert {port["targetPort"] for one in services for port in one["spec"]["ports"]} <= ports
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in deployment["template"]["spec"]["volumes"]}
    assert "replicas" not in deployment  # the autoscaler has the number
    assert container["image"] == "mqtt-nats@sha256:" + "0" * 64
    scaled = found["HorizontalPodAutoscaler", "site-mqtt-nats"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == "site-mqtt-nats"
    assert scaled["metrics"][0]["pods"]["metric"]["name"] == "mqtt_nats_connections"
    monitor = found["ServiceMonitor", "site-mqtt-nats"]["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= found["Service", "site-mqtt-nats-admin"]["metadata"]["labels"].items()
    assert not monitor.items() <= found["Service", "site-mqtt-nats"]["metadata"]["labels"].items()


def test_prometheus_is_a_viewer(helm: str, chart: Path) -> None:
    """It gets the token of a Secret that gateways know the viewers from, and not the administrator's."""
    found = rendered(helm, chart, *EVERYTHING)
    (endpoint,) = found["ServiceMonitor", "site-mqtt-nats"]["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "mqtt-nats-viewers", "key": "viewer-token"}
    pod = found["Deployment", "site-mqtt-nats"]["spec"]["template"]["spec"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == "viewers"]
    assert volume["secret"]["secretName"] == "mqtt-nats-viewers"
    without = ("--set", "viewers.existingSecret=")
    assert run(helm, "template", "site", chart, *CLUSTER, *EVERYTHING, *without).returncode != 0
    text = rendered(helm, chart, *OUTSIDE, *without)["ConfigMap", "site-mqtt-nats"]["data"]["gateway.toml"]
    assert "admin_tokens_file" not in text


def test_alerts_are_those_of_prometheus(helm: str, chart: Path) -> None:
    rule = rendered(helm, chart, *EVERYTHING)["PrometheusRule", "site-mqtt-nats"]
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text(encoding="utf-8"))


def test_the_gateway_understands_its_settings(
    helm: str, chart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("--set", "settings.max_packet_size=2097152", "--set", "settings.presence=false")
    found = rendered(helm, chart, *EVERYTHING, *more, "--set-string", "settings.log_format=json")
    text = found["ConfigMap", "site-mqtt-nats"]["data"]["gateway.toml"]
    for name in (
        *("nats-ca/ca.crt", "users/users", "rules/acl.toml", "viewers/admin-tokens.toml"),
        *("tls/tls.crt", "tls/tls.key", "client-ca/ca.crt"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    config = tmp_path / "gateway.toml"
    config.write_text(text.replace("/etc/mqtt-nats", str(tmp_path)))
    monkeypatch.setenv("MQTT_NATS_NATS_PASSWORD", "x")
    monkeypatch.setenv("MQTT_NATS_ADMIN_TOKEN", "x" * 32)
    settings = Settings.load({}, config)
    assert settings.nats == ("tls://nats.nats.svc:4222",)
    assert (settings.max_packet_size, settings.presence, settings.log_format) == (2_097_152, False, "json")
    assert settings.drain_time == 30
    assert [(one.listen, one.type) for one in settings.listeners] == [("0.0.0.0:8883", "tls")]
    assert settings.listeners[0].tls_client_ca is not None


def test_servers_of_the_same_release(helm: str, chart: Path) -> None:
    found = rendered(helm, chart, "--set", "nats.enabled=true")
    text = found["ConfigMap", "site-mqtt-nats"]["data"]["gateway.toml"]
    assert text.startswith('nats = ["tls://nats:4222"]\n')
    gateways = found["NetworkPolicy", "site-mqtt-nats"]["spec"]["podSelector"]
    pods = found["StatefulSet", "nats"]["spec"]["template"]["metadata"]["labels"].items()
    policy = found["NetworkPolicy", "site-mqtt-nats-nats"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pods
    clients, routes = policy["ingress"]
    assert clients == {"from": [{"podSelector": gateways}], "ports": [{"port": 4222}]}
    assert routes == {"from": [{"podSelector": policy["podSelector"]}], "ports": [{"port": 6222}]}
    for name in ("site-mqtt-nats", "site-mqtt-nats-nats"):
        document = found["NetworkPolicy", name]
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_nats_has_the_values_of_the_manifests() -> None:
    """With users and TLS: without them every pod of the cluster reads and writes all of it."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["nats"]
    named = {"enabled": False, "fullnameOverride": "nats"}
    assert values == named | yaml.safe_load(VALUES_OF_NATS.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([], "natsConnection.urls is empty, and nats.enabled is false"),
        (["--set", "replicas=0"], "replicas"),
        (["--set", "frobnicate=1"], "frobnicate"),
        (["--set", "settings.nats_password=x"], "nats_password"),
        (["--set", "natsConnection.urls={tls://user:pw@nats:4222}"], "natsConnection"),
        (["--set", "service.port=80"], "service"),
        (["--set", "image.digest=latest"], "digest"),
        ([*OUTSIDE, "--set", "tls.certManager.enabled=true"], "tls.certManager.dnsNames is empty"),
    ],
)
def test_values_that_are_refused(helm: str, chart: Path, values: list[str], named: str) -> None:
    done = run(helm, "template", "site", chart, *CLUSTER, *values)
    assert done.returncode != 0
    assert named in done.stderr


def test_the_schema_has_all_values() -> None:
    """Each value of values.yaml is in the schema, so that a misspelt one is refused."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert values.keys() == schema["properties"].keys() - {"global"}
    for name, value in values.items():
        described = schema["properties"][name].get("properties")
        if isinstance(value, dict) and described is not None and name != "nats":
            assert value.keys() == described.keys(), name
