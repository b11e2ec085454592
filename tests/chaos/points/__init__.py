# SPDX-License-Identifier: Apache-2.0
"""A gateway dies at one point: between two frames that it exchanges with NATS, or two packets of a client."""
