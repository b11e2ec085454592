# SPDX-License-Identifier: Apache-2.0
"""``migrate emqx`` on files in the formats that EMQX documents."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

from mqtt_nats.access.acl import Identity
from mqtt_nats.access.acl_file import load as load_rules
from mqtt_nats.access.passwords import PasswordUsers
from mqtt_nats.access.passwords import load as load_users
from mqtt_nats.base.errors import StartupError
from tests.ctl.migration.test_mosquitto import INPUTS, run, said

EXPORTS = INPUTS / "exports"


def test_users_of_csv_and_json(tmp_path: Path) -> None:
    done = run("emqx", EXPORTS / "users.csv", EXPORTS / "users.json", "--output", tmp_path, "--no-match", "deny")
    assert done.exit_code == 0, done.output
    users = PasswordUsers(load_users(tmp_path / "passwords"))
    assert users.verify("device_user", b"pencil") is not None
    assert users.verify("device_user", b"pen") is None
    assert users.find("myuser3") is not None
    rules = load_rules(tmp_path / "acl.toml")
    assert rules.permissions(Identity("myuser3", "c")).may_publish("any/topic", 0, False)
    assert not rules.permissions(Identity("myuser4", "c")).may_publish("any/topic", 0, False)
    assert tomllib.loads((tmp_path / "gateway.toml").read_text())["password_file"] == "passwords"


def test_rules_of_a_file(tmp_path: Path) -> None:
    done = run("emqx", EXPORTS / "acl.conf", "--output", tmp_path, "--all")
    assert done.exit_code == 0, done.output
    rules = load_rules(tmp_path / "acl.toml")
    assert rules.default
    edge = rules.permissions(Identity("edge", "edge-7", "192.0.2.1"))
    assert edge.may_publish("site/a", 1, False)
    assert not rules.permissions(Identity("dashboard", "c")).subscribe("#", 0)
    assert rules.permissions(Identity("dashboard", "c")).subscribe("$SYS/#", 0)
    assert not rules.permissions(Identity("other", "c")).subscribe("$SYS/#", 0)
    assert rules.permissions(Identity("other", "c", "127.0.0.1")).subscribe("#", 0)
    assert rules.permissions(Identity("other", "c")).may_publish("a", 0, False)
    assert said(done.output, "acl.conf:5").startswith("missing: rule: a rule here names users, client ids")
    assert said(done.output, "acl.conf:16").startswith("not needed: rule: ")


def test_rules_behind_one_about_everything(tmp_path: Path) -> None:
    """EMQX does not ask them, so they are left out, and the other order of the files has them."""
    (tmp_path / "acl.conf").write_text("{allow, all}.")
    stored = '[{"username": "lamp", "rules": [{"topic": "a/#", "permission": "deny", "action": "all"}]}]'
    (tmp_path / "rules.json").write_text(stored)
    files = [tmp_path / "acl.conf", tmp_path / "rules.json"]
    done = run("emqx", *files, "--output", tmp_path / "new")
    assert not (tmp_path / "new" / "acl.toml").exists()  # everybody may do everything
    text = f"missing: rule of lamp: {tmp_path}/acl.conf:1 is about everybody and everything"
    assert said(done.output, "rules.json").startswith(text)
    run("emqx", *reversed(files), "--output", tmp_path / "other")
    rules = load_rules(tmp_path / "other" / "acl.toml")
    assert not rules.permissions(Identity("lamp", "c")).may_publish("a/b", 0, False)
    assert rules.default


def test_rules_of_the_built_in_database(tmp_path: Path) -> None:
    done = run("emqx", EXPORTS / "rules.json", "--output", tmp_path, "--no-match", "deny")
    assert done.exit_code == 0, done.output
    rules = load_rules(tmp_path / "acl.toml")
    user = rules.permissions(Identity("user1", "c"))
    assert user.may_publish("test/user1/1", 1, True)
    assert not user.may_publish("test/user1/1", 1, False)
    assert not user.may_publish("test/user1/1", 0, True)
    assert not user.subscribe("test/#", 0)
    assert user.subscribe("common/#", 0)
    assert "missing: rule of client1: rules are about the filter behind $share/<group>/" in done.output


@pytest.mark.processes
def test_bans(tmp_path: Path) -> None:
    """The script runs in any shell; a ban that has ended is left out."""
    done = run("emqx", EXPORTS / "banned.json", "--output", tmp_path, "--all")
    assert done.exit_code == 0, done.output
    fake = tmp_path / "mqtt-nats"
    fake.write_text('#!/bin/sh\nfor one in "$@"; do printf "%s|" "$one"; done; echo\n')
    fake.chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    ran = subprocess.run(["sh", tmp_path / "bans.sh"], env=path, capture_output=True, text=True, timeout=30, check=True)
    first, second = ran.stdout.splitlines()
    assert first == "ctl|bans|add|--for|always|--reason|it floods|--|client|bad'client|"
    assert second.startswith("ctl|bans|add|--for|")
    assert second.endswith("s|--reason|from EMQX|--|address|192.0.2.7/32|")
    assert "ban of 'eve': it has ended" in done.output
    assert "missing: ban of '^x': a ban here is of a client id" in done.output
    assert not (tmp_path / "acl.toml").exists()


@pytest.mark.parametrize("as_text", [True, False])
def test_bans_that_end_at_a_unix_time(tmp_path: Path, as_text: bool) -> None:
    """So version 4 exports them."""
    ends = {"eve": int(time.time()) + 3600, "bob": int(time.time()) - 3600}
    bans = [{"who": who, "as": "username", "until": str(end) if as_text else end} for who, end in ends.items()]
    (tmp_path / "bans.json").write_text(json.dumps({"version": "4.3", "blacklist": bans}))
    done = run("emqx", tmp_path / "bans.json", "--output", tmp_path / "new", "--all")
    assert done.exit_code == 0, done.output
    found = re.search(r"--for (\d+)s .* user eve", (tmp_path / "new" / "bans.sh").read_text())
    assert found is not None
    assert 3500 < int(found[1]) <= 3600
    assert "ban of 'bob': it has ended" in done.output


def test_an_export_of_version_4(tmp_path: Path) -> None:
    done = run("emqx", EXPORTS / "emqx4.json", "--output", tmp_path, "--no-match", "deny")
    assert done.exit_code == 0, done.output
    assert PasswordUsers(load_users(tmp_path / "passwords")).verify("sensor", b"pencil") is not None
    rules = load_rules(tmp_path / "acl.toml")
    assert rules.permissions(Identity("sensor", "c")).may_publish("s/sensor/1", 0, False)
    assert not rules.permissions(Identity("sensor", "c-1")).may_publish("s/sensor/1", 0, False)
    assert rules.permissions(Identity("x", "c")).subscribe("news/#", 0)
    assert "address 10.0.0.0/8" in (tmp_path / "bans.sh").read_text()
    assert "missing: client id 'c-1': passwords of client ids are not asked for" in done.output


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{allow, {user, dashboard", "line 1: { has no }"),
        ("{allow, all}", "line 1: the term has no full stop at its end"),
        ('{"data": [{"x": 1}]}', "it has neither users, nor rules, nor bans"),
        ("{", "is no export of EMQX that is understood"),
        ("[" * 5000, "is no export of EMQX that is understood"),
        ("user_id\nann\n", "its first line has neither the columns user_id and password_hash (users), nor as and who"),
        ("name,hash,salt\nann,0,1\n", "its first line has neither the columns user_id and password_hash (users)"),
        ('## EMQX\nnode {\n  name = "emqx@127.0.0.1"\n}\n', "it has settings of EMQX (emqx.conf, cluster.hocon)"),
        ("listeners.tcp.default.bind = 1883\n", "it has settings of EMQX (emqx.conf, cluster.hocon)"),
        ("\x00", "is no export of EMQX that is understood"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "export"
    file.write_text(text)
    done = run("emqx", file, "--output", tmp_path / "new")
    assert isinstance(done.exception, StartupError), done.exception
    assert named in str(done.exception)
    file.write_bytes(b"\x1f\x8b\x08\xff")
    done = run("emqx", file, "--output", tmp_path / "new")
    assert "is no text: export users, rules and bans one by one" in str(done.exception)


def test_columns_in_another_order(tmp_path: Path) -> None:
    header, *rows = (EXPORTS / "users.csv").read_text(encoding="utf-8").splitlines()
    swapped = [",".join(reversed(line.split(","))) for line in (header, *rows)]
    (tmp_path / "users.csv").write_text("\n".join(swapped) + "\n")
    (tmp_path / "bans.csv").write_text("who,as,reason,at,until,by\neve,username,loud,,,admin\n")
    done = run("emqx", tmp_path / "users.csv", tmp_path / "bans.csv", "--output", tmp_path / "new")
    assert done.exit_code == 0, done.exception
    run("emqx", EXPORTS / "users.csv", "--output", tmp_path / "old")
    assert (tmp_path / "new" / "passwords").read_text() == (tmp_path / "old" / "passwords").read_text()
    assert "user eve" in (tmp_path / "new" / "bans.sh").read_text()


def test_the_place_of_the_salt_is_not_in_the_file(tmp_path: Path) -> None:
    """So it is said which one is taken; an export of version 4, and passwords that are not hashed, leave no doubt."""
    done = run("emqx", EXPORTS / "users.csv", "--output", tmp_path / "1", "--password-hash", "sha256,suffix")
    assert "changes: password_hash: hashes are taken as sha256,suffix: the file does not say" in done.output
    done = run("emqx", EXPORTS / "users.csv", "--output", tmp_path / "2", "--password-hash", "sha256")
    assert "only sha256,prefix, sha256,suffix, sha512,prefix, sha512,suffix, with the place of the salt" in done.output
    done = run("emqx", EXPORTS / "emqx4.json", "--output", tmp_path / "3")
    assert "hashes are taken as" not in done.output
    (tmp_path / "plain.csv").write_text("user_id,password,is_superuser\nann,pencil,false\n")
    done = run("emqx", tmp_path / "plain.csv", "--output", tmp_path / "4")
    assert "hashes are taken as" not in done.output
    assert PasswordUsers(load_users(tmp_path / "4" / "passwords")).verify("ann", b"pencil") is not None


def test_hashes_without_salt(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"pencil").hexdigest()
    (tmp_path / "users.csv").write_text(f"user_id,password_hash,salt,is_superuser\nann,{digest},ignored,false\n")
    done = run("emqx", tmp_path / "users.csv", "--output", tmp_path / "new", "--password-hash", "sha256,disable")
    assert done.exit_code == 0, done.exception
    assert PasswordUsers(load_users(tmp_path / "new" / "passwords")).verify("ann", b"pencil") is not None


@pytest.mark.parametrize("algorithm", ["md5,prefix", "bcrypt", "pbkdf2"])
def test_hashes_that_are_not_accepted(tmp_path: Path, algorithm: str) -> None:
    done = run("emqx", EXPORTS / "users.csv", "--output", tmp_path, "--password-hash", algorithm)
    assert f"missing: user 'myuser4': the user is left out: hashes of {algorithm} are not accepted" in done.output
    assert (tmp_path / "passwords").read_text() == ""
