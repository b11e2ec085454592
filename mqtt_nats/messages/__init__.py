# SPDX-License-Identifier: Apache-2.0
"""A message, its headers and properties; PUBLISH as one subscriber gets it."""
