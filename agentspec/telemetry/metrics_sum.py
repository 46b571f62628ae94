"""Adds up the metrics of several processes that are one gateway."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_CUMULATIVE = ("counter", "histogram")
Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Family:
    documentation: str
    type: str
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def add(self, name: str, labels: Labels, value: float) -> None:
        key = (name, labels)
        before = self.samples.get(key)
        if before is None:
            self.samples[key] = value
        elif name.endswith("_created"):
            self.samples[key] = min(before, value)
        elif self.type != "info":
            self.samples[key] = before + value


class MetricsSum(Collector):
    """The sums of what `add` was given: counters, histograms and gauges by name and labels."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def add(self, dumped: str, *, ended: bool = False) -> None:
        """Add what `dump` returned; of a process that has `ended`, only what it counted."""
        for name, documentation, kind, samples in json.loads(dumped):
            if ended and kind not in _CUMULATIVE:
                continue
            family = self._families.setdefault(name, _Family(documentation, kind))
            for sample, labels, value in samples:
                family.add(sample, tuple((key, text) for key, text in labels), value)

    def collect(self) -> Iterable[Metric]:
        for name, family in self._families.items():
            metric = Metric(name, family.documentation, family.type)
            for (sample, labels), value in family.samples.items():
                metric.add_sample(sample, dict(labels), value)
            yield metric

    def render(self) -> bytes:
        """The sums in Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> Iterable[Metric]:
        return ()


def dump(metrics: Collector | CollectorRegistry, *, only: Collection[str] = ("",), but: Collection[str] = ()) -> str:
    """The samples now, as text: of the metrics whose names begin with one of `only`, and with none of `but`."""
    families = [
        (
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, list(sample.labels.items()), sample.value) for sample in metric.samples],
        )
        for metric in metrics.collect()
        if metric.name.startswith(tuple(only)) and not metric.name.startswith(tuple(but) or ("\n",))
    ]
    return json.dumps(families)
