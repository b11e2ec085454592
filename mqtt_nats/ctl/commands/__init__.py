# SPDX-License-Identifier: Apache-2.0
"""Verbs of ``mqtt-nats ctl``: arguments, functions and text output, by subject."""
