# SPDX-License-Identifier: Apache-2.0
"""All experiments. A module here has the list ``EXPERIMENTS``."""

import importlib
import pkgutil
import re

from tests.chaos.experiment import Experiment


def all_experiments() -> dict[str, Experiment]:
    """Every experiment by its name, in the order of the numbers."""
    found: list[Experiment] = []
    for module in pkgutil.iter_modules(__path__):
        found.extend(importlib.import_module(f"{__name__}.{module.name}").EXPERIMENTS)
    named = {one.name: one for one in sorted(found, key=_order)}
    assert len(named) == len(found), "two experiments have one name"
    return named


def _order(one: Experiment) -> tuple[int, str]:
    number = re.match(r"R(\d+)", one.name)
    return int(number[1]) if number else 99, one.name
