# SPDX-License-Identifier: Apache-2.0
"""The connections to NATS, stores and replies."""
