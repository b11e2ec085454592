# SPDX-License-Identifier: Apache-2.0
"""Files of ``nats_nkey`` and ``nats_creds``, checked before nats-py reads them: its errors do not name the cause."""

from __future__ import annotations

from base64 import b32decode, b64encode
from binascii import crc_hqx
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Final

from mqtt_nats.base.errors import StartupError

SEED_BYTES: Final = 36
"""Bytes of a decoded seed: two of type, 32 of seed, two of checksum."""

_JWT: Final = b"BEGIN NATS USER JWT"
_SEED: Final = b"BEGIN USER NKEY SEED"


def nkey_file(path: Path) -> str:
    """Return the path of a file after a check that it contains the seed of a user's nkey.

    Raises:
        StartupError: the file does not contain such a seed.
    """
    if not is_seed(_read("nats_nkey", path).strip()):
        raise StartupError(
            f"nats_nkey: {path} does not contain the seed of a user nkey, which begins with SU: give the file that "
            "`nk -gen user` has written"
        )
    return str(path)


def creds_login(path: Path) -> dict[str, Callable[..., bytes]]:
    """Return options of nats-py's ``connect`` with callbacks that read a credentials file at each login.

    nats-py's own reading would loop forever over a file that is incomplete because it is being replaced.

    Raises:
        StartupError: the file is no credentials file; the callbacks raise it too.
    """

    def jwt() -> bytes:
        return _creds(path)[0]

    def sign(nonce: str) -> bytes:
        import nkeys  # imported only with a credentials file, to save memory

        pair = nkeys.from_seed(bytearray(_creds(path)[1]))
        signed = b64encode(pair.sign(nonce.encode()))
        pair.wipe()
        return signed

    _creds(path)
    return {"user_jwt_cb": jwt, "signature_cb": sign}


def _creds(path: Path) -> tuple[bytes, bytes]:
    """Return the user's JWT and seed."""
    lines = _read("nats_creds", path).splitlines()
    jwt, seed = _behind(lines, _JWT).strip(), _behind(lines, _SEED).strip()
    if not jwt or not is_seed(seed):
        lacks = "the seed of a user" if jwt else "a NATS USER JWT"
        raise StartupError(
            f"nats_creds: {path} is not a credentials file, it needs {lacks}: give the file that "
            "`nsc generate creds` has written"
        )
    return jwt, seed


def _read(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(
            f"{setting}: {path} cannot be read: {error.strerror}; give the user of this process read permission"
        ) from None


def _behind(lines: list[bytes], heading: bytes) -> bytes:
    """Return the line after a heading; empty without one."""
    return next((after for line, after in pairwise(lines) if heading in line), b"")


def is_seed(seed: bytes) -> bool:
    """Whether the bytes are the seed of a user's nkey."""
    try:
        raw = b32decode(seed + b"=" * (-len(seed) % 8))
    except ValueError:
        return False
    whole = len(raw) == SEED_BYTES and crc_hqx(raw[:-2], 0) == int.from_bytes(raw[-2:], "little")
    return whole and seed.startswith(b"SU")
