# SPDX-License-Identifier: Apache-2.0
"""MQTT 5.0, section by section of the standard."""
