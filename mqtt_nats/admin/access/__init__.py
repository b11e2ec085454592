# SPDX-License-Identifier: Apache-2.0
"""Access to the admin listener: administrators, their roles, and the guard of each request."""
