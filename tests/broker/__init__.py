# SPDX-License-Identifier: Apache-2.0
"""What a gateway does about trouble with its connections to NATS."""
