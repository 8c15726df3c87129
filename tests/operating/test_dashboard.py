"""The dashboard and the scrape file of compose/: they load, and ask for nothing that no service exports."""

import json
import re
from pathlib import Path

import yaml

from tests.operating.conftest import Watched

FOLDER = Path(__file__).parents[2] / "compose/metrics"


def test_the_dashboard_asks_only_for_metrics_that_the_services_export(watched: Watched) -> None:
    board = json.loads((FOLDER / "kvasir-dashboard.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"kvasir_\w+", target["expr"])
    }
    exported = {name for service in watched.ports for name in watched.scrape(service).names}
    assert len(asked) > 25
    assert asked - exported == set()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_prometheus_is_told_the_ports_that_up_takes() -> None:
    [job] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    [targets] = [each["targets"] for each in job["static_configs"]]
    assert targets == [f"127.0.0.1:{port}" for port in (9464, 9465, 9466)]
