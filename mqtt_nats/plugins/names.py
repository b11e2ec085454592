# SPDX-License-Identifier: Apache-2.0
"""Placeholders in the configuration of plugins: ``%c`` is a client's id, ``%u`` the user that it has proved to be."""

from __future__ import annotations

import re
from typing import Final

from mqtt_nats.hooks.events import ClientView

_PLACEHOLDER: Final = re.compile("%[cu]")


def filled(text: str, client: ClientView) -> str | None:
    """The text with the client's names in it; None where one of them must not stand there.

    That is one that the client does not have, and one that could mean more than a name: with a wildcard or a slash,
    or with a ``$`` at its beginning.
    """
    names = {"%c": client.client_id, "%u": client.user}
    for placeholder in _PLACEHOLDER.findall(text):
        name = names[placeholder]
        if not name or name[0] == "$" or any(sign in name for sign in "+#/\0"):
            return None
    return _PLACEHOLDER.sub(lambda found: names[found[0]] or "", text)
