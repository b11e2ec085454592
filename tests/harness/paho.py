# SPDX-License-Identifier: Apache-2.0
"""The end of a paho client."""

from paho.mqtt.client import Client


def stop(client: Client) -> None:
    """End the network thread, and close the sockets by which the client wakes it.

    paho leaves those to the collector, which may find them before the client that would close them.
    """
    client.loop_stop()
    client._reset_sockets()
