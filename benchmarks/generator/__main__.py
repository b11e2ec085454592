# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.generator [HOST:PORT] [OPTIONS]``."""

from benchmarks.generator.command import bench

bench(prog_name="python -m benchmarks.generator")
