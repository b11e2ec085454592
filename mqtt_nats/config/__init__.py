# SPDX-License-Identifier: Apache-2.0
"""Settings, accounts, NATS options, limits of the process."""
