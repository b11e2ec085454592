# SPDX-License-Identifier: Apache-2.0
"""One connected client: what its packets do to its session, to NATS and to others."""
