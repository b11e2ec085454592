# SPDX-License-Identifier: Apache-2.0
"""Spark data source and sink for the messages that MQTT clients have published.

Spark finds this package by its name: `spark.read.format("mqtt_nats")` needs no registration. Spark imports the package
in each Python worker, so the package imports its modules only when `DefaultSource` is used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark_mqtt_nats.source import MqttNatsSource as DefaultSource

__all__ = ["DefaultSource"]


def __getattr__(name: str) -> Any:
    if name == "DefaultSource":
        from pyspark_mqtt_nats.source import MqttNatsSource

        return MqttNatsSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
