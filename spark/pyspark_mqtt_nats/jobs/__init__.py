# SPDX-License-Identifier: Apache-2.0
"""Jobs ready to run: ``mqtt-nats spark JOB``, ``python -m pyspark_mqtt_nats.jobs JOB`` or ``spark-submit``.

Each job is a dataclass of what it is to do and a function ``run(spark, job, progress)`` that returns what came out of
it; `commands` has their command lines, `session` the Spark session, `failures` turns exceptions into one line.
"""

import importlib.util


class JobError(Exception):
    """A job cannot go on; the text is one line and names the option to change."""


def require_spark() -> None:
    """Raise JobError unless the packages of Spark are installed."""
    for package in ("pyspark", "pyarrow"):
        if importlib.util.find_spec(package) is None:
            raise JobError(f"{package} is not installed: pip install 'mqtt-nats[spark]'")
