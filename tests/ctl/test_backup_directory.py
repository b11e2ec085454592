# SPDX-License-Identifier: Apache-2.0
"""The directory of a backup: what is damaged, incomplete or of a later version is refused, by one line each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from mqtt_nats.base.errors import StartupError
from mqtt_nats.ctl.backup.directory import (
    MANIFEST,
    Manifest,
    SavedFile,
    pieces,
    prepare,
    read_manifest,
    verify,
    write_manifest,
    writing,
)


def manifest() -> Manifest:
    return Manifest(
        format=1,
        mqtt_nats="0.1",
        nats_server="2.15.1",
        account="$G",
        begun="2026-01-01T00:00:00+00:00",
        ended="2026-01-01T00:00:01+00:00",
        paused=False,
        streams=(),
        plugins={"one": True},
    )


def change(**values: object) -> Callable[[bytes], bytes]:
    """Change keys of a manifest; its checksum is right."""

    def changed(text: bytes) -> bytes:
        body = orjson.loads(text)["manifest"] | values
        sha256 = hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()
        return orjson.dumps({"manifest": body, "sha256": sha256})

    return changed


def save(directory: Path, content: bytes = b"content") -> SavedFile:
    with writing(directory, "stream.snapshot") as file:
        file.write(content[:3])
        file.write(content[3:])
        return file.done()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "saved"
    prepare(directory)
    saved = save(directory)
    write_manifest(directory, manifest())
    assert read_manifest(directory) == manifest()
    verify(directory, [saved])
    assert saved.sha256 == hashlib.sha256(b"content").hexdigest()
    assert list(pieces(directory / saved.name, 4)) == [b"cont", b"ent"]
    assert sorted(path.name for path in directory.iterdir()) == [MANIFEST, "stream.snapshot"]
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda text: text.replace(b"$G", b"$H"), "is damaged"),
        (lambda text: text[:-20], "is damaged"),
        (lambda text: b"[]", "is damaged"),
        (lambda text: b"{}", "is damaged"),
        (change(format="1"), "is damaged"),
        (change(streams=1), "is damaged"),
        (change(other=1), "is damaged"),
        (change(format=2, mqtt_nats="9.0"), "later mqtt-nats (9.0)"),
    ],
)
def test_a_wrong_manifest(tmp_path: Path, change: Callable[[bytes], bytes], text: str) -> None:
    write_manifest(tmp_path, manifest())
    path = tmp_path / MANIFEST
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StartupError) as caught:
        read_manifest(tmp_path)
    assert text in str(caught.value)


def test_a_backup_that_has_not_ended(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(StartupError, match="has not ended"):
        read_manifest(tmp_path)
    with pytest.raises(StartupError, match="no such directory"):
        read_manifest(tmp_path / "nowhere")


def test_damaged_files_are_all_named(tmp_path: Path) -> None:
    saved = save(tmp_path)
    (tmp_path / "short").write_bytes(b"conten")
    (tmp_path / "other").write_bytes(b"Content")
    wrong = [saved.model_copy(update={"name": name}) for name in ("short", "other", "absent")]
    with pytest.raises(StartupError) as caught:
        verify(tmp_path, [saved, *wrong])
    assert [line.rpartition("/")[2].split()[0] for line in caught.value.problems] == ["short", "other", "absent"]


def test_a_directory_with_something_in_it(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(StartupError, match="is not empty"):
        prepare(tmp_path)


def test_a_file_that_is_not_completed_has_no_name(tmp_path: Path) -> None:
    with writing(tmp_path, "stream.snapshot") as file:
        file.write(b"some")
    assert not (tmp_path / "stream.snapshot").exists()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StartupError, match="cannot be used"):
        prepare(tmp_path / "file" / "below")
    with pytest.raises(StartupError, match="cannot be written"), writing(tmp_path / "absent", "one"):
        pass
