# SPDX-License-Identifier: Apache-2.0
"""A client as hooks see it."""

from __future__ import annotations

from typing import Any


class PlainConnection:
    """A `HookedConnection` that has no address."""

    host = ""


class PlainClient:
    """A `HookedClient` that has a name, and perhaps a user."""

    def __init__(self, client_id: str, user: str | None = None) -> None:
        self.client_id, self._user = client_id, user
        self.version, self.durable, self.epoch = 5, False, 0
        self.connection = PlainConnection()

    @property
    def user(self) -> str | None:
        return self._user

    def log_fields(self) -> dict[str, Any]:
        return {"client": self.client_id}
