# SPDX-License-Identifier: Apache-2.0
"""``python -m mqtt_nats`` is the command ``mqtt-nats``."""

from mqtt_nats.cli import main

if __name__ == "__main__":
    main()
