# SPDX-License-Identifier: Apache-2.0
"""Access control: interfaces of authenticators, credentials and their files, access rules."""
