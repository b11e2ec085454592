# SPDX-License-Identifier: Apache-2.0
"""Options of plugins: unknown keys are errors, values are not shown in errors and do not change."""

from __future__ import annotations

from typing import cast

import pytest
from pydantic import ValidationError

from mqtt_nats.plugins.base import NoOptions, Options, Plugin
from mqtt_nats.plugins.host import Host


class Secret(Options):
    """Options with one number."""

    pin: int = 0


class Opened(Plugin[Secret]):
    """A plugin with options."""

    options_type = Secret


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(ValidationError, match=r"pim\n.*Extra inputs are not permitted"):
        Secret.model_validate({"pim": 1})
    with pytest.raises(ValidationError, match="Extra inputs"):
        NoOptions.model_validate({"anything": 1})


def test_the_value_of_a_wrong_option_is_not_shown() -> None:
    with pytest.raises(ValidationError) as caught:
        Secret.model_validate({"pin": "top secret"})
    assert "pin" in str(caught.value)
    assert "top secret" not in str(caught.value)


def test_options_do_not_change_while_the_plugin_runs() -> None:
    options = Secret(pin=1)
    with pytest.raises(ValidationError, match="frozen"):
        options.pin = 2


async def test_a_plugin_may_do_without_load_and_unload() -> None:
    host = cast("Host", object())
    plugin = Opened(Secret(pin=1), host)
    assert (plugin.options.pin, plugin.gateway) == (1, host)
    await plugin.load()
    await plugin.unload()
    assert (Plugin.options_type, Opened.options_type) == (NoOptions, Secret)
