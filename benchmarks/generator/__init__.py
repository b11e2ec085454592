# SPDX-License-Identifier: Apache-2.0
"""MQTT clients that measure a broker, whichever it is; ``python -m benchmarks.generator``. No code of the gateway."""
