# SPDX-License-Identifier: Apache-2.0
"""Migration from other brokers. The inputs are configurations that others have published, with other names."""
