# SPDX-License-Identifier: Apache-2.0
"""Who may connect: the interface of authenticators, and those that there are."""
