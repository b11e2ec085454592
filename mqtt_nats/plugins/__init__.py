# SPDX-License-Identifier: Apache-2.0
"""Plugins: Python packages with hooks, which are loaded and unloaded while a gateway runs.

A plugin is a subclass of :class:`Plugin`, named by an entry point of the group ``mqtt_nats.plugins``; docs/plugins.md
has an example.
"""

from mqtt_nats.plugins.base import NoOptions as NoOptions
from mqtt_nats.plugins.base import Options as Options
from mqtt_nats.plugins.base import Plugin as Plugin
from mqtt_nats.plugins.host import Host as Host
