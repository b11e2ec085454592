# SPDX-License-Identifier: Apache-2.0
"""Tests of the MQTT clients of the command line."""
