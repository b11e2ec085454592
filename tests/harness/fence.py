# SPDX-License-Identifier: Apache-2.0
"""Fence of a nats-py client: nats-server has handled all that the client has sent."""

from nats.aio.client import Client


async def fence(client: Client) -> None:
    """Return when nats-server has handled the subscriptions and publishes of a client.

    ``Client.flush`` writes its PING before the frames that nats-py has collected, and they are written while it waits.
    So only the PING of a second call is behind them.
    """
    await client.flush()
    await client.flush()
