# SPDX-License-Identifier: Apache-2.0
"""The admin listener: health, metrics, an HTTP API and a page for people. Its parts are loaded when it is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from mqtt_nats.base.errors import StartupError

if TYPE_CHECKING:
    from mqtt_nats.admin.listener import AdminListener
    from mqtt_nats.client.account import Account
    from mqtt_nats.config.settings import Settings
    from mqtt_nats.control.audit import AuditTrail
    from mqtt_nats.transport.listener import Listener
    from mqtt_nats.transport.listener_settings import Bound


class ServedGateway(Protocol):
    """The gateway that the admin listener shows."""

    @property
    def settings(self) -> Settings:
        """Settings of the gateway."""

    @property
    def listeners(self) -> Sequence[Listener]:
        """Listeners for MQTT clients."""

    @property
    def reloads(self) -> list[Callable[[], None]]:
        """Functions that read files again; to be added to."""

    @property
    def account(self) -> Account | None:
        """The gateway's own account; None before it serves."""

    @property
    def audit_trail(self) -> AuditTrail:
        """AuditTrail of administrators over HTTP."""

    @property
    def identity(self) -> str:
        """Id with which the gateway has started in its own account."""

    def name(self) -> str:
        """Return the name of the gateway."""


@contextlib.asynccontextmanager
async def administered(
    gateway: ServedGateway, on_ready: Callable[[list[Bound]], None]
) -> AsyncIterator[Callable[[list[Bound]], None]]:
    """Listen for administrators as long as this lasts, where the settings say so.

    Yields what is to be called in place of ``on_ready``: it is told of the admin listener too.

    Raises:
        StartupError: the extra is not installed, a file cannot be used, or the address is not to be had.
    """
    if gateway.settings.admin_listen is None:
        yield on_ready
        return
    made, _ = _parts()
    async with made(gateway) as listener:

        def ready(addresses: list[Bound]) -> None:
            listener.get_ready()
            on_ready([*addresses, listener.bound])

        yield ready


def check(settings: Settings) -> None:
    """Whether there could be the admin listener that the settings ask for, but for its address.

    Raises:
        StartupError: the extra is not installed, or a file cannot be used.
    """
    if settings.admin_listen is not None:
        _, check_files = _parts()
        check_files(settings)


def _parts() -> tuple[type[AdminListener], Callable[[Settings], object]]:
    try:
        from mqtt_nats.admin.listener import AdminListener, check_files
    except ImportError as error:
        raise StartupError(f"admin_listen needs the extra `admin`: pip install 'mqtt-nats[admin]' ({error})") from None
    return AdminListener, check_files
