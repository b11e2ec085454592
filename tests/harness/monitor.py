# SPDX-License-Identifier: Apache-2.0
"""The HTTP monitoring of a nats-server."""

import json
from typing import Any
from urllib.request import urlopen


class Monitor:
    """Asks a nats-server whose configuration has ``http: "127.0.0.1:<port>"``."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> dict[str, Any]:
        """Return a JSON document of the monitor of a nats-server."""
        with urlopen(f"{self._url}/{path}", timeout=5) as response:
            found: dict[str, Any] = json.load(response)
        return found

    def connections(self, name: str) -> dict[int, str]:
        """Connections whose name starts with ``name``, by their id, which grows with each new connection."""
        found = self.get("connz?limit=10000")["connections"]
        return {one["cid"]: one.get("name", "") for one in found if one.get("name", "").startswith(name)}

    def subjects(self) -> list[str]:
        """Subjects of all subscriptions of NATS clients, one for each subscription."""
        found = self.get("connz?limit=10000&subs=1")["connections"]
        return [subject for one in found for subject in one.get("subscriptions_list", [])]
