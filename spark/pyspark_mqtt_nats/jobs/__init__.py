# SPDX-License-Identifier: Apache-2.0
"""Jobs ready to run: ``mqtt-nats spark JOB``, ``python -m pyspark_mqtt_nats.jobs JOB`` or ``spark-submit``.

Each job is a dataclass of what it is to do and a function ``run(spark, job, progress)`` that returns what came out of
it; `commands` has their command lines, `session` the Spark session, `failures` turns exceptions into one line.
"""


class JobError(Exception):
    """A job cannot go on; the text is one line and names the option to change."""
