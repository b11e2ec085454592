# SPDX-License-Identifier: Apache-2.0
"""The demo: what comes out of MQTT, JetStream and Spark is what pandas makes of the CSV files."""

import subprocess
import sys
from pathlib import Path

import pandas
import pytest
from vega_datasets import local_data

from tests.harness.nats import ROOT

pytestmark = pytest.mark.processes


def expected() -> pandas.DataFrame:
    """Daily figures straight from the files."""
    san_francisco = pandas.read_csv(local_data.sf_temps.filepath).rename(columns={"temp": "value"})
    san_francisco["topic"] = "weather/san-francisco/temperature"
    seattle = pandas.read_csv(local_data.seattle_weather.filepath).drop(columns="weather")
    seattle = seattle.melt("date", var_name="topic", value_name="value")
    seattle["topic"] = "weather/seattle/" + seattle["topic"]
    both = pandas.concat([san_francisco, seattle])
    both["day"] = both["date"].str[:10].str.replace("/", "-")
    figures = both.groupby(["topic", "day"])["value"].agg(["count", "min", "max", "mean"])
    return figures.rename(columns={"count": "values"})


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_the_figures_are_those_of_pandas(tmp_path: Path) -> None:
    output = tmp_path / "daily.csv"
    command = [sys.executable, "-m", "examples.weather", "--days", "2", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=340, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = pandas.read_csv(output).set_index(["topic", "day"])
    pandas.testing.assert_frame_equal(found.sort_index(), expected().sort_index())
    assert "14,603 readings published and acknowledged at QoS 1" in done.stdout
    assert "weather/san-francisco/temperature    2010-01-01     24    45.8    53.3   49.17\n" in done.stdout
    assert "6,209 days of 5 topics" in done.stdout
