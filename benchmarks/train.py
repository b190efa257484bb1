r"""Time training steps of any config on its tables, with PyTorch alone.

    python -m benchmarks train --config jobs/configs/retrieval/tiger.yaml \
        --tables TABLES --sids SIDS --fit.batch_size 512

Needs torch, numpy, pyarrow, pydantic, PyYAML and safetensors, so that it runs on a bare
GPU machine, with tables and a student's teacher copied there. Each mode trains in a
fresh process, by the loop of jobs.train without validation: `plain`, and `captured` as
CUDA graphs (`fit.cuda_graphs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.harness import Line, device, in_fresh_process, read_peak_mb, to_line
from core.options import build, check_known, merge, merge_config_files
from core.schemas import Inputs
from models.registry import build_model_config
from models.training.fit_config import FitConfig
from models.training.loop import fit
from models.training_run import TrainingRun, resolve_config

MODES: dict[str, dict[str, Any]] = {
    "plain": {"cuda_graphs": "off"},
    "captured": {"cuda_graphs": "auto"},
}
"""Options of the training loop in each mode."""


def train(
    config: str,
    tables: str,
    sids: str | None = None,
    text: str | None = None,
    steps: int = 130,
    skipped: int = 50,
    threads: int = 2,
    modes: Sequence[str] = ("plain",),
    **options: Any,
) -> Iterator[Line]:
    """Yield a line per mode; items per second are training examples.

    Args:
        config: Configs of jobs.train, separated by commas; later override earlier.
        tables: TABLES.
        sids: SIDS of retrieval models.
        text: Output of jobs.encode for search models.
        steps: Number of steps.
        skipped: First steps, in which graphs and kernels are built; they are not timed.
        threads: CPU threads.
        modes: Names in `MODES`.
        **options: Values of `model.NAME` and `fit.NAME`.
    """
    check_known(modes, MODES, "modes")
    content = merge_config_files({"config": config.split(",")})
    for name, value in options.items():
        section, _, key = name.partition(".")
        content.setdefault(section, {})[key] = value
    params = {"steps": steps, "skipped": skipped, "threads": threads}
    for mode in modes:
        settings = merge(content, {"fit": MODES[mode]})
        inputs = Inputs(tables, sids, text)
        measured = in_fresh_process(time_steps, settings, inputs, params)
        seconds, examples = measured.pop("seconds"), measured.pop("examples")
        shown = {**params, "config": config, **options, "device": str(device())}
        variant = f"{content['model']['name']} {mode}"
        yield to_line("train", variant, shown, seconds, examples, **measured)


def time_steps(content: Line, inputs: Inputs, params: Line) -> Line:
    """Train some steps, and return their seconds, examples, memory and data wait.

    Args:
        content: Sections `model` and `fit` of the config.
        inputs: Folders that the model reads.
        params: Numbers of `steps`, `skipped` steps and `threads`.
    """
    torch.set_num_threads(params["threads"])
    fit_options = {"log_every_steps": 1, "max_epochs": 10_000, "metric": "none"}
    fit_config = build(FitConfig, {**content["fit"], **fit_options}, "fit.")
    config = resolve_config(build_model_config(content["model"]), inputs)
    before = read_peak_mb()
    run = TrainingRun.build(config, fit_config, inputs, device=device())
    seconds: list[float] = []
    reports = fit(
        run.model,
        run.train,
        lambda model: ({"none": 0.0}, 1),
        run.fit,
        device=run.device,
    )
    for report in reports:
        if report.step > params["skipped"]:
            seconds.append(fit_config.batch_size / report.examples_per_s)
        if report.step >= params["steps"]:
            break
    return {
        "seconds": seconds,
        "examples": fit_config.batch_size,
        "data_wait": round(report.data_wait, 4),
        "peak_memory_mb": round(read_peak_mb() - before, 1),
    }
