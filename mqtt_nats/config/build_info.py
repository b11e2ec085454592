# SPDX-License-Identifier: Apache-2.0
"""The running build: compiled modules, or pure Python and why."""

from __future__ import annotations

import os
from importlib.resources import files
from typing import Final

REASON: Final = "MQTT_NATS_PURE_REASON"
"""Environment variable in which `make run` says why it runs the sources of a checkout."""

REASON_FILE: Final = "pure-reason.txt"
"""File in which a wheel without compiled modules says why it has none."""


def build() -> str:
    """Return ``compiled`` or ``pure Python``."""
    from mqtt_nats.codec import decoder  # most commands need no codec

    return "pure Python" if str(decoder.__file__).endswith(".py") else "compiled"


def build_and_reason() -> str:
    """Return ``compiled``, or ``pure Python`` with the reason, such as ``pure Python: there is no C compiler (cc)``."""
    name = build()
    if name == "compiled":
        return name
    file = files("mqtt_nats").joinpath(REASON_FILE)
    reason = os.environ.get(REASON) or (file.read_text(encoding="utf-8").strip() if file.is_file() else "")
    return f"{name}: {reason or 'the sources of a checkout'}"
