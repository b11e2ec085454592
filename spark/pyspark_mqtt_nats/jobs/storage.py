# SPDX-License-Identifier: Apache-2.0
"""Directories of a job, output and checkpoint, on any file system that Spark knows.

Two mistakes would lose messages without a word. Spark's file sink skips the batches that its log in the output has,
also when they come from another checkpoint. And a query with a checkpoint goes on where it was, also when the output is
new.
"""

import contextlib
import re
import secrets
from pathlib import Path
from typing import Any, Final, NoReturn

import orjson
from pyspark.sql import SparkSession

from pyspark_mqtt_nats.jobs import JobError

LOGGED: Final = ("parquet", "orc", "json", "csv", "text", "avro")
"""Formats of Spark's file sink; it keeps a log of its files in the output."""

_STATE: Final = "mqtt-nats.json"

_HADOOP_STATE: Final = re.compile(r" \(exists=\w+, cwd=[^)]*\)")
"""What Hadoop adds where it cannot make a directory."""

_OBJECT_STORES: Final = ("s3a", "gs")
"""Schemes of stores without a rename; a file is there, or replaces another one, when its stream is closed."""


_ROOT: Final = re.compile(r"(?:[\w.+-]+:(?://[^/]*)?)?/?")
"""Beginning of a path: the scheme, the authority, and the first slash."""


def parent(path: str) -> str:
    """Return the directory in which a file or a directory is; that of a root is the root."""
    names = _ROOT.sub("", path, count=1)
    root = path.removesuffix(names)
    return root + names.rstrip("/").rpartition("/")[0] or "."


class Place:
    """Directory on any file system; raises JobError that names `option` when it cannot be used."""

    def __init__(self, spark: SparkSession, path: str, option: str) -> None:
        self.path = path
        self.option = option
        jvm: Any = spark._jvm
        context: Any = spark._jsc
        self._jvm = jvm
        self._gateway: Any = spark.sparkContext._gateway
        try:
            self._root = jvm.org.apache.hadoop.fs.Path(path)
            self._files = self._root.getFileSystem(context.hadoopConfiguration())
        except Exception as error:
            raise self._problem(error) from None

    @property
    def of_objects(self) -> bool:
        """Whether an object store has the files: rights there may begin at any prefix of a path, as at a directory."""
        return self._files.getUri().getScheme() in _OBJECT_STORES

    def has(self, name: str) -> bool:
        """Whether there is a file or directory of this name."""
        try:
            return bool(self._files.exists(self._child(name)))
        except Exception as error:
            raise self._problem(error) from None

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, None without the file."""
        if not self.has(name):
            return None
        try:
            stream = self._files.open(self._child(name))
            try:
                return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()
        except Exception as error:
            raise self._problem(error) from None

    def child(self, name: str) -> str:
        """Return the path of a file or directory of this name."""
        return str(self._child(name))

    def move(self, directory: str, prefix: str, name: str) -> None:
        """Move the one file in a directory whose name begins with `prefix` to `name`, replacing what is there."""
        try:
            found = [status.getPath() for status in self._files.listStatus(self._child(directory))]
            (part,) = (path for path in found if path.getName().startswith(prefix))
            self._files.delete(self._child(name), True)
            if not self._files.rename(part, self._child(name)):
                raise OSError("a file cannot be renamed there")
        except Exception as error:
            raise self._problem(error) from None

    def remove(self, name: str) -> None:
        """Remove a file or a directory with what is in it, if it is there."""
        try:
            self._files.delete(self._child(name), True)
        except Exception as error:
            raise self._problem(error) from None

    def files(self, name: str) -> list[tuple[str, int, int]]:
        """Return the files below a directory: path from there, bytes, time in milliseconds since 1970."""
        found = []
        try:
            listed = self._files.listFiles(self._child(name), True)
            while listed.hasNext():
                one = listed.next()
                path = str(one.getPath().toString()).partition(f"/{name}/")[2]
                found.append((path, int(one.getLen()), int(one.getModificationTime())))
        except Exception as error:
            raise self._problem(error) from None
        return found

    def rename(self, name: str, other: str) -> None:
        """Rename a file or a directory; the directory of the new name is made where there is none."""
        try:
            self._files.mkdirs(self._child(other).getParent())
            if not self._files.rename(self._child(name), self._child(other)):
                raise OSError("a file cannot be renamed there")
        except Exception as error:
            raise self._problem(error) from None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, or replace it at once, so that it has either content whatever happens."""
        path = self._child(name)
        try:
            if self._files.getUri().getScheme() == "file":
                _replace_local(Path(self._files.makeQualified(path).toUri().getPath()), content)
            elif self.of_objects:
                self._create(path, content)
            else:
                new = self._jvm.org.apache.hadoop.fs.Path(path.getParent(), _new_name(path.getName()))
                self._create(new, content)
                self._rename_over(new, path)
        except Exception as error:
            raise self._problem(error) from None

    def require_writable(self) -> None:
        """Raise JobError unless files can be written in the directory, which is made where there is none.

        The directory's rights do not say it: a disk may be full, and a file system may be for reading only. A store may
        let users add files and not delete them: the file of one byte stays there, hidden from Spark by its name.
        """
        new = self._child(_new_name("probe"))
        try:
            self._files.mkdirs(self._root)
            self._create(new, b"\n")  # some file systems take an empty file when they are full
        except Exception as error:
            raise self._problem(error) from None
        finally:
            with contextlib.suppress(Exception):
                self._files.delete(new, False)

    def _rename_over(self, new: Any, path: Any) -> None:
        rename = self._jvm.org.apache.hadoop.fs.Options.Rename
        how = self._gateway.new_array(rename, 1)
        how[0] = rename.OVERWRITE
        context = self._jvm.org.apache.hadoop.fs.FileContext.getFileContext(self._files.getUri(), self._files.getConf())
        context.rename(self._files.makeQualified(new), self._files.makeQualified(path), how)

    def _create(self, path: Any, content: bytes) -> None:
        stream = self._files.create(path, True)
        try:
            stream.write(content)
        finally:
            stream.close()

    def names(self, name: str) -> list[str]:
        """Return the names of what is in a directory, none without the directory."""
        if not self.has(name):
            return []
        try:
            return [str(status.getPath().getName()) for status in self._files.listStatus(self._child(name))]
        except Exception as error:
            raise self._problem(error) from None

    def batches(self, name: str) -> list[int]:
        """Return the numbers of the batches for which a log of Spark in this directory has a file."""
        numbers = [text.removesuffix(".compact") for text in self.names(name)]
        return [int(text) for text in numbers if text.isascii() and text.isdecimal()]

    def _child(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, name)

    def _problem(self, error: Exception) -> JobError:
        java = getattr(error, "java_exception", None)
        text = str(error) if java is None else str(java.getMessage() or java.getClass().getSimpleName())
        text = _HADOOP_STATE.sub("", " ".join(text.split()))
        return JobError(f"{self.option} {self.path}: {text[:300]}")


def _replace_local(path: Path, content: bytes) -> None:
    """Replace a file by a rename, which Hadoop does not have: it deletes the former file first.

    The file has no checksum of Hadoop, which would be a file of its own: two files cannot change at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(_new_name(path.name))
    new.write_bytes(content)
    path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
    new.replace(path)


def _new_name(name: str) -> str:
    return f".{name}.{secrets.token_hex(4)}"  # another run may be doing the same


class Checkpoint:
    """Checkpoint of a streaming job, compared with its output; both have to be writable.

    `job`: settings of the job by flag; to go on with other ones is a JobError. `memory`: values that the job finds
    again in its next run.
    """

    def __init__(self, spark: SparkSession, checkpoint: str, output: str, job: dict[str, str]) -> None:
        self._place = Place(spark, checkpoint, "--checkpoint")
        self._job = job
        self.memory: dict[str, Any] = {}
        raw = self._place.read(_STATE)
        if raw is not None:
            try:
                found = orjson.loads(raw)
                before, self.memory = dict(found["job"]), dict(found["memory"])
            except (ValueError, TypeError, KeyError):
                raise JobError(
                    f"--checkpoint {checkpoint}: {_STATE} there belongs to another program; give another one"
                ) from None
            for flag, value in job.items():
                if before.get(flag, value) != value:
                    text = f"was begun with {flag} {before[flag]}, not {value}"
                    raise JobError(f"--checkpoint {checkpoint} {text}; give that, or another --checkpoint and --output")
        if job["--format"] in LOGGED:
            target = Place(spark, output, "--output")
            self.compare(max(target.batches("_spark_metadata"), default=-1), output)
            target.require_writable()
        self._place.require_writable()

    def compare(self, last: int, output: str) -> None:
        """Raise JobError unless `last`, the last batch in the output, is the one that the checkpoint has, or the next.

        The output has a batch before the checkpoint says so, and after the checkpoint has planned it: a new checkpoint
        would leave out all that is in its first batch.
        """
        complete, planned = (max(self._place.batches(name), default=-1) for name in ("commits", "offsets"))
        if last - complete not in (0, 1) or last > planned:
            self.refuse(output)

    def refuse(self, output: str) -> NoReturn:
        """Raise JobError: checkpoint and output are of two runs."""
        text = f"--checkpoint {self._place.path} and --output {output} do not belong together"
        raise JobError(f"{text}: give those of one run, or two new directories")

    def save(self) -> None:
        """Write the settings of the job, and `memory`."""
        self._place.write(_STATE, orjson.dumps({"job": self._job, "memory": self.memory}))
