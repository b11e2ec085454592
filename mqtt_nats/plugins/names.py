# SPDX-License-Identifier: Apache-2.0
"""Placeholders in the configuration of plugins: ``%c`` is the client id, ``%u`` the authenticated user."""

from __future__ import annotations

import re
from typing import Final

from mqtt_nats.hooks.events import ClientView

GROUP: Final = re.compile(r"\$(\d)")
"""Placeholder of a group of a regular expression."""

_NAME: Final = re.compile("%[cu]")
_NAME_OR_GROUP: Final = re.compile(f"{_NAME.pattern}|{GROUP.pattern}")


def filled(text: str, client: ClientView, match: re.Match[str] | None = None) -> str | None:
    """Return the text with the client's names in place of placeholders; None when a name is not allowed there.

    A missing name is not allowed, nor one that would change the meaning of a topic: with a wildcard or a slash, or with
    a ``$`` at its beginning. All placeholders are replaced at once, so a placeholder within a name stays.

    Args:
        match: its groups replace ``$1`` to ``$9``; None: these stay.
    """
    names = {"%c": client.client_id, "%u": client.user}
    for placeholder in _NAME.findall(text):
        name = names[placeholder]
        if not name or name[0] == "$" or any(sign in name for sign in "+#/\0"):
            return None

    def value(found: re.Match[str]) -> str:
        if found[0] in names:
            return names[found[0]] or ""
        return "" if match is None else match[int(found[1])] or ""

    return (_NAME if match is None else _NAME_OR_GROUP).sub(value, text)
