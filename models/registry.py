"""The one table of models: name -> config, module, how to batch, how to score.

entry = find("sasrec")
model = entry.build(entry.config(), catalogue)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from models import checkpoint
from models.actions.attn_dhn import AttnDHN, AttnDHNConfig
from models.actions.attn_lfa import AttnLFA, AttnLFAConfig
from models.actions.attn_mvp import AttnMVP, AttnMVPConfig, AttnMVPNoLFAConfig
from models.actions.genrank import GenRank, GenRankConfig
from models.actions.interleaved import Interleaved, InterleavedConfig
from models.actions.lac import LAC, LACConfig
from models.checkpoint import Checkpoint
from models.config import check_known, hint
from models.families import ACTIONS, RETRIEVAL, SEARCH, Extra, Family, Measures
from models.matmul import use_exact_onednn
from models.retrieval import sid_mlp_pp
from models.retrieval.popularity import Popularity, PopularityConfig
from models.retrieval.sasrec import SASRec, SASRecConfig
from models.retrieval.search_options import NoOptions, SidMlpOptions, TigerOptions
from models.retrieval.sid_mlp import SidMlp, SidMlpConfig, teach
from models.retrieval.teacher import remember
from models.retrieval.teacher import resolve as resolve_teacher
from models.retrieval.tiger import Tiger, TigerConfig
from models.search import hllm, sequence
from models.search.base import Base, BaseConfig
from models.search.hllm import HLLM, HLLMConfig
from models.search.hstu import HSTUConfig, HSTURanker
from models.search.qgs import QGS, QGSConfig
from models.summaries import plain_lines
from models.tables import UserError


@dataclass(frozen=True)
class Entry:
    """One model."""

    config: type
    """Dataclass of its options; it has `max_history`."""
    build: Callable[[Any, Any], nn.Module]
    """Makes the module from its config and the catalogue."""
    family: Family
    """How to batch and score."""
    unit: str
    """What a row of a training batch is, such as a user, a request, or a user's sequence that is cut in two."""
    gradient: bool = True
    """False: not trained by gradient; call `fit_counts(batches)` once instead."""
    sids: bool = False
    """Whether it needs semantic IDs."""
    recommends: type | None = None
    """Dataclass of what its `recommend(batch, k, **options)` takes; None: it ranks no catalogue."""
    own_measures: Measures | None = None
    """How it is measured, where that is not as in its family."""
    parameter_counts: bool = False
    """Whether the module's `parameter_counts()` tells its parameters by part."""
    resolve: Callable[[Any, Any], Any] | None = None
    """`resolve(config, catalogue)`: the config with what it takes from checkpoints that it names, such as a
    teacher's sizes. Asked before training; resolving twice changes nothing."""
    teach: Callable[[nn.Module, Any, Any], None] | None = None
    """`teach(module, config, catalogue)`: before training, gives a student what it learns from. What only the
    loss needs stays out of the module's weights."""
    remember: Callable[[Any, Any, Any, dict[str, Any]], list[str]] | None = None
    """`remember(module, config, catalogue, examples)`: after `teach`, for what is worked out once about all examples
    of a worker, given by split; on every worker. Lines that say what it did."""

    @property
    def extra(self) -> Extra | None:
        """The folder that it needs beside the tables, if any."""
        return self.family.extra if self.sids or self.family.every_extra else None

    @property
    def measures(self) -> Measures:
        """How it is measured."""
        return self.own_measures or self.family.measures

    @property
    def ranks(self) -> bool:
        """Whether it recommends or scores candidates."""
        return self.recommends is not None or self.family.scores

    @property
    def options(self) -> list[str]:
        """Names of what its `recommend` takes; none of a model that ranks no catalogue."""
        return [field.name for field in fields(self.recommends)] if self.recommends else []


GENERATIVE: dict[str, Any] = {"unit": "user", "resolve": sequence.resolve, "teach": sequence.teach}

STAGE_1 = Measures(
    sid_mlp_pp.SidMlpPpEncoder.measure, sid_mlp_pp.SidMlpPpEncoder.means,
    lambda catalogue: list(sid_mlp_pp.SidMlpPpEncoder.METRICS), plain_lines,
)  # fmt: skip

MODELS: dict[str, Entry] = {
    "popularity": Entry(PopularityConfig, Popularity, RETRIEVAL, unit="request", gradient=False, recommends=NoOptions),
    "sasrec": Entry(SASRecConfig, SASRec, RETRIEVAL, unit="user", recommends=NoOptions),
    "tiger": Entry(TigerConfig, Tiger, RETRIEVAL, unit="request", sids=True, recommends=TigerOptions),
    "sid_mlp": Entry(
        SidMlpConfig,
        SidMlp,
        RETRIEVAL,
        unit="request",
        sids=True,
        resolve=resolve_teacher,
        teach=teach,
        remember=remember,
        recommends=SidMlpOptions,
    ),
    "sid_mlp_pp_encoder": Entry(
        sid_mlp_pp.SidMlpPpEncoderConfig,
        sid_mlp_pp.SidMlpPpEncoder,
        RETRIEVAL,
        unit="request",
        sids=True,
        resolve=resolve_teacher,
        teach=sid_mlp_pp.teach_encoder,
        remember=remember,
        own_measures=STAGE_1,
    ),
    "sid_mlp_pp": Entry(
        sid_mlp_pp.SidMlpPpConfig,
        sid_mlp_pp.SidMlpPp,
        RETRIEVAL,
        unit="request",
        sids=True,
        resolve=sid_mlp_pp.resolve,
        teach=sid_mlp_pp.teach,
        remember=remember,
        recommends=SidMlpOptions,
    ),
    "base": Entry(BaseConfig, Base, SEARCH, unit="user"),
    "hstu": Entry(HSTUConfig, HSTURanker, SEARCH, **GENERATIVE),
    "hllm": Entry(HLLMConfig, HLLM, SEARCH, unit="user", resolve=hllm.resolve, teach=hllm.teach),
    "qgs": Entry(QGSConfig, QGS, SEARCH, **GENERATIVE),
    "interleaved": Entry(InterleavedConfig, Interleaved, ACTIONS, unit="user", parameter_counts=True),
    "attn_lfa": Entry(AttnLFAConfig, AttnLFA, ACTIONS, unit="user", parameter_counts=True),
    "attn_mvp": Entry(AttnMVPConfig, AttnMVP, ACTIONS, unit="user", parameter_counts=True),
    "attn_mvp_no_lfa": Entry(AttnMVPNoLFAConfig, AttnMVP, ACTIONS, unit="user", parameter_counts=True),
    "attn_dhn": Entry(AttnDHNConfig, AttnDHN, ACTIONS, unit="user", parameter_counts=True),
    "lac": Entry(LACConfig, LAC, ACTIONS, unit="user", parameter_counts=True),
    "genrank": Entry(GenRankConfig, GenRank, ACTIONS, unit="cut", parameter_counts=True),
}


def find(name: str) -> Entry:
    """The entry of a model; UserError with the nearest name for one that is unknown."""
    if name not in MODELS:
        raise UserError(f"unknown model '{name}'; {hint(name, MODELS)}; known are {', '.join(MODELS)}")
    return MODELS[name]


def metrics_of(entry: Entry, catalogue: Any) -> list[str]:
    """Names of the metrics that a validation of the model gives."""
    return list(entry.measures.names(catalogue))


def model_config(name: str) -> type:
    """The config dataclass of a model."""
    return find(name).config


def name_of(config: Any) -> str:
    """The model that a config instance belongs to."""
    return next(name for name, entry in MODELS.items() if type(config) is entry.config)


def resolve(config: Any, catalogue: Any) -> Any:
    """The config instance with what it takes from the checkpoints that it names."""
    entry = find(name_of(config))
    return entry.resolve(config, catalogue) if entry.resolve else config


def build(config: Any, catalogue: Any) -> nn.Module:
    """The module of a config instance; products on a CPU are set to be fast from here on (`models/matmul.py`)."""
    use_exact_onednn()
    return find(name_of(config)).build(config, catalogue)


def config_to_dict(config: Any) -> dict[str, Any]:
    """`name` and all fields, as YAML files and checkpoints hold them."""
    return {"name": name_of(config), **asdict(config)}


def config_from_dict(content: dict[str, Any]) -> Any:
    """The config instance of such a mapping; UserError for an unknown model or key or an impossible value."""
    options = dict(content)
    if "name" not in options:
        raise UserError(f"the model has no name; add name: with one of {', '.join(MODELS)}")
    name = options.pop("name")
    config = model_config(name)
    known = [f.name for f in fields(config)]
    check_known(
        options, known,
        lambda key, near: f"unknown key 'model.{key}' for the model '{name}'; the nearest key is 'model.{near}'",
    )  # fmt: skip
    try:
        return config(**options)
    except (ValueError, TypeError) as error:
        raise UserError(f"model '{name}': {error}") from error


def load(uri: str | Path, catalogue: Any, name: str | None = None) -> tuple[nn.Module, Checkpoint]:
    """The model of a checkpoint in evaluation mode, and the checkpoint's config.

    `catalogue` must be of the tables that it was trained on (see `checkpoint.check`); `name`, where given, is the
    model that is expected.
    """
    about = checkpoint.read(uri)
    checkpoint.check(about, uri, catalogue.hashes, name)
    model = build(config_from_dict(about.model), catalogue)
    checkpoint.load_weights(model, uri)
    return model.eval(), about
