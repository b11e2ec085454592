# SPDX-License-Identifier: Apache-2.0
"""What a running broker stores, carried over to a gateway: retained messages, and sessions."""
