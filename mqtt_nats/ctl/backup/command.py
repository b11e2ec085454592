# SPDX-License-Identifier: Apache-2.0
"""Commands ``mqtt-nats backup`` and ``mqtt-nats restore``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mqtt_nats.config.process_limits import say
from mqtt_nats.ctl.backup.restore import Wanted, restore
from mqtt_nats.ctl.backup.save import backup
from mqtt_nats.ctl.nats_connection import run_connected

if TYPE_CHECKING:
    from mqtt_nats.backbone.inbox import RequestInbox
    from mqtt_nats.config.settings import Settings


def run_backup(settings: Settings, directory: Path, *, pause: bool) -> None:
    """Write a backup. Raises StartupError."""

    async def work(inbox: RequestInbox) -> None:
        found = await backup(inbox, directory, pause=pause, tell=say)
        say(f"backup of account {found.account} in {directory}: {len(found.streams)} streams, complete")

    run_connected(settings, work)


def run_restore(settings: Settings, wanted: Wanted) -> None:
    """Restore a backup. Raises StartupError."""

    async def work(inbox: RequestInbox) -> None:
        found = await restore(inbox, wanted, say)
        say(f"restored from {wanted.directory}: {len(found)} streams; gateways serve clients again")

    run_connected(settings, work)
