# SPDX-License-Identifier: Apache-2.0
"""Durable delivery to one client: consumers, resume, position, draining, slow clients."""
