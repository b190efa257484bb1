"""Trieline as a library: the functions of the commands, trained models, and tables.

    import trieline

    trieline.train(trieline.TrainConfig(tables="tables", model="sasrec", ...))
    trieline.load("runs/sasrec").recommend(["B01", "B02"], k=10)

A function of a command takes its options as a typed config, and prints its progress.
docs/library.md has examples.
"""

from pipelines.comparison.config import CompareConfig
from pipelines.daily import DailyConfig
from pipelines.daily import process_day as daily
from pipelines.encode.config import EncodeConfig, TokenizeConfig
from pipelines.evaluation.config import EvaluateConfig
from pipelines.prepare.options import PrepareOptions, SimulateOptions
from pipelines.prepare.options import build_options as build_prepare_options
from pipelines.steps import AuditConfig
from pipelines.steps import audit_tables as audit
from pipelines.steps import compare_runs as compare
from pipelines.steps import encode_texts as encode
from pipelines.steps import make_sids as tokenize
from pipelines.steps import make_tables as prepare
from pipelines.steps import simulate_log as simulate
from pipelines.steps import train_model as train
from pipelines.training.config import TrainConfig
from trieline.commands import evaluate, sweep
from trieline.data import dataset, tables
from trieline.trained import load
from tuning.grid import SweepConfig

__all__ = [
    "AuditConfig",
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
