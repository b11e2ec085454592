# SPDX-License-Identifier: Apache-2.0
"""Login at the embedded nats-server: an nkey in its data directory, and a context file for the nats CLI.

Every user of a machine can connect to 127.0.0.1. So nats-server admits only processes that can read the seed, and only
the owner of the data directory can read it. The seed is never sent: it signs the nonce of nats-server.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

import orjson

from mqtt_nats.base.errors import StartupError
from mqtt_nats.config.nats_keys import is_seed

if TYPE_CHECKING:
    from mqtt_nats.config.settings import Settings

SEED: Final = "nats.nk"
"""File in the data directory with the seed of the nkey."""

CONTEXT: Final = "nats.json"
"""Context file in the data directory for the nats CLI (``--context FILE``), with URL and login of nats-server."""

LOCK: Final = "lock"
"""File in the data directory that is locked while a gateway, or its embedded nats-server, uses the directory."""

PORT: Final = 4222

PRIVATE: Final = 0o600

WAYS: Final = ("nats_user", "nats_password", "nats_token", "nats_nkey", "nats_creds")
"""Settings of a login to NATS."""


class Login(NamedTuple):
    """Login at the embedded nats-server."""

    seed: Path
    """File with the seed."""
    public: str
    """Public key, which the configuration of nats-server contains."""


def make_login(data: Path) -> Login:
    """Return the login of a data directory; create a missing one.

    Raises:
        StartupError: the file cannot be used.
    """
    import nkeys  # imported only with an nkey, to save memory

    path = data.resolve() / SEED
    try:
        seed = _own(path)
        if seed is None:
            seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
            write_private(path, seed + b"\n")
    except OSError as error:
        raise StartupError(f"{path}, the login at the embedded nats-server, cannot be used: {error.strerror}") from None
    if not is_seed(seed):
        raise StartupError(f"{path} does not contain the seed of a user nkey: remove it, and a new one is created")
    return Login(path, nkeys.from_seed(bytearray(seed)).public_key.decode())


def _own(path: Path) -> bytes | None:
    """Return a file's content, None without the file. It must be the user's own; it is made private to the user."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise StartupError(f"{path} may have been written by another user: remove it, and a new one is created")
        os.fchmod(descriptor, PRIVATE)
        return file.read().strip()


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read; an existing file is replaced as a whole.

    Raises:
        OSError: the file cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
        file.write(content)
    fresh.replace(path)


def write_context(data: Path, login: Login, url: str) -> None:
    """Write the context file for the nats CLI.

    Raises:
        StartupError: the file cannot be written.
    """
    path = data / CONTEXT
    found = {"description": "the embedded nats-server of mqtt-nats", "url": url, "nkey": str(login.seed)}
    try:
        write_private(path, orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise StartupError(f"cannot write {path}: {error.strerror}") from None


def logged_in(url: str, login: Login) -> dict[str, Any]:
    """Return the NATS settings for the embedded nats-server, which replace the gateway's own."""
    return {**dict.fromkeys(WAYS), "nats": (url,), "nats_nkey": login.seed}


def find_server(settings: Settings) -> Settings:
    """Return the settings of an operator's command, with the embedded nats-server that runs in ``data``, at any port.

    Settings that name ``nats`` or a login keep their ``nats``.
    """
    given = "nats" in settings.model_fields_set or any(getattr(settings, name) is not None for name in WAYS)
    if not given and _runs(settings.data):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            url = str(orjson.loads((settings.data / CONTEXT).read_bytes())["url"])
            settings = settings.model_copy(update={"nats": (url,)})
    return find_login(settings)


def _runs(data: Path) -> bool:
    """Whether a gateway, or its embedded nats-server, has the lock of a data directory."""
    try:
        with (data / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def find_login(settings: Settings) -> Settings:
    """Return the settings with the login of the data directory, if they have none and ``nats`` is that nats-server.

    So a second gateway finds the login at the embedded nats-server of another gateway.
    """
    if any(getattr(settings, name) is not None for name in WAYS):
        return settings
    found = seed_for(settings.data, settings.nats)
    return settings if found is None else settings.model_copy(update={"nats_nkey": found})


def seed_for(data: Path, urls: tuple[str, ...]) -> Path | None:
    """Return the seed file for these servers; None: they are not the embedded one, or the file cannot be read."""
    try:
        context = orjson.loads((data / CONTEXT).read_bytes())
        here = _address(context["url"])
        if any(_address(url.strip()) != here or "@" in url for url in urls):
            return None
        seed = Path(context["nkey"])
        return seed if is_seed(seed.read_bytes().strip()) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _address(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return parts.scheme, "127.0.0.1" if host == "localhost" else host, parts.port or PORT
