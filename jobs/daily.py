"""Process a new day of a growing log, from its files to a registered model.

    python -m jobs.daily --config shop_daily.yaml

The steps: append the day's files to the tables, audit them, make semantic IDs or text
embeddings of new items, evaluate the running model on the new day, continue its
training, evaluate the result, compare both models, and register the new one if no
metric drops by more than `max_drop`. An accepted model is the running model of the next
day. The config file holds the options of the jobs (docs/days.md). The same command
continues a stopped run after its last finished step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from core.errors import UserError
from core.files import absolute, join
from core.options import build, merge, read_configs
from jobs import cli

if TYPE_CHECKING:
    from core.schemas import DayRecord
    from pipelines.daily import DailyConfig


def __getattr__(name: str) -> Any:
    """Import the class of the options, after a first line is printed."""
    if name != "Config":
        raise AttributeError(name)
    cli.say_loading("polars")
    from pipelines.daily import DailyConfig

    return DailyConfig


def build_config(content: dict[str, Any]) -> DailyConfig:
    """Build the options of the steps from the sections of a config."""
    from pipelines.daily import DailyConfig
    from pipelines.prepare.prepare import build_options

    output = absolute(str(content.get("output", "")))
    tables, runs = join(output, "tables"), join(output, "runs")
    folders = {"tables": tables}
    for option, name in (("sids", "tokenize"), ("text", "encode")):
        if content.get(name):
            folders[option] = join(output, option)
    training = {**folders, "storage": runs, "name": "day"}
    fixed: dict[str, dict[str, Any]] = {
        "prepare": {"output": tables, "append": True},
        "tokenize": {"tables": tables, "output": folders.get("sids"), "extend": ""},
        "encode": {"tables": tables, "output": folders.get("text")},
        "train": training,
        "continue_training": {**training, "init": runs},
    }
    sections = {
        name: merge(read_section(name, content[name], values), values)
        for name, values in fixed.items()
        if content.get(name)
    }
    content = {key: value for key, value in content.items() if key not in fixed}
    if "train" in sections:
        later = sections.get("continue_training", fixed["continue_training"])
        sections["continue_training"] = merge(sections["train"], later)
    if "prepare" in sections:
        content["prepare"] = build_options(sections.pop("prepare"), "prepare.")
    return build(DailyConfig, {**content, **sections})


def read_section(name: str, given: Any, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a section, over those of its files `config`.

    Args:
        name: Name of the section.
        given: Content of the section.
        fixed: Options that the day sets, which the section must not have.
    """
    if not isinstance(given, Mapping):
        raise UserError(f"{name} is {given!r:.200}; it must be a mapping of options")
    others = dict(given)
    config = others.pop("config", [])
    files = config if isinstance(config, list) else [str(config)]
    options = merge(read_configs(files), others)
    for key in fixed:
        if key in options:
            raise UserError(f"{name}.{key} is {options[key]!r:.200}; a day sets it")
    return options


def run(config: DailyConfig) -> DayRecord:
    """Process the day, and print the next command."""
    cli.say_loading("torch", "ray", "mlflow")
    from pipelines.daily import process_day

    cli.preflight(config)
    day = process_day(config)
    cli.suggest_comparison(day.checkpoint)
    return day


if __name__ == "__main__":
    cli.main(run)
