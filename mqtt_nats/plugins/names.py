# SPDX-License-Identifier: Apache-2.0
"""Placeholders in the configuration of plugins: ``%c`` is a client's id, ``%u`` the user that it has proved to be."""

from __future__ import annotations

import re
from typing import Final

from mqtt_nats.hooks.events import ClientView

GROUP: Final = re.compile(r"\$(\d)")
"""A group of a regular expression, where there is one."""

_NAME: Final = re.compile("%[cu]")
_NAME_OR_GROUP: Final = re.compile(f"{_NAME.pattern}|{GROUP.pattern}")


def filled(text: str, client: ClientView, match: re.Match[str] | None = None) -> str | None:
    """The text with the client's names in it; None where one of them must not stand there.

    That is one that the client does not have, and one that could mean more than a name: with a wildcard or a slash,
    or with a ``$`` at its beginning. All placeholders are replaced at once: one within a name is part of the name.

    Args:
        match: ``$1`` to ``$9`` stand for its groups; None: they stand for themselves.
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
