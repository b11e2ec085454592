# SPDX-License-Identifier: Apache-2.0
"""The admin listener: who gets in, metrics, health, the HTTP API, the page."""
