# SPDX-License-Identifier: Apache-2.0
"""Durations and sizes of settings: read and shown in the same form."""

import pytest

from mqtt_nats.access.settings import KINDS
from mqtt_nats.base.limit_settings import duration_text, parse_duration, with_unit
from mqtt_nats.config.settings import Settings
from mqtt_nats.plugins.delayed import DelayedOptions
from mqtt_nats.transport.listener_settings import ListenerSettings


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.5, "500ms"),
        (1.5, "1.5s"),
        (30, "30s"),
        (90, "1m30s"),
        (5400, "1h30m"),
        (604_800, "7d"),
        (0xFFFFFFFE, "49710d6h28m14s"),
    ],
)
def test_durations_are_shown_as_they_are_read(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "1x", "1h30", "h1", "-1s", "1 h", "1e3", "\u0661s", "1" * 13])
def test_what_is_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match="expected a duration such as"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("setting", "value", "shown"),
    [
        ("max_packet_size", 1_048_576, "1MiB"),
        ("max_packet_size", 1_048_577, 1_048_577),
        ("max_retained_size", 2048, "2KiB"),
        ("byte_rate", None, None),
        ("message_retention", 86_400, "1d"),
        ("max_inflight", 1024, 1024),
        ("embedded", True, True),
        ("max_session_expiry_interval", None, None),
    ],
)
def test_values_are_shown_with_their_unit(setting: str, value: object, shown: object) -> None:
    assert with_unit(value, Settings.model_fields[setting]) == shown if shown != value else True


def test_every_setting_in_seconds_or_bytes_has_its_unit() -> None:
    """By the beginning of its description, or as the settings of listeners, authenticators and plugins have it."""
    models = (Settings, ListenerSettings, DelayedOptions, *KINDS.values())
    for model in models:
        for name, field in model.model_fields.items():
            says = str(field.description)
            if says.startswith("Seconds ") or name in ("connect_timeout", "timeout", "refresh", "leeway", "max_delay"):
                assert with_unit(60, field) == "1m", name
            if says.startswith("Bytes ") or name.endswith(("_bytes", "packet_size", "_retained_size")):
                assert with_unit(1024, field) == "1KiB", name
