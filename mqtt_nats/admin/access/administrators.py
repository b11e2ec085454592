# SPDX-License-Identifier: Apache-2.0
"""Administrators: their names, roles and tokens, from the settings and from `admin_tokens_file` (docs/admin.md)."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, TypeAdapter, ValidationError

from mqtt_nats.base.config_files import read_toml
from mqtt_nats.base.errors import StartupError, worded
from mqtt_nats.config.admin_settings import TOKEN_LEAST, can_be_presented
from mqtt_nats.ctl.verb import Role

if TYPE_CHECKING:
    from mqtt_nats.config.settings import Settings

TOKENS_MOST: Final = 100
"""Most tokens of a file: each of them is compared with that of a request."""


class Administrator(NamedTuple):
    """A user of the admin listener: a name and a role."""

    name: str
    role: Role


SETTING: Final = Administrator("admin", "administrator")
"""Administrator with the token of the setting `admin_token`."""

CERTIFICATE: Final = Administrator("certificate", "administrator")
"""Administrator with a client certificate, where there are no tokens."""

LOCAL: Final = Administrator("local", "administrator")
"""Every user of this machine, where there are neither tokens nor certificates."""


RESERVED: Final = frozenset(one.name for one in (SETTING, CERTIFICATE, LOCAL))
"""Names that no entry of a file may have: the audit trail would not tell the administrators apart."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    role: Role
    token: Annotated[SecretStr, Field(min_length=TOKEN_LEAST), AfterValidator(can_be_presented)]


_NAME: Final = r"^[A-Za-z0-9_.@-]{1,64}$"

_FILE: Final = TypeAdapter(
    Annotated[dict[Annotated[str, Field(pattern=_NAME)], _Entry], Field(min_length=1, max_length=TOKENS_MOST)]
)


class Administrators:
    """Administrators by token. Without any token, everybody who is let in is one of them.

    Args:
        by_token: administrators by the bytes of their tokens.
        otherwise: who has come in without a token, where there are no tokens.
    """

    def __init__(self, by_token: dict[bytes, Administrator], otherwise: Administrator = LOCAL) -> None:
        self._by_token = by_token
        self._otherwise = otherwise

    @classmethod
    def load(cls, settings: Settings) -> Administrators:
        """Return the administrators of the settings and of the file that they name.

        Raises:
            StartupError: the file cannot be used.
        """
        found = {}
        if settings.admin_token is not None:
            found[settings.admin_token.get_secret_value().encode()] = SETTING
        if settings.admin_tokens_file is not None:
            found |= _read(settings.admin_tokens_file, set(found))
        return cls(found, LOCAL if settings.admin_tls_client_ca is None else CERTIFICATE)

    @property
    def have_tokens(self) -> bool:
        """Whether a token has to be presented."""
        return bool(self._by_token)

    def of(self, token: bytes | None) -> Administrator | None:
        """Return who presents a token (None: nobody presents one); None if it is not an administrator.

        The time does not tell which token is alike.
        """
        if not self._by_token:
            return self._otherwise
        found = None
        for known, administrator in self._by_token.items():
            if hmac.compare_digest(known, token or b""):
                found = administrator
        return found


def _read(path: Path, taken: set[bytes]) -> dict[bytes, Administrator]:
    what = "file with tokens of administrators"
    values, _ = read_toml(path, what)
    try:
        entries = _FILE.validate_python(values)
    except ValidationError as error:
        raise StartupError(f"the {what} {path}: {'; '.join(dict.fromkeys(_lines(error)))}") from None
    found: dict[bytes, Administrator] = {}
    for name, entry in entries.items():
        if name in RESERVED:
            raise StartupError(f"the {what} {path}: {name}: the name is reserved for administrators without an entry")
        token = entry.token.get_secret_value().encode()
        if token in found or token in taken:
            raise StartupError(f"the {what} {path}: {name}: another administrator has the same token")
        found[token] = Administrator(name, entry.role)
    return found


def _lines(error: ValidationError) -> list[str]:
    lines = []
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        parts: list[Any] = [part for part in detail["loc"] if part != "[key]"]
        where = ".".join(map(str, parts))
        lines.append(f"{where}: {worded(detail, 'a table')}" if where else worded(detail, "a table"))
    return lines
