# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats ctl``: commands that show and change gateways and streams, from any machine that reaches NATS."""
