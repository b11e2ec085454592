# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats migrate``: reads the configuration of another broker, and carries over what that broker stores."""
