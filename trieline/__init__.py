"""Trieline as a library: the functions of the commands, trained models, and tables.

    import trieline

    trieline.train(trieline.TrainConfig(tables="tables", model="sasrec", ...))
    trieline.load("runs/sasrec").recommend(["B01", "B02"], k=10)

A function of a command takes its options as a typed config, and prints its progress.
docs/library.md has examples.
"""

from pipelines.comparison.config import CompareConfig
from pipelines.comparison.report import compare_runs as compare
from pipelines.daily import DailyConfig
from pipelines.daily import process_day as daily
from pipelines.encode.config import EncodeConfig, TokenizeConfig
from pipelines.encode.extend import make_sids as tokenize
from pipelines.encode.texts import encode_log as encode
from pipelines.evaluation.config import EvaluateConfig
from pipelines.prepare.audit.rules import audit_tables as audit
from pipelines.prepare.kinds.registry import simulate_log as simulate
from pipelines.prepare.prepare import build_options as build_prepare_options
from pipelines.prepare.prepare import make_tables as prepare
from pipelines.prepare.settings.config import PrepareOptions
from pipelines.prepare.settings.simulation import SimulateOptions
from pipelines.training.config import TrainConfig
from pipelines.training.run import run_training as train
from trieline.commands import evaluate, sweep
from trieline.data import dataset, tables
from trieline.trained import load
from tuning.grid import SweepConfig

__all__ = [
    "CompareConfig",
    "DailyConfig",
    "EncodeConfig",
    "EvaluateConfig",
    "PrepareOptions",
    "SimulateOptions",
    "SweepConfig",
    "TokenizeConfig",
    "TrainConfig",
    "audit",
    "build_prepare_options",
    "compare",
    "daily",
    "dataset",
    "encode",
    "evaluate",
    "load",
    "prepare",
    "simulate",
    "sweep",
    "tables",
    "tokenize",
    "train",
]
