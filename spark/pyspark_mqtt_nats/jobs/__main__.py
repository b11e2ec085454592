# SPDX-License-Identifier: Apache-2.0
"""``python -m pyspark_mqtt_nats.jobs JOB``, and what spark-submit is given."""

from pyspark_mqtt_nats.jobs.commands import main

if __name__ == "__main__":
    main()
