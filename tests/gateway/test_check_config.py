# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats check-config``: every value with its origin, no secret, and what is wrong with a suggestion."""

import json
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import hatch_build
from mqtt_nats.base.config_files import entries_of, lines_of
from mqtt_nats.base.errors import StartupError
from mqtt_nats.cli import command
from mqtt_nats.config.settings import Settings
from mqtt_nats.gateway.check_config import OTHERS, _text, _unsafe, check
from mqtt_nats.mqtt_clients.commands import pub
from pyspark_mqtt_nats.jobs.flags import HIDDEN, secret_name
from tests.plugins.conftest import install  # noqa: F401  # a fixture: plugins are there however this is installed

FILE = """\
# what we run
listen = "127.0.0.1:7"
nats = ["nats://me:hunter2@h:1", "tls://h"]
addresses = [
  "deny 10.0.0.0/8",
  "allow all",
]
nats_user = "u"
response_information = '''
max_inflight = 5
'''

[[listeners]]
listen = "127.0.0.1:8"
message_rate = 3

[[ listeners ]]  # another
listen = "127.0.0.1:9"

[plugins.rewrite]
rules = [{ filter = "x/#", regex = "x/(.+)", to = "y/$1" }]

["plugins".delayed]
load = false

# acme and duck
[tenants.acme]
nats_user = "a"

[tenants."duck"]
nats_user = "d"

[mappings]
"old.*" = "acme.{{wildcard(1)}}"
older = "acme.older"
"""


@pytest.fixture(autouse=True)
def _no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MQTT_NATS_"):
            monkeypatch.delenv(name)


def run(*arguments: object) -> str:
    done = CliRunner().invoke(command, ["check-config", *map(str, arguments)])
    if isinstance(done.exception, StartupError):
        text = str(done.exception)
        assert "\n" not in text
        return text
    assert done.exit_code == 0, done.output
    return done.output


def write(path: Path, text: str) -> Path:
    file = path / "gateway.toml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.usefixtures("install")
def test_every_value_has_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, FILE)
    monkeypatch.setenv("MQTT_NATS_CONFIG", str(file))
    monkeypatch.setenv("MQTT_NATS_NATS_PASSWORD", "hunter2")
    monkeypatch.setenv("MQTT_NATS_PORT_1883_TCP_ADDR", "10.0.0.1")  # Kubernetes
    text = run("--max-queued", "7", "--json")
    assert "hunter2" not in text
    rows = {row["name"]: (row["value"], row["origin"]) for row in json.loads(text)}
    for name, value, origin in (
        ("listen", '"127.0.0.1:7"', f"{file}:2"),
        ("nats", '["nats://h:1","tls://h"]', f"{file}:3"),
        ("addresses", '["deny 10.0.0.0/8","allow all"]', f"{file}:4"),
        ("nats_user", '"u"', f"{file}:8"),
        ("nats_password", "(hidden)", "MQTT_NATS_NATS_PASSWORD"),
        ("max_inflight", "100", "default"),  # its line is within a text
        ("max_queued", "7", "--max-queued"),
        ("nats_token", "", "default"),
        ("listeners[1].listen", '"127.0.0.1:8"', f"{file}:13"),
        ("listeners[1].message_rate", "3.0", f"{file}:13"),
        ("listeners[1].type", '"tcp"', "default"),
        ("listeners[2].listen", '"127.0.0.1:9"', f"{file}:17"),
        ("plugins.rewrite.load", "true", f"{file}:20"),
        ("plugins.delayed.load", "false", f"{file}:23"),
        ("tenants.acme.nats_user", '"a"', f"{file}:27"),
        ("tenants.acme.nats_token", "", "default"),
        ("tenants.duck.nats_user", '"d"', f"{file}:30"),
        ("mappings.old.*", '"acme.{{wildcard(1)}}"', f"{file}:34"),
        ("mappings.older", '"acme.older"', f"{file}:35"),
    ):
        assert rows[name] == (value, origin), name
    assert '"regex":"x/(.+)"' in rows["plugins.rewrite.rules"][0]
    names = {re.split(r"[.\[]", name)[0] for name in rows}
    assert names == set(Settings.model_fields)


def test_the_table(tmp_path: Path) -> None:
    text = run("--max-queued", "7", "--no-local-dispatch")
    lines = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert lines["setting"] == "from" + " " * 14 + "value"
    assert re.fullmatch(r"--max-queued +7", lines["max_queued"])
    assert re.fullmatch(r"--local-dispatch +false", lines["local_dispatch"])
    for name, value in (("max_packet_size", "1MiB"), ("message_retention", "1d"), ("connect_timeout", "15s")):
        assert re.fullmatch(f'default +"{value}"', lines[name])


def test_only_addresses_that_are_open_are_shown(tmp_path: Path) -> None:
    """Beside entries of `listeners`, the default of `listen` is not in force."""
    lines = run("--config", write(tmp_path, '[[listeners]]\nlisten = "127.0.0.1:8"')).splitlines()
    assert [line.split() for line in lines if line.startswith("listen ")] == [["listen", "default"]]
    assert lines[-1] == "no errors; warnings: none"


WRONG: dict[str, tuple[str, str]] = {
    "key": ("max_in_flight = 3", "unknown setting 'max_in_flight' in {file}, line 1: did you mean 'max_inflight'?"),
    "keys": (
        "lisen = 1\n[plugin.x]",
        "unknown setting 'lisen' in {file}, line 1: did you mean 'listen'?; "
        "unknown setting 'plugin' in {file}, line 2: did you mean 'plugins'?",
    ),
    "value": ("max_inflight = 0", "invalid setting: max_inflight = '0': input should be greater than or equal to 1"),
    "listener": ('[[listeners]]\nlisen = "h:1"', "listeners[1].lisen: unknown setting: did you mean 'listen'?"),
    "place": (
        '[[listeners]]\nlisten = "127.0.0.1:1"\nadmin_listen = "127.0.0.1:2"',
        "listeners[1].admin_listen: unknown setting: it is a setting of the gateway: write it before the first [table]",
    ),
    "authenticator": (
        '[[authenticators]]\ntype = "password"\nfil = "x"',
        "authenticators[1].fil: unknown setting: did you mean 'file'?",
    ),
    "plugin": ("[plugins.delayd]", "no plugin 'delayd' is installed: a package with an entry point in"),
    "option": (
        "[plugins.delayed]\nmax_dely = 3",
        "plugin 'delayed': max_dely: unknown setting: did you mean 'max_delay'?",
    ),
    "nested": (
        '[plugins.rewrite]\nrules = [{ filter = "x", regx = "y", to = "z" }]',
        "rules.0.regx: unknown setting: did you mean 'regex'?",
    ),
    "load": ("[plugins.delayed]\nload = 3", "plugins.delayed.load: expected true or false"),
    "rules": (
        'acl_file = "{directory}/acl.toml"',
        "the ACL file {directory}/acl.toml: defalt: unknown setting: did you mean",
    ),
    "seed": ('nats_nkey = "{directory}/none"', "nats_nkey = '{directory}/none': path does not point to a file"),
    "no seed": ('nats_nkey = "{directory}/acl.toml"', "nats_nkey: {directory}/acl.toml does not contain the seed of"),
    "no credentials": (
        'nats_creds = "{directory}/acl.toml"',
        "nats_creds: {directory}/acl.toml is not a credentials file",
    ),
    "credentials of a tenant": (
        '[tenants.acme]\nnats_creds = "{directory}/acl.toml"',
        "nats_creds: {directory}/acl.toml is not a credentials file",
    ),
    "users": ('password_file = "{directory}/acl.toml"', "{directory}/acl.toml"),
    "certificate": (
        '[[listeners]]\nlisten = "127.0.0.1:0"\ntype = "tls"\ntls_cert = "{directory}/acl.toml"\n'
        'tls_key = "{directory}/acl.toml"',
        "{directory}/acl.toml",
    ),
    "certificate of the admin listener": (
        'admin_listen = "127.0.0.1:0"\nadmin_tls_cert = "{directory}/acl.toml"\nadmin_tls_key = "{directory}/acl.toml"',
        "{directory}/acl.toml",
    ),
    "authority": ('nats_tls_ca = "{directory}/acl.toml"', "the TLS files for NATS cannot be used: "),
}


@pytest.mark.usefixtures("install")
def test_all_errors_are_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files and plugins together; of values and unknown variables, where the files are not read yet."""
    bad = tmp_path / "bad.toml"
    bad.write_text('defalt = "deny"\n', encoding="utf-8")
    text = f"""
acl_file = "{bad}"
password_file = "{bad}"
nats_tls_ca = "{bad}"

[[listeners]]
listen = "127.0.0.1:0"
type = "tls"
tls_cert = "{bad}"
tls_key = "{bad}"

[plugins.delayd]
"""
    file = write(tmp_path, text)
    with pytest.raises(StartupError) as caught:
        check({}, file)
    assert len(caught.value.problems) == 5
    for named in ("the ACL file", "line 1: expected user:", "NATS cannot be used", "listener 127.0.0.1:0", "'delayd'"):
        assert sum(named in problem for problem in caught.value.problems) == 1, named
    monkeypatch.setenv("MQTT_NATS_MAX_INFLIHGT", "3")
    with pytest.raises(StartupError) as caught:
        check({"max_inflight": "0", "max_queued": "0"}, file)
    assert len(caught.value.problems) == 3


UNSAFE: dict[str, tuple[dict[str, Any], str]] = {
    "passwords": ({"listen": "0.0.0.0:1", "password_file": __file__}, "listener 0.0.0.0:1: passwords are sent without"),
    "open": ({"listen": "0.0.0.0:1", "allow_anonymous": True}, "listener 0.0.0.0:1: every client that reaches it"),
    "token": ({"admin_listen": "0.0.0.0:1", "admin_token": "x" * 16}, "admin_listen 0.0.0.0:1: the token is sent"),
    "login": ({"nats": "nats://u:p@h:1"}, "nats nats://h:1: the login is sent without encryption"),
    "lease": ({"gateway_lease": "5s"}, "gateway_lease: less than 20 s is not safe"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_what_is_not_safe_is_a_warning(name: str) -> None:
    given, wanted = UNSAFE[name]
    (warning,) = _unsafe(Settings.load(given))
    assert warning.startswith(wanted)


def test_quiet_prints_warnings_only() -> None:
    assert run("--quiet") == ""
    assert run("--quiet", "--gateway-lease", "5s").startswith("warning: gateway_lease: ")


def test_the_admin_listener_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "mqtt_nats.admin.listener", raising=False)
    assert run("--admin-listen", "127.0.0.1:0").startswith("admin_listen needs the extra `admin`: pip install ")
    assert "max_inflight" in run()


def test_variables_of_other_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the environment of who uses these as well."""
    variables = [secret_name(name) for name in HIDDEN]
    options = [one for one in pub.params if isinstance(one, click.Option)]
    variables += [one.envvar for one in options if isinstance(one.envvar, str)]
    variables.append(hatch_build.BUILD)
    assert set(variables) == OTHERS
    for variable in variables:
        monkeypatch.setenv(variable, "hunter2")
    assert "hunter2" not in run()


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_in_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "acl.toml").write_text('defalt = "deny"\n', encoding="utf-8")
    text, wanted = WRONG[name]
    file = write(tmp_path, text.replace("{directory}", str(tmp_path)))
    found = run("--config", file)
    assert wanted.replace("{file}", str(file)).replace("{directory}", str(tmp_path)) in found


def test_unknown_variables_are_errors_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "PORT",
        "SERVICE_HOST",
        "SERVICE_PORT_MQTT",
        "WEB_SERVICE_HOST",
        "PORT_1883_TCP",
        "PORT_1883_TCP_PROTO",
    ):
        monkeypatch.setenv(f"MQTT_NATS_{name}", "tcp://10.0.0.1:1883")
    assert "max_inflight" in run()
    monkeypatch.setenv("MQTT_NATS_MAX_INFLIHGT", "3")
    assert run() == "unknown environment variable MQTT_NATS_MAX_INFLIHGT: did you mean 'MQTT_NATS_MAX_INFLIGHT'?"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a = 1\nb.c = 2\nb.d = 3\n", {"a": [1], "b": [2, 3]}),
        ('"a" = 1\n\n[b]\na = 2\n', {"a": [1], "b": [3]}),
        ("[[b]]\n[[b]]\n[b.a]\n", {"a": [], "b": [1, 2, 3]}),
        ("a = [\n[1],\n[2]]\nb = 1\n", {"a": [1], "b": [4]}),
        ('a = """\nb = 1\n[b]\n"""\nb = 2\n', {"a": [1], "b": [5]}),
    ],
)
def test_lines(text: str, lines: dict[str, Any]) -> None:
    assert lines_of(text, ["a", "b"]) == lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("[t]\nx.y = 1\n[t.z]\n", {"t.x": [2], "t.z": [3]}),
        ("t.x.y = 1\nt.z.x = [\n 1,\n]\n", {"t.x": [1], "t.z": [2]}),
        ("t = { x = 1, z = 2 }\n", {"t.x": [1], "t.z": [1]}),
        ('# [t.x]\na = """\n[t.x]\n"""\n[t.x.z]\n[t."z"]\n', {"t.x": [5], "t.z": [6]}),
        ("[t.x]\ny = 1\n[t.x.z]\n", {"t.x": [1]}),
        ("[[t]]\nx = 1\n", {}),
    ],
)
def test_lines_of_entries(text: str, lines: dict[str, Any]) -> None:
    assert entries_of(text, tomllib.loads(text)) == lines


def test_a_variable_takes_the_place_of_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, '[tenants.acme]\nnats_user = "a"\n')
    monkeypatch.setenv("MQTT_NATS_TENANTS", '{"acme": {"nats_user": "b"}}')
    rows = {row["name"]: (row["value"], row["origin"]) for row in json.loads(run("--config", file, "--json"))}
    assert rows["tenants.acme.nats_user"] == ('"b"', "MQTT_NATS_TENANTS")


def test_a_plugin_that_is_not_loaded_need_not_be_there(tmp_path: Path) -> None:
    file = tmp_path / "mqtt-nats.toml"
    file.write_text('[plugins.absent]\nload = false\ncolour = "red"\n')
    shown = run("--config", file)
    assert "plugins.absent.load" in shown
    assert "colour" not in shown
    file.write_text("[plugins.absent]\nload = true\n")
    assert "absent" in run("--config", file)
    assert "plugins.absent.load" not in run("--config", file)


def test_a_number_of_a_plugin_has_any_size() -> None:
    assert _text([2**70, "ü"]) == '[1180591620717411303424,"ü"]'


@pytest.mark.usefixtures("install")
def test_urls_are_shown_without_secrets(tmp_path: Path) -> None:
    """Wherever they stand: of NATS, of tenants, of authenticators, in options of plugins, in the line of an error."""
    text = """
nats = ["nats://me:hunter2@h:1", "tls://hunter2@h"]
server_reference = "https://me:hunter2@h/x"

[tenants.acme]
nats = ["nats://me:hunter2@h:2"]

[[authenticators]]
type = "http"
url = "https://auth.example.org/mqtt?realm=a&key=hunter2#hunter2"

[[authenticators]]
type = "jwt"
keys = "https://keys.example.org/jwks?token=hunter2"
algorithms = ["RS256"]

[plugins.subscriptions]
subscriptions = [{ filter = "https://me:hunter2@h/%c" }]
"""
    file = write(tmp_path, text)
    for more in ((), ("--json",)):
        shown = run("--config", file, *more)
        assert "hunter2" not in shown
        for left in ("nats://h:1", "tls://h", "https://h/x", "nats://h:2", "https://auth.example.org/mqtt?(hidden)"):
            assert left in shown
        assert "https://keys.example.org/jwks?(hidden)" in shown
    shown = run("--config", file, "--admin-listen", "http://me:hunter2@h:1?hunter2")
    assert "admin_listen" in shown
    assert "hunter2" not in shown
