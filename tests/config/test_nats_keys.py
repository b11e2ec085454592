# SPDX-License-Identifier: Apache-2.0
"""Files of ``nats_nkey`` and ``nats_creds`` that cannot be used: one line that names the setting and the file."""

from __future__ import annotations

from base64 import b64encode
from functools import partial
from pathlib import Path

import nkeys
import pytest

from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.nats_connect import nats_options
from mqtt_nats.config.nats_keys import creds_login, nkey_file
from mqtt_nats.config.settings import Settings
from tests.backbone.certificates import ACCOUNT, USER, nkey
from tests.conftest import GatewayFactory, NatsFactory
from tests.gateway.test_startup import refusal

JWT = b"-----BEGIN NATS USER JWT-----\neyJ0.eyJq.c2ln\n------END NATS USER JWT------\n\n"


def creds(seed: bytes, jwt: bytes = JWT) -> bytes:
    return jwt + b"-----BEGIN USER NKEY SEED-----\n" + seed + b"\n------END USER NKEY SEED------\n"


def test_what_can_be_used(tmp_path: Path) -> None:
    file = tmp_path / "user"
    seed = nkey(USER).seed
    file.write_bytes(b"\n" + seed + b"\n")
    assert nats_options(Settings(nats_nkey=file))["nkeys_seed"] == str(file)
    file.write_bytes(creds(seed))
    options = nats_options(Settings(nats_creds=file))
    assert options["user_jwt_cb"]() == b"eyJ0.eyJq.c2ln"
    assert options["signature_cb"]("nonce") == b64encode(nkeys.from_seed(bytearray(seed)).sign(b"nonce"))
    file.write_bytes(b"")
    for callback in (options["user_jwt_cb"], partial(options["signature_cb"], "nonce")):
        with pytest.raises(StartupError, match=r"^nats_creds: .* is not a credentials file"):
            callback()


def wrong_seeds() -> dict[str, bytes]:
    seed = nkey(USER).seed
    other = b"A" if seed[20:21] != b"A" else b"B"
    return {
        "garbage": b"no seed\xff",
        "nothing": b"",
        "cut off": seed[:-1],
        "cut off further": seed[:-2],
        "mistyped": seed[:20] + other + seed[21:],
        "an account's": nkey(ACCOUNT).seed,
    }


@pytest.mark.parametrize("kind", list(wrong_seeds()))
def test_what_is_no_seed(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "user"
    seed = wrong_seeds()[kind]
    file.write_bytes(seed)
    with pytest.raises(StartupError, match=r"^nats_nkey: .*/user does not contain the seed of a user nkey"):
        nkey_file(file)
    file.write_bytes(creds(seed))
    with pytest.raises(StartupError, match=r"^nats_creds: .*/user is not a credentials file, it needs the seed"):
        creds_login(file)


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage\n", creds(nkey(USER).seed, b""), JWT.splitlines()[0]],
    ids=["nothing", "garbage", "only a seed", "only a heading"],
)
def test_what_is_no_credentials_file(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "user"
    file.write_bytes(content)
    with pytest.raises(StartupError, match=r"^nats_creds: .*/user is not a credentials file, it needs a NATS USER JWT"):
        creds_login(file)


@pytest.mark.parametrize("setting", ["nats_nkey", "nats_creds"])
def test_what_cannot_be_read(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "user"
    file.touch()

    def refused(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(StartupError, match=f"^{setting}: .*/user cannot be read: Permission denied; "):
        nats_options(Settings.load({setting: file}))


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_gateway_says_it_in_one_line(
    workers: str, nats_factory: NatsFactory, gateway_factory: GatewayFactory, tmp_path: Path
) -> None:
    server = nats_factory(config=f"authorization {{ users: [{{nkey: {nkey(USER).public}}}] }}")
    file = tmp_path / "user"
    file.write_bytes(b"garbage\n")
    for setting, name in (("--nats-nkey", "nats_nkey"), ("--nats-creds", "nats_creds")):
        line = refusal(gateway_factory, server, setting, str(file), "--workers", workers)
        assert line.startswith(f"mqtt-nats: {name}: {file} ")
