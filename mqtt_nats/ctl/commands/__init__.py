# SPDX-License-Identifier: Apache-2.0
"""The verbs of ``mqtt-nats ctl``, each with its command line and its answer."""
