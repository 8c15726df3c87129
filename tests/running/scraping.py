"""Reads an operators' page: its metrics, and whether its service is well."""

import http.client
import json
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


class Scraped:
    """The metrics of one moment."""

    def __init__(self, text: str) -> None:
        self.text = text
        families = list(text_string_to_metric_families(text))
        samples = [each for family in families for each in family.samples]
        # Of all metrics, those too that have no series yet.
        self.names = {f"{family.name}{ending}" for family in families for ending in _ENDINGS[family.type]}
        self._values = {(each.name, frozenset(each.labels.items())): each.value for each in samples}

    def __call__(self, name: str, **labels: str) -> float:
        """The value of a series; 0 for one that has not begun."""
        return self._values.get((name, frozenset(labels.items())), 0.0)

    def labels(self, name: str) -> dict[str, str]:
        """The labels of a metric that has one series."""
        [labels] = [dict(labels) for found, labels in self._values if found == name]
        return labels


def scrape(port: int) -> Scraped:
    status, body = _asked(port, "/metrics")
    assert status == 200, body
    return Scraped(body)


def health(port: int) -> tuple[int, dict[str, Any]]:
    """Status and body of /healthz."""
    status, body = _asked(port, "/healthz")
    return status, json.loads(body)


def _asked(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
