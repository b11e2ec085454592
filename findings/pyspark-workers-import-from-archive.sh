#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# PySpark 4.3.0: the driver imports the PySpark that pip has installed, and the Python workers of the same session import another
# copy: Spark puts `pyspark.zip` of the package before everything else on their path, also before PYTHONPATH of the user. The
# archive has no bytecode, so each worker that Spark starts compiles PySpark anew. Needs Java 17 or later.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyspark==4.3.0
mkdir "$folder/mine"
PYTHONPATH="$folder/mine" "$folder/venv/bin/python" - "$folder" <<'PYTHON'
import os, pathlib, sys, zipfile

import pyspark
from pyspark.sql import SparkSession

FOLDER = pathlib.Path(sys.argv[1])
os.chdir(FOLDER)
os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1", SPARK_LOCAL_DIRS=str(FOLDER / "local"))


def look(rows):
    import pyspark

    yield pyspark.__file__, sys.path.index(str(FOLDER / "mine"))


spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
try:
    ((worker, place),) = spark.sparkContext.parallelize([1], 1).mapPartitions(look).collect()
finally:
    gateway = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(60)
package = pathlib.Path(pyspark.__file__).parent
archive = package / "python" / "lib" / "pyspark.zip"
with zipfile.ZipFile(archive) as found:
    compiled = [name for name in found.namelist() if name.endswith(".pyc")]
driver = package.name == "pyspark" and package.parent.name == "site-packages"
print(f"PySpark 4.3.0: the driver imports the package: {driver}; the worker {worker.replace(str(package), '...')}")
print(f"files with bytecode in the archive: {len(compiled)}; place of PYTHONPATH on the worker's path: {place}")
if not (driver and worker.startswith(str(archive)) and not compiled and place > 1):
    sys.exit("the behaviour has changed")
PYTHON
