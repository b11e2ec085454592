# SPDX-License-Identifier: Apache-2.0
"""Spark data source and sink for the messages that MQTT clients have published.

Spark finds this package by its name: `spark.read.format("mqtt_nats")` needs no registration. Spark imports the package
in each Python worker, so the package imports its modules only when `DefaultSource` is used.
"""

import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark_mqtt_nats.source import MqttNatsSource as DefaultSource

__all__ = ["DefaultSource", "prepare"]


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Prepare this process for a Spark session: find a Java, and choose the interpreter of the Python workers.

    Spark starts its workers as `python3` of PATH unless PYSPARK_PYTHON is set. That is another interpreter, without
    this package, when a script is run by `.venv/bin/python` outside an activated environment. So PYSPARK_PYTHON is set
    to the interpreter of this process, by the program of :mod:`pyspark_mqtt_nats.worker_python`, unless it is set
    already. A script that spark-submit runs is left alone.
    Where the command `mqtt-nats spark prepare` has made an archive of Spark's classes, SPARK_SUBMIT_OPTS is set to
    options that name it, unless it is set already.

    Call it before the session is made. Raises JavaError when no Java is usable.
    """
    from pyspark_mqtt_nats import class_archive, java, worker_python

    if "PYSPARK_GATEWAY_PORT" in environ:
        return
    java.ensure(environ)
    class_archive.use_archive(environ)
    environ.setdefault("PYSPARK_PYTHON", worker_python.worker_python())


def __getattr__(name: str) -> Any:
    if name == "DefaultSource":
        from pyspark_mqtt_nats.source import MqttNatsSource

        return MqttNatsSource
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
