# SPDX-License-Identifier: Apache-2.0
"""The command ``mqtt-nats``, also ``python -m mqtt_nats``. MQTT clients start without the modules of the gateway."""

import sys
from typing import Final

CLIENTS: Final = ("pub", "sub", "request")
"""Commands that are MQTT clients: they are short-lived, and the gateway's modules take longer to load than they run."""


def main() -> None:
    """Entry point: run the command line and exit, with status 130 where Ctrl-C comes while modules are loaded."""
    try:
        _run()
    except KeyboardInterrupt:
        sys.exit(130)


def _run() -> None:
    if sys.argv[1:2] and sys.argv[1] in CLIENTS:
        from mqtt_nats.mqtt_clients.commands import COMMANDS

        name = sys.argv[1]
        COMMANDS[name].main(sys.argv[2:], prog_name=f"mqtt-nats {name}")
    else:
        from mqtt_nats.cli import main as run

        run()


if __name__ == "__main__":
    main()
