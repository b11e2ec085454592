# SPDX-License-Identifier: Apache-2.0
"""The name of the running build."""

from importlib.machinery import ExtensionFileLoader
from pathlib import Path

import pytest

import hatch_build
from mqtt_nats.codec import decoder
from mqtt_nats.config import build_info
from mqtt_nats.config.build_info import build, build_and_reason


def test_the_build_is_named_after_what_python_has_loaded() -> None:
    compiled = isinstance(decoder.__spec__.loader, ExtensionFileLoader)
    assert build() == ("compiled" if compiled else "pure Python")


def test_pure_python_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What started it knows best, then the wheel that was installed; a checkout has neither."""
    monkeypatch.setattr(build_info, "build", lambda: "pure Python")
    monkeypatch.setattr(build_info, "files", lambda package: tmp_path)
    monkeypatch.delenv(build_info.REASON, raising=False)
    assert build_and_reason() == "pure Python: the sources of a checkout"
    (tmp_path / build_info.REASON_FILE).write_text("there is no C compiler (cc)\n")
    assert build_and_reason() == "pure Python: there is no C compiler (cc)"
    monkeypatch.setenv(build_info.REASON, "the modules are not compiled yet")
    assert build_and_reason() == "pure Python: the modules are not compiled yet"
    monkeypatch.setattr(build_info, "build", lambda: "compiled")
    assert build_and_reason() == "compiled"


def test_who_builds_says_it_where_the_gateway_looks() -> None:
    assert (build_info.REASON, f"mqtt_nats/{build_info.REASON_FILE}") == (hatch_build.REASON, hatch_build.REASON_FILE)
