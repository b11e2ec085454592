# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats ctl``: looks at gateways and streams from any machine that reaches NATS, and changes them."""
