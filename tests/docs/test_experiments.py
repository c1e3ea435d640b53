"""The page on experiments tells every key and every metric, and no other."""

from hotswap.core.config.files import read_file
from hotswap.lab.experiment import Experiment
from hotswap.lab.metrics import GAPS, LATENCIES, METRICS
from hotswap.lab.statistics.settings import Settings


def keys(model, prefix=""):
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and hasattr(inner, "model_fields") and name in ("load", "block"):
            yield from keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def column(pages, heading):
    rows = pages.table(pages.section(pages.ROOT / "docs" / "experiments.md", heading))
    return [pages.names(row[0])[0] for row in rows]


def test_every_key_of_an_experiment_is_told(pages):
    assert sorted(column(pages, "## The file")) == sorted(keys(Experiment))


def test_every_metric_is_told(pages):
    told = column(pages, "## Metrics")
    latencies = {*LATENCIES, *GAPS}
    others = {spec.name for spec in METRICS if spec.name.rpartition("_")[0] not in latencies}
    assert set(told) == latencies | others


def test_every_technique_that_ships_is_told_in_the_order_of_its_file(pages):
    shipped = [read_file(file)["name"] for file in sorted((pages.ROOT / "examples" / "techniques").glob("*.yaml"))]
    told = (pages.ROOT / "docs" / "techniques.md").read_text("utf-8").partition("## ")[0]
    assert [row[0] for row in pages.table(told)] == shipped


def test_settings_of_the_statistics_are_told_elsewhere():
    assert Experiment.model_fields["statistics"].annotation is Settings
