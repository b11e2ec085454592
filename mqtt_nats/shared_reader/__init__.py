# SPDX-License-Identifier: Apache-2.0
"""The gateway's shared reader of stored messages, and the catch-up readers of sessions that are behind it."""
