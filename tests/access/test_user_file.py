# SPDX-License-Identifier: Apache-2.0
"""File with a line for each user: what is read, and how a change replaces it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from mqtt_nats.access.user_file import changing, read
from mqtt_nats.base.errors import StartupError


def parse(line: str) -> tuple[str, str]:
    name, colon, entry = line.partition(":")
    if not colon:
        raise ValueError("there is no colon")
    return name, entry


def load(path: Path) -> dict[str, str]:
    return read(path, parse)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "users"
    found.write_text("one:1\ntwo:2\n", encoding="utf-8")
    return found


def test_entries_by_user(path: Path) -> None:
    assert load(path) == {"one": "1", "two": "2"}


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"one:1\n\ntwo:2\n", "line 2: there is no colon"),
        (b"one:1\ntwo:2\none:3\n", "line 3: the user of line 1 is repeated"),
        (b"\xff:1\n", "is not UTF-8 text"),
    ],
)
def test_a_wrong_file_names_its_line_and_no_secret(path: Path, content: bytes, error: str) -> None:
    path.write_bytes(content)
    with pytest.raises(StartupError, match=error):
        load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot read the users in .*: No such file"):
        load(tmp_path / "none")


def test_a_change_replaces_the_file_for_its_owner_alone(path: Path) -> None:
    path.chmod(0o644)
    with changing(path, load) as users:
        users["three"] = "3"
        del users["one"]
    assert path.read_text(encoding="utf-8") == "two:2\nthree:3\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["users"]


def test_a_link_stays_a_link_and_the_permissions_stay_where_they_are_to(path: Path) -> None:
    path.chmod(0o640)
    link = path.with_name("link")
    link.symlink_to(path)
    with changing(link, load, private=False) as users:
        users["three"] = "3"
    assert link.is_symlink()
    assert load(path)["three"] == "3"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def change_and_fail(path: Path) -> None:
    with changing(path, load) as users:
        users.popitem()
        del users["nobody"]


def test_nothing_is_written_without_a_change_or_after_an_error(path: Path) -> None:
    before = path.stat().st_ino
    with changing(path, load):
        pass
    with pytest.raises(KeyError):
        change_and_fail(path)
    assert path.stat().st_ino == before
    assert load(path) == {"one": "1", "two": "2"}
