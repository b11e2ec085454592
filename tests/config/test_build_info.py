# SPDX-License-Identifier: Apache-2.0
"""The name of the running build."""

from importlib.machinery import ExtensionFileLoader

from mqtt_nats.codec import decoder
from mqtt_nats.config.build_info import build


def test_the_build_is_named_after_what_python_has_loaded() -> None:
    compiled = isinstance(decoder.__spec__.loader, ExtensionFileLoader)
    assert build() == ("compiled" if compiled else "pure Python")
