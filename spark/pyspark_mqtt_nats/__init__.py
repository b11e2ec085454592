# SPDX-License-Identifier: Apache-2.0
"""Apache Spark on the messages that MQTT clients have published. Nothing public yet."""
