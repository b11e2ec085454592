# SPDX-License-Identifier: Apache-2.0
"""Who may use the admin listener, and for what."""
