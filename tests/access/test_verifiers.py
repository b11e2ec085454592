# SPDX-License-Identifier: Apache-2.0
"""The file of users: what is refused, how it is changed, and the command that does it."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from mqtt_nats.access.verifiers import MECHANISM, NOBODY, Verifier, delete_user, load, make, set_password
from mqtt_nats.base.errors import StartupError
from mqtt_nats.cli import command
from tests.harness.nats import ROOT

# The password and salt of RFC 7677's example, as PostgreSQL keeps them
POSTGRES = (
    "SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ==$WG5d8oPm3OtcPnkdi4Uo7BkeZkBFzpcXkuLmtbsT4qY="
    ":wfPLwcE6nTWhTAmQ7tl2KeoiWGPlZqQxSrmfPwDl2dU="
)
KEY = "WG5d8oPm3OtcPnkdi4Uo7BkeZkBFzpcXkuLmtbsT4qY="


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "users"


def test_lines_are_postgres_verifiers(file: Path) -> None:
    file.write_text(f"user:{POSTGRES}\nwith:colon $ and = sign:{POSTGRES}\nnaïve:{POSTGRES}", encoding="utf-8")
    users = load(file)
    assert list(users) == ["user", "with:colon $ and = sign", "naïve"]
    assert {str(verifier) for verifier in users.values()} == {POSTGRES}
    salt, stored, server, iterations = MECHANISM.make_auth_info("pencil", salt=users["user"].salt)
    assert users["user"] == Verifier(iterations, salt, stored, server)
    file.write_text("", encoding="utf-8")
    assert load(file) == {}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "expected user:SCRAM-SHA-256"),
        ("# users", "expected user:SCRAM-SHA-256"),
        ("user", "expected user:SCRAM-SHA-256"),
        ("user:password", "expected user:SCRAM-SHA-256"),
        (f"user:{POSTGRES}$x", "expected user:SCRAM-SHA-256"),
        (f"user:{POSTGRES}".replace("256", "512"), "expected user:SCRAM-SHA-256"),
        (f"us\u00ader:{POSTGRES}", "SASLprep"),
        (f"us\0er:{POSTGRES}", "SASLprep"),
        (f"user:{POSTGRES}".replace("4096", "4095"), "iterations"),
        (f"user:{POSTGRES}".replace("4096", "10000001"), "iterations"),
        (f"user:{POSTGRES}".replace("4096", "4" * 5000), "iterations"),
        (f"user:{POSTGRES}".replace("4096", "-4096"), "iterations"),
        (f"user:{POSTGRES}".replace("4096", "\u0664096"), "iterations"),
        (f"user:SCRAM-SHA-256$4096$:{KEY}:{KEY}", "base64"),
        (f"user:SCRAM-SHA-256$4096:{KEY}:{KEY}", "expected user:SCRAM-SHA-256"),
        (f"user:SCRAM-SHA-256$4096:!$:{KEY}", "base64"),
        (f"user:SCRAM-SHA-256$4096:AAAA${KEY}:{KEY}", "12 bytes"),
        (f"user:SCRAM-SHA-256$4096:{KEY}$AAAA:{KEY}", "32 bytes"),
        (f"user:SCRAM-SHA-256$4096:{KEY}${KEY}:", "32 bytes"),
        (f"user:SCRAM-SHA-256$4096:{KEY}${KEY}", "32 bytes"),
        (f"user:{POSTGRES}x", "base64"),
        (f"user:{POSTGRES} ", "base64"),
        (f"first:{POSTGRES}", "the user of line 1 is repeated"),
    ],
)
def test_a_bad_line_is_named_and_not_shown(file: Path, line: str, named: str) -> None:
    file.write_text(f"first:{POSTGRES}\n{line}\nlast:{POSTGRES}\n", encoding="utf-8")
    with pytest.raises(StartupError) as caught:
        load(file)
    message = str(caught.value)
    assert message.startswith(f"{file}, line 2: ")
    assert named in message
    assert "\n" not in message
    assert KEY not in message


def test_files_that_cannot_be_read(file: Path) -> None:
    with pytest.raises(StartupError, match="cannot read"):
        load(file)
    with pytest.raises(StartupError, match="cannot read"):
        load(file.parent)
    file.write_bytes(b"\xff")
    with pytest.raises(StartupError, match="UTF-8"):
        load(file)


def test_changes(file: Path) -> None:
    assert set_password(file, "one", "a")
    assert set_password(file, "two", "b")
    first = load(file)
    assert list(first) == [NOBODY, "one", "two"]
    assert not set_password(file, "one", "a")
    second = load(file)
    assert second["one"] != first["one"]  # another salt
    assert (second[NOBODY], second["two"]) == (first[NOBODY], first["two"])
    assert delete_user(file, "one")
    assert not delete_user(file, "one")
    assert list(load(file)) == [NOBODY, "two"]
    assert [path.name for path in file.parent.iterdir()] == ["users"]


def test_only_the_owner_may_read_it(file: Path) -> None:
    before = os.umask(0)
    try:
        set_password(file, "one", "a")
        assert file.stat().st_mode & 0o777 == 0o600
        file.chmod(0o644)
        set_password(file, "one", "b")
        assert file.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_root_leaves_it_to_its_owner(file: Path) -> None:
    set_password(file, "one", "a")
    os.chown(file, 65534, 65534)
    set_password(file, "two", "b")
    assert (file.stat().st_uid, file.stat().st_gid, file.stat().st_mode & 0o777) == (65534, 65534, 0o600)


def test_a_link_stays_a_link(file: Path) -> None:
    link = file.with_name("link")
    link.symlink_to(file)
    set_password(link, "one", "a")
    assert link.is_symlink()
    assert "one" in load(file)


def test_what_fails_leaves_it_as_it_was(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_password(file, "one", "a")
    before = file.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StartupError, match="No space left"):
            set_password(file, "one", "b")
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["users"]
    for name, password in (("", "x"), ("\u00ad", "x"), ("a\nb", "x"), ("one", ""), ("one", "\0"), ("one", "\u00ad")):
        with pytest.raises(ValueError, match=r"user name|password"):
            set_password(file, name, password)
    with pytest.raises(ValueError, match="user name"):
        delete_user(file, "a\tb")
    file.write_text("nonsense\n", encoding="utf-8")
    with pytest.raises(StartupError, match="line 1"):
        set_password(file, "one", "b")
    assert file.read_text(encoding="utf-8") == "nonsense\n"


def test_changes_at_the_same_time_are_all_made(file: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda number: set_password(file, f"user{number}", "x"), range(40)))
    assert len(load(file)) == 41


def test_the_password_of_the_verifier() -> None:
    assert make("pencil").iterations == 4096
    assert len(make("pencil").salt) == 16
    assert make("pencil").salt != make("pencil").salt


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mqtt_nats", "passwd", "--scram", *arguments],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.long
@pytest.mark.processes
def test_the_command(file: Path) -> None:
    assert run(str(file), "ann", "--stdin", stdin="pencil\n").stdout == "ann added\n"
    assert run(str(file), "ann", "--stdin", stdin="pen").stdout == "ann changed\n"
    assert run(str(file), "ann", "--delete").stdout == "ann removed\n"
    for arguments, stdin, named in (
        (["ann", "--delete"], "", f"no user 'ann' in {file}"),
        (["ann", "--stdin"], "\n", "the password is empty"),
        (["ann", "--stdin"], "", "the password is empty"),
        (["", "--stdin"], "x\n", "user name"),
    ):
        done = run(str(file), *arguments, stdin=stdin)
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("mqtt-nats: ")
        assert named in line
    done = run(str(file.parent / "no" / "where"), "ann", "--stdin", stdin="x\n")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No such file" in done.stderr


def test_the_command_asks_twice_and_shows_nothing(file: Path) -> None:
    runner = CliRunner()
    done = runner.invoke(command, ["passwd", "--scram", str(file), "ann"], input="pencil\npencil\n")
    assert done.exit_code == 0, done.output
    assert "pencil" not in done.output
    done = runner.invoke(command, ["passwd", "--scram", str(file), "bob"], input="one\ntwo\n")
    assert done.exit_code == 1
    assert list(load(file)) == [NOBODY, "ann"]
