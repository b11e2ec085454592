# SPDX-License-Identifier: Apache-2.0
"""``mqtt-nats backup`` and ``mqtt-nats restore``: the streams of an account, with their consumers, in a directory."""
