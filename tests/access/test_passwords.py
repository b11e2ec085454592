# SPDX-License-Identifier: Apache-2.0
"""The file of users and hashed passwords, and the command that edits it."""

import base64
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from mqtt_nats.access import passwords
from mqtt_nats.access.passwords import PasswordHash, PasswordUsers, delete_user, load, replace_hashes, set_password
from mqtt_nats.access.settings import PEOPLE_COST, Cost, parse_cost
from mqtt_nats.base.errors import StartupError
from mqtt_nats.cli import command
from tests.harness.nats import ROOT

CHEAP = Cost(64, 1, 1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "passwords"


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "DEVICE_COST", CHEAP)


def test_users_and_their_passwords(file: Path) -> None:
    assert set_password(file, "ann", "pencil")
    assert set_password(file, "a:b", "p:q")
    assert not set_password(file, "ann", "pen")
    users = PasswordUsers(load(file))
    found = users.verify("ann", b"pen")
    assert found is users.find("ann")
    assert found is not None
    assert users.verify("a:b", b"p:q") is not None
    text = file.read_text(encoding="utf-8")
    assert "$argon2id$v=19$m=4096,t=1,p=1$" in text
    assert "pen" not in text
    assert str(found) not in repr(found)
    assert "argon2" not in repr(found)
    assert delete_user(file, "ann")
    assert not delete_user(file, "ann")
    assert list(load(file)) == ["a:b"]


@pytest.mark.usefixtures("cheap")
def test_tenants(file: Path) -> None:
    """A user keeps its tenant with another password; with another tenant it is another user."""
    set_password(file, "ann", "pencil", "acme")
    set_password(file, "bob", "pencil")
    found = PasswordUsers(load(file)).verify("ann", b"pencil")
    assert found is not None
    assert found.tenant == "acme"
    assert file.read_text(encoding="utf-8").splitlines()[0].endswith(":acme")
    set_password(file, "ann", "pen")
    assert [one.tenant for one in load(file).values()] == ["acme", None]
    set_password(file, "ann", "pen", "duck")
    assert load(file)["ann"].tenant == "duck"
    assert PasswordHash("x", "a") != PasswordHash("x", "b")
    with pytest.raises(ValueError, match="the name of a tenant must have"):
        set_password(file, "ann", "pen", "a/b")


@pytest.mark.parametrize(
    ("name", "password"),
    [("ann", b"pencil "), ("ann", b"Pencil"), ("ann", b""), ("ann", b"\xff"), ("Ann", b"pencil"), ("", b"pencil")],
)
@pytest.mark.usefixtures("cheap")
def test_who_does_not_get_in(file: Path, name: str, password: bytes) -> None:
    set_password(file, "ann", "pencil")
    assert PasswordUsers(load(file)).verify(name, password) is None


@pytest.mark.usefixtures("cheap")
def test_unknown_users_cost_as_much_as_wrong_passwords(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are verified once, with the same parameters."""
    seen: list[str] = []
    fits = PasswordHash.fits

    def spy(self: PasswordHash, password: bytes) -> bool:
        seen.append(self.text.rsplit("$", 2)[0] + str(len(self.text)))
        return fits(self, password)

    monkeypatch.setattr(PasswordHash, "fits", spy)
    for name in ("ann", "bob"):
        set_password(file, name, "pencil")
    users = PasswordUsers(load(file))
    for name in ("ann", "nobody", "bob", "nobody"):
        assert users.verify(name, b"wrong") is None
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert PasswordUsers({}).verify("ann", b"x") is None
    assert len(seen) == 5


def test_the_file_is_private_and_keeps_its_place(file: Path, cheap: None) -> None:
    os.umask(os.umask(0o022))
    link = file.with_name("link")
    link.symlink_to(file)
    set_password(link, "ann", "pencil")
    assert link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    set_password(file, "bob", "pencil")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [one.name for one in file.parent.iterdir() if one.name.startswith(".")] == []


def test_changes_at_the_same_time_are_all_made(file: Path, cheap: None) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda number: set_password(file, f"user{number}", "x"), range(40)))
    assert len(load(file)) == 40


# Always the same: workers of pytest compare the names of tests.
HASH = f"$argon2id$v=19$m=64,t=1,p=1${'A' * 22}${'A' * 43}"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ann:pencil\n", "line 1: expected user:$argon2id$"),
        ("ann\n", "line 1: expected"),
        (f"ann:{HASH}\n\n", "line 2: expected"),
        (f"ann:{HASH}\nbob:{HASH}\nann:{HASH}\n", "line 3: the user of line 1 is repeated"),
        (f"ann:{HASH}bob:{HASH}\nann:{HASH}bob:{HASH}\n", "line 2: the user of line 1 is repeated"),
        (f":{HASH}\n", "line 1: a user name must have"),
        (f"a\tb:{HASH}\n", "line 1: a user name must have"),
        (f"ann:{HASH}:\n", "line 1: the name of a tenant must have"),
        (f"ann:{HASH}:a b\n", "line 1: the name of a tenant must have"),
        (f"ann:{HASH}:acme:duck\n", "line 1: the name of a tenant must have"),
        ("ann:$argon2id$v=19$m=64,t=1,p=1$!!!!$AAAA\n", "not one of Argon2id"),
        ("ann:$argon2id$v=19$m=64,t=1\n", "not one of Argon2id"),
        (f"ann:{HASH.replace('p=1', 'p=1,t=2')}\n", "m, t and p, in this order and nothing else"),
        (f"ann:{HASH.replace('m=64,t=1', 't=1,m=64')}\n", "m, t and p, in this order and nothing else"),
        (f"ann:{HASH.replace('v=19', 'v=16')}\n", "version 19"),
        (f"ann:{HASH.replace('m=64', 'm=1048577')}\n", "m must be"),
        (f"ann:{HASH.replace('m=64', 'm=4')}\n", "m must be"),
        (f"ann:{HASH.replace('t=1', 't=101')}\n", "t must be"),
        (f"ann:{HASH.replace('p=1', 'p=65')}\n", "p from 1 to 64"),
        ("ann:$argon2i$v=19$m=64,t=1,p=1$AAAAAAAAAAAAAAAAAAAAAA$AAAAAAAAAAAAAAAAAAAAAA\n", "expected user:"),
        ("ann:SCRAM-SHA-256$4096:AAAA$AAAA:AAAA\n", "expected user:$argon2id$"),
        ("ann:$7$101$AAAA\n", "the hash must be $7$<iterations>"),
        ("ann:$7$\n", "the hash must be $7$<iterations>"),
        (f"ann:$6$101$AAAA${'A' * 86}==\n", "the hash must be $7$<iterations>"),
        (f"ann:$7$101$!${'A' * 86}==\n", "the hash must be $7$<iterations>"),
        (f"ann:$7$101$AAAA${'A' * 84}\n", "the hash must be $7$<iterations>"),
        (f"ann:$7$x$AAAA${'A' * 86}==\n", "iterations of $7$ must be a number"),
        (f"ann:$7$1000001$AAAA${'A' * 86}==\n", "iterations of $7$ must be from 1 to 1000000"),
        (f"ann:$digest$md5,prefix$AAAA${'A' * 22}==\n", "the hash must be $7$<iterations>"),
        (f"ann:$digest$sha256,prefix$AAAA${'A' * 22}==\n", "the hash must be $7$<iterations>"),
        (f"ann:$digest$sha256,middle$AAAA${'A' * 43}=\n", "the hash must be $7$<iterations>"),
        (f"ann:$7$0$AAAA${'A' * 86}==\n", "iterations of $7$ must be from 1 to 1000000"),
    ],
)
def test_lines_that_are_refused(file: Path, text: str, named: str) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(StartupError) as caught:
        load(file)
    message = str(caught.value)
    assert named in message
    assert str(file) in message
    assert "\n" not in message
    assert "pencil" not in message


def mosquitto_line(scheme: str, password: bytes, salt: bytes = b"twelve bytes") -> str:
    """The text of an entry as mosquitto_passwd writes it, or of one of EMQX with the place of the salt as scheme."""
    salted = base64.b64encode(salt).decode()
    if scheme in ("prefix", "suffix"):
        made = hashlib.sha256(salt + password if scheme == "prefix" else password + salt).digest()
        return f"$digest$sha256,{scheme}${salted}${base64.b64encode(made).decode()}"
    if scheme == "7":
        digest = hashlib.pbkdf2_hmac("sha512", password, salt, 101)
        return f"$7$101${salted}${base64.b64encode(digest).decode()}"
    return f"$6${salted}${base64.b64encode(hashlib.sha512(password + salt).digest()).decode()}"


@pytest.mark.parametrize("scheme", ["7", "6", "prefix", "suffix"])
def test_hashes_of_other_brokers(file: Path, scheme: str) -> None:
    """The right password fits, also beside a tenant; its replacement is always the same Argon2id hash."""
    file.write_text(f"ann:{mosquitto_line(scheme, b'pencil')}:acme\n", encoding="utf-8")
    users = PasswordUsers(load(file))
    found = users.verify("ann", b"pencil")
    assert found is not None
    assert found.foreign
    for name, password in (("ann", b"pen"), ("ann", b""), ("bob", b"pencil")):
        assert users.verify(name, password) is None
    new = found.replaced(b"pencil", CHEAP)
    assert new == found.replaced(b"pencil", CHEAP)
    assert not new.foreign
    assert new.fits(b"pencil")
    assert not new.fits(b"pen")
    assert str(new).startswith("$argon2id$v=19$m=64,t=1,p=1$")
    assert str(new).endswith(":acme")
    other = PasswordHash(mosquitto_line(scheme, b"pencil", b"another salt"))
    assert other.replaced(b"pencil", CHEAP).text != new.text


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("mosquitto_passwd") is None, reason="mosquitto_passwd is not installed")
def test_a_file_of_mosquitto_passwd(file: Path) -> None:
    subprocess.run(["mosquitto_passwd", "-b", "-c", str(file), "ann", "pencil"], check=True, timeout=30)
    subprocess.run(["mosquitto_passwd", "-b", "-H", "sha512", str(file), "bob", "pen"], timeout=30, capture_output=True)
    users = PasswordUsers(load(file))
    found = users.verify("ann", b"pencil")
    assert found is not None
    assert found.foreign
    assert users.verify("ann", b"pen") is None


@pytest.mark.usefixtures("cheap")
def test_replaced_hashes_in_the_file(file: Path) -> None:
    """An entry that somebody has changed meanwhile stays."""
    ann, bob = (PasswordHash(mosquitto_line("7", name)) for name in (b"ann", b"bob"))
    file.write_text(f"ann:{ann}\nbob:{bob}\n", encoding="utf-8")
    changes = {name: (old, old.replaced(name.encode(), CHEAP)) for name, old in (("ann", ann), ("bob", bob))}
    set_password(file, "bob", "another")
    replace_hashes(file, {**changes, "gone": (ann, bob)})
    users = PasswordUsers(load(file))
    assert users.find("ann") == changes["ann"][1]
    assert users.verify("bob", b"another") is not None
    assert users.find("gone") is None


def test_costs() -> None:
    assert parse_cost("m=19456,t=2,p=1") == PEOPLE_COST
    assert str(PEOPLE_COST) == "m=19456,t=2,p=1"
    for text, named in (
        ("", "expected m=<KiB>"),
        ("m=64,t=1", "expected m=<KiB>"),
        ("m=64,t=1,p=1 ", "expected m=<KiB>"),
        ("m=7,t=1,p=1", "m must be from 8"),
        ("m=1048577,t=1,p=1", "m must be from 8"),
        ("m=64,t=0,p=1", "t must be from 1"),
        ("m=64,t=1,p=65", "p from 1 to 64"),
    ):
        with pytest.raises(ValueError, match=re.escape(named)):
            parse_cost(text)


@pytest.mark.parametrize("text", ["m=8,t=1,p=1", "m=512,t=1,p=64", "m=1048576,t=100,p=64"])
def test_the_least_and_the_highest_cost(text: str) -> None:
    assert str(parse_cost(text)) == text


def test_files_that_are_refused(file: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        load(file)
    file.write_bytes(b"\xff:")
    with pytest.raises(StartupError, match="not UTF-8"):
        load(file)
    with pytest.raises(StartupError, match="not UTF-8"):
        set_password(file, "ann", "x")
    with pytest.raises(StartupError, match="No such file"):
        delete_user(file.with_name("none"), "ann")
    assert not file.with_name("none").exists()


def run(*arguments: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "mqtt_nats", "passwd", *arguments],
        cwd=ROOT,
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        timeout=60,
    )


@pytest.mark.long
@pytest.mark.processes
def test_the_command(file: Path) -> None:
    assert run(str(file), "ann", "--stdin", stdin="pencil\n").stdout == b"ann added\n"
    assert run(str(file), "ann", "--stdin", stdin="pen").stdout == b"ann changed\n"
    assert PasswordUsers(load(file)).verify("ann", b"pen") is not None
    assert run(str(file), "ann", "--delete").stdout == b"ann removed\n"
    assert load(file) == {}


@pytest.mark.usefixtures("cheap")
def test_the_command_refuses(file: Path) -> None:
    set_password(file, "ann", "pencil")
    before = file.read_bytes()
    runner = CliRunner()
    for arguments, text, named in (
        ([str(file), "bob", "--delete"], "", f"no user 'bob' in {file}"),
        ([str(file), "ann", "--stdin"], "\n", "the password is empty"),
        ([str(file), "", "--stdin"], "x\n", "a user name must have"),
        ([str(file), "a\nb", "--stdin"], "x\n", "a user name must have"),
        ([str(file), "ann", "--stdin"], "x" * 65536, "more than 65535 bytes"),
        ([str(file), "ann", "--scram", "--stdin"], "x\n", "line 1: expected user:SCRAM-SHA-256"),
        ([str(file.parent / "no" / "where"), "ann", "--stdin"], "x\n", "No such file"),
        ([str(file), "ann", "--stdin", "--tenant", "a b"], "x\n", "the name of a tenant must have"),
    ):
        done = runner.invoke(command, ["passwd", *arguments], input=text)
        assert isinstance(done.exception, StartupError), done.output
        assert named in str(done.exception)
        assert file.read_bytes() == before


@pytest.mark.usefixtures("cheap")
def test_the_command_and_tenants(file: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(command, ["passwd", str(file), "ann", "--stdin", "--tenant", "acme"], input="pencil\n")
    assert (done.exit_code, done.output, load(file)["ann"].tenant) == (0, "ann added\n", "acme")
    for more in ("--scram", "--delete"):
        for option in (("--tenant", "duck"), ("--cost", "m=64,t=1,p=1")):
            done = runner.invoke(command, ["passwd", str(file), "ann", "--stdin", *option, more], input="x\n")
            assert done.exit_code == 2
            assert f"{option[0]} is for users with a password" in done.output


def test_the_command_and_costs(file: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(command, ["passwd", str(file), "ann", "--stdin", "--cost", "m=72,t=3,p=2"], input="pencil\n")
    assert (done.exit_code, done.output) == (0, "ann added\n")
    assert "ann:$argon2id$v=19$m=72,t=3,p=2$" in file.read_text(encoding="utf-8")
    done = runner.invoke(command, ["passwd", str(file), "ann", "--stdin", "--cost", "high"], input="pencil\n")
    assert done.exit_code == 2
    assert "--cost: expected m=<KiB>,t=<passes>,p=<lanes>" in done.output


@pytest.mark.usefixtures("cheap")
def test_the_command_asks_twice_and_shows_nothing(file: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(command, ["passwd", str(file), "ann"], input="pencil\npencil\n")
    assert done.exit_code == 0, done.output
    assert "pencil" not in done.output
    done = runner.invoke(command, ["passwd", str(file), "bob"], input="one\ntwo\n")
    assert done.exit_code == 1
    assert list(load(file)) == ["ann"]
