# SPDX-License-Identifier: Apache-2.0
"""Tables of Delta Lake and Iceberg: Spark writes their files, and this process commits them by delta-rs or PyIceberg.

So neither needs jars, and any version of Spark will do.
"""

import importlib.util
from typing import Final

from pyspark_mqtt_nats.jobs import JobError

PACKAGES: Final = {"delta": "deltalake", "iceberg": "pyiceberg"}
"""Format -> module that commits to its tables; the extra of mqtt-nats has the name of the format."""


def require(format: str) -> None:
    """Raise JobError when the package for tables of this format is not installed."""
    module = PACKAGES.get(format)
    if module is not None and importlib.util.find_spec(module) is None:
        raise JobError(f"--format {format} needs the package {module}: pip install 'mqtt-nats[{format}]'")
