"""The one table of models: name -> config, module, how to batch, how to score.

entry = find("sasrec")
model = build(entry.config(), catalogue)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from models.actions import fusions
from models.actions.floors import BaseRate, BaseRateConfig, ItemRate, ItemRateConfig
from models.config import hint, instead
from models.cpu.matmul import use_exact_onednn
from models.families import ACTIONS, RETRIEVAL, SEARCH, Family, Measured
from models.retrieval.data import Catalogue
from models.retrieval.decoders.recurrent import GdnConfig, Mamba2Config, gdn, mamba2
from models.retrieval.decoders.sid_mlp import SidMlpConfig
from models.retrieval.decoders.t5 import OneLayerConfig, one_layer
from models.retrieval.distillation import teacher as teachers
from models.retrieval.distillation import teacher_cache
from models.retrieval.distillation.student import Student, TaughtConfig
from models.retrieval.floors import ease
from models.retrieval.floors.ease import EASE, EASEConfig
from models.retrieval.floors.item_knn import ItemKNN, ItemKNNConfig
from models.retrieval.floors.own_items import OwnItems, OwnItemsConfig
from models.retrieval.floors.popularity import Popularity, PopularityConfig
from models.retrieval.language import lc_rec
from models.retrieval.language.lc_rec import LcRec, LcRecConfig
from models.retrieval.language.lc_rec_students import (
    LcRecNezha,
    LcRecNezhaConfig,
    LcRecSidMlp,
    LcRecSidMlpConfig,
)
from models.retrieval.options import (
    AtSpeedOptions,
    BeamOptions,
    RecommendOptions,
    SidMlpOptions,
    StudentOptions,
    TigerOptions,
)
from models.retrieval.retriever import Retriever
from models.retrieval.sasrec import SASRec, SASRecConfig
from models.retrieval.students import atspeed, sid_mlp_pp
from models.retrieval.students.atspeed import AtSpeed, AtSpeedRConfig, AtSpeedSConfig
from models.retrieval.students.joint import (
    EarnConfig,
    Nezha,
    NezhaConfig,
    earn,
    lr_multipliers,
)
from models.retrieval.students.sid_mlp import SidMlp
from models.retrieval.tiger import Tiger, TigerConfig
from models.search import hllm, qgs
from models.search.floors import log_order_metrics
from models.search.floors.boosted import Boosted, BoostedConfig
from models.search.floors.click_rates import (
    ClickRate,
    ItemCtrConfig,
    LogOrder,
    LogOrderConfig,
    PairCtrConfig,
    describe_rates,
)
from models.search.hllm import HLLM, HLLMConfig
from models.search.qgs import QGS, HSTUConfig, QGSConfig
from models.search.ranker import Ranker, RankerConfig
from models.storage import checkpoint
from models.storage.checkpoint import Checkpoint
from models.storage.tables import UserError
from models.text import language_model
from models.warm_start import carry


@dataclass(frozen=True)
class Entry:
    """One model."""

    config: type
    """Dataclass of its options; it has `max_history`."""
    build: Callable[..., nn.Module]
    """Makes the module from its config and the catalogue, and where it learns from a teacher, from that."""
    family: Family
    """How to batch and score."""
    unit: str
    """What a row of a training batch is, such as a user, a request, or a user's sequence that is cut in two."""
    gradient: bool = True
    """False: not trained by gradient; call `fit_counts(batches)` once instead."""
    early_stopping: bool = False
    """Whether its `fit_counts(train, val)` learns at random and stops on batches of val."""
    floor: bool = False
    """Whether it is a model without training that trained models have to clear."""
    sids: bool = False
    """Whether it needs semantic IDs."""
    tables_alone: bool = False
    """Whether it reads no text, where its family does."""
    first_label: bool = False
    """Whether it learns and ranks by the first of the log's labels alone."""
    resolve: Callable[[Any, Any], Any] = lambda config, catalogue: config
    """`resolve(config, catalogue)`: the config with what it takes from checkpoints that it names, such as a
    teacher's sizes. Asked before training; resolving twice changes nothing."""
    teach: Callable[[nn.Module, Any, Any], None] = lambda module, config, catalogue: (
        None
    )
    """`teach(module, config, catalogue)`: before training, gives a student what it learns from. What only the
    loss needs stays out of the module's weights."""
    teaches: bool = False
    """Whether it can be a student's teacher: a backbone with a decoder (`models/retrieval/retriever.py`)."""
    precompute: Callable[[Any, Any, Any, dict[str, Any]], list[str]] = lambda *given: []
    """`precompute(module, config, catalogue, examples)`: after `teach`, for what is worked out once about all examples
    of a worker, given by split; on every worker. Lines that say what it did."""

    recommends: type | None = None
    """Dataclass of the options of the module's `recommend(batch, k, **options)`, each None where left out; None: it
    ranks no catalogue."""
    requirements: tuple[str, ...] = ()
    """Python packages that it is served with, beside those of all models."""
    diagnostic: bool = False
    """Whether it ranks by what is known only after results were shown, such as their
    position: it is measured to describe a log, and never served or registered."""
    own_measured: Measured | None = None
    """What is measured of it, where that is not what the family measures."""

    lr_multipliers: Callable[[Any], dict[str, float]] = lambda config: {}
    """Of a config: factors on the learning rate, by the beginning of parameters' names."""
    blocks: Callable[[nn.Module], list[nn.Module]] | None = None
    """Parts of the module that `ray.fsdp` cuts one by one; None: it is not trained in shards."""

    @property
    def reads(self) -> Mapping[str, bool]:
        """Folders of `Inputs` beside the tables that it reads, and whether it needs them."""
        return (
            {"sids": True}
            if self.sids
            else {}
            if self.tables_alone
            else self.family.reads
        )

    def about(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """What whoever sends it requests has to know, by the `info` of the sequences."""
        found = self.family.requests.about(info)
        return {**found, "labels": found["labels"][:1]} if self.first_label else found

    @property
    def measured(self) -> Measured:
        """What is measured of it."""
        return self.own_measured or self.family.measured

    @property
    def ranks(self) -> bool:
        """Whether it ranks anything, so that it can be served."""
        return not self.not_served

    @property
    def not_served(self) -> str:
        """Why it cannot be served, or nothing."""
        if self.diagnostic:
            return "it ranks by what is known only after results were shown"
        if self.recommends is None and self.family.ranks == "catalogue":
            return "it ranks nothing"
        return ""


GENERATIVE: dict[str, Any] = {
    "unit": "user",
    "resolve": qgs.resolve,
    "teach": qgs.teach,
}

SEARCH_FLOOR: dict[str, Any] = {
    "unit": "request",
    "gradient": False,
    "floor": True,
    "tables_alone": True,
    "first_label": True,
    "precompute": describe_rates,
}
"""Search models that are counted and not trained, by the click alone."""

ACTIONS_FLOOR: dict[str, Any] = {"unit": "user", "gradient": False, "floor": True}
"""Models of actions that are counted and not trained."""


def teacher_of(config: TaughtConfig, catalogue: Catalogue) -> Retriever:
    """The teacher that `config` describes, with random weights."""
    return build(
        config_from_dict({"name": config.taught_by, **config.teacher_model}), catalogue
    )  # type: ignore[return-value]


def teaching() -> list[str]:
    """Names of the models that can be a teacher."""
    return [name for name, entry in MODELS.items() if entry.teaches]


def teach(model: Any, config: TaughtConfig, catalogue: Catalogue) -> None:
    """Loads the teacher of a resolved config into a new student."""
    model.set_teacher(teachers.load(teacher_of(config, catalogue), config))


def teach_stage_2(
    model: Any, config: sid_mlp_pp.SidMlpPpConfig, catalogue: Catalogue
) -> None:
    """Loads the teacher and stage 1's encoder of a resolved config into stage 2."""
    teach(model, config, catalogue)
    if not config.end_to_end:
        about = checkpoint.read(config.encoder)
        stage_1 = build(config_from_dict(about.model), catalogue)
        checkpoint.load_weights(stage_1, config.encoder)
        model.take_encoder(stage_1)


def on_backbone(
    decoder: Callable[[Any, Any], Any],
) -> Callable[[Any, Any, Retriever], Student]:
    """A student with `decoder(config, backbone)` on its teacher's backbone."""
    return lambda config, catalogue, teacher: Student(
        config, catalogue, teacher, decoder(config, teacher.backbone)
    )


TAUGHT: dict[str, Any] = {
    "unit": "request",
    "sids": True,
    "resolve": lambda config, catalogue: teachers.resolve(
        config, catalogue, teaching()
    ),
    "teach": teach,
    "teaches": True,
    "precompute": teacher_cache.precompute,
}
"""Of models that learn from a teacher: `build(config, catalogue, teacher)` makes them."""

ATSPEED: dict[str, Any] = {
    **TAUGHT,
    "teaches": False,
    "recommends": AtSpeedOptions,
    "own_measured": atspeed,
}
STAGE_1: dict[str, Any] = {**TAUGHT, "teaches": False, "own_measured": sid_mlp_pp}
STAGE_2: dict[str, Any] = {
    **TAUGHT,
    "teach": teach_stage_2,
    "resolve": lambda config, catalogue: sid_mlp_pp.resolve(
        config, catalogue, teaching()
    ),
}

WITHOUT_GRADIENT: dict[str, Any] = {
    "unit": "behaviour",
    "gradient": False,
    "floor": True,
    "recommends": RecommendOptions,
}
"""Retrieval models computed from the training behaviours in one pass."""

MODELS: dict[str, Entry] = {
    "popularity": Entry(PopularityConfig, Popularity, RETRIEVAL, **WITHOUT_GRADIENT),
    "own_items": Entry(OwnItemsConfig, OwnItems, RETRIEVAL, **WITHOUT_GRADIENT),
    "item_knn": Entry(ItemKNNConfig, ItemKNN, RETRIEVAL, **WITHOUT_GRADIENT),
    "ease": Entry(
        EASEConfig,
        EASE,
        RETRIEVAL,
        **WITHOUT_GRADIENT,
        resolve=ease.resolve,
        precompute=lambda module, config, catalogue, examples: ease.describe_items(
            config, catalogue.num_items
        ),
    ),
    "sasrec": Entry(
        SASRecConfig, SASRec, RETRIEVAL, unit="user", recommends=RecommendOptions
    ),
    "tiger": Entry(
        TigerConfig,
        Tiger,
        RETRIEVAL,
        unit="request",
        sids=True,
        teaches=True,
        recommends=TigerOptions,
    ),
    "lc_rec": Entry(
        LcRecConfig,
        LcRec,
        RETRIEVAL,
        unit="request",
        sids=True,
        teaches=True,
        resolve=lc_rec.resolve,
        teach=lc_rec.teach,
        precompute=lc_rec.notes,
        recommends=BeamOptions,
        blocks=language_model.find_blocks,
    ),
    "lc_rec_sid_mlp": Entry(
        LcRecSidMlpConfig, LcRecSidMlp, RETRIEVAL, **TAUGHT, recommends=StudentOptions
    ),
    "lc_rec_nezha": Entry(
        LcRecNezhaConfig,
        LcRecNezha,
        RETRIEVAL,
        **TAUGHT,
        recommends=BeamOptions,
        lr_multipliers=lr_multipliers,
        blocks=language_model.find_blocks,
    ),
    "sid_mlp": Entry(
        SidMlpConfig, SidMlp, RETRIEVAL, **TAUGHT, recommends=SidMlpOptions
    ),
    "one_layer": Entry(
        OneLayerConfig,
        on_backbone(one_layer),
        RETRIEVAL,
        **TAUGHT,
        recommends=StudentOptions,
    ),
    "gdn": Entry(
        GdnConfig, on_backbone(gdn), RETRIEVAL, **TAUGHT, recommends=StudentOptions
    ),
    "mamba2": Entry(
        Mamba2Config,
        on_backbone(mamba2),
        RETRIEVAL,
        **TAUGHT,
        recommends=StudentOptions,
    ),
    "earn": Entry(EarnConfig, earn, RETRIEVAL, **TAUGHT, recommends=BeamOptions),
    "nezha": Entry(
        NezhaConfig,
        Nezha,
        RETRIEVAL,
        **TAUGHT,
        recommends=BeamOptions,
        lr_multipliers=lr_multipliers,
    ),
    "atspeed_s": Entry(AtSpeedSConfig, AtSpeed, RETRIEVAL, **ATSPEED),
    "atspeed_r": Entry(AtSpeedRConfig, AtSpeed, RETRIEVAL, **ATSPEED),
    "sid_mlp_pp_encoder": Entry(
        sid_mlp_pp.SidMlpPpEncoderConfig,
        sid_mlp_pp.SidMlpPpEncoder,
        RETRIEVAL,
        **STAGE_1,
    ),
    "sid_mlp_pp": Entry(
        sid_mlp_pp.SidMlpPpConfig,
        sid_mlp_pp.SidMlpPp,
        RETRIEVAL,
        **STAGE_2,
        recommends=SidMlpOptions,
    ),
    "pair_ctr": Entry(PairCtrConfig, ClickRate, SEARCH, **SEARCH_FLOOR),
    "item_ctr": Entry(ItemCtrConfig, ClickRate, SEARCH, **SEARCH_FLOOR),
    "log_order": Entry(
        LogOrderConfig,
        LogOrder,
        SEARCH,
        unit="request",
        gradient=False,
        tables_alone=True,
        first_label=True,
        diagnostic=True,
        own_measured=log_order_metrics,
    ),
    "boosted": Entry(
        BoostedConfig,
        Boosted,
        SEARCH,
        unit="request",
        gradient=False,
        early_stopping=True,
        requirements=("lightgbm",),
        tables_alone=True,
        first_label=True,
    ),
    "base": Entry(RankerConfig, Ranker, SEARCH, unit="user"),
    "hstu": Entry(HSTUConfig, QGS, SEARCH, **GENERATIVE),
    "hllm": Entry(
        HLLMConfig, HLLM, SEARCH, unit="user", resolve=hllm.resolve, teach=hllm.teach
    ),
    "qgs": Entry(QGSConfig, QGS, SEARCH, **GENERATIVE),
    "base_rate": Entry(BaseRateConfig, BaseRate, ACTIONS, **ACTIONS_FLOOR),
    "item_rate": Entry(ItemRateConfig, ItemRate, ACTIONS, **ACTIONS_FLOOR),
    "interleaved": Entry(
        fusions.InterleavedConfig, fusions.Interleaved, ACTIONS, unit="user"
    ),
    "attn_lfa": Entry(
        fusions.AttnLFAConfig,
        fusions.AttnLFA,
        ACTIONS,
        unit="user",
    ),
    "attn_mvp": Entry(
        fusions.AttnMVPConfig,
        fusions.AttnMVP,
        ACTIONS,
        unit="user",
    ),
    "attn_dhn": Entry(fusions.AttnDHNConfig, fusions.AttnDHN, ACTIONS, unit="user"),
    "lac": Entry(fusions.LACConfig, fusions.LAC, ACTIONS, unit="user"),
    "genrank": Entry(fusions.GenRankConfig, fusions.GenRank, ACTIONS, unit="cut"),
}


def find(name: str) -> Entry:
    """The entry of a model; UserError with the nearest name for one that is unknown."""
    if name not in MODELS:
        raise UserError(
            f"unknown model '{name}'; {hint(name, MODELS)}; known are {', '.join(MODELS)}"
        )
    return MODELS[name]


def floors(family: Family) -> list[str]:
    """Return the names of the family's models without training, cheapest first."""
    return [
        name for name, entry in MODELS.items() if entry.floor and entry.family is family
    ]


def recommend_options(name: str) -> list[str]:
    """Options of the model's `recommend`; none of a model that ranks no catalogue."""
    options = find(name).recommends
    return [f.name for f in fields(options)] if options else []


def model_config(name: str) -> type:
    """The config dataclass of a model."""
    return find(name).config


def name_of(config: Any) -> str:
    """The model that a config instance belongs to."""
    return next(name for name, entry in MODELS.items() if type(config) is entry.config)


def resolve(config: Any, catalogue: Any) -> Any:
    """The config instance with what it takes from the checkpoints that it names."""
    return find(name_of(config)).resolve(config, catalogue)


def build(config: Any, catalogue: Any) -> nn.Module:
    """The module of a config instance; products on a CPU are set to be fast from here on (`models/cpu/matmul.py`)."""
    use_exact_onednn()
    taught = [teacher_of(config, catalogue)] if isinstance(config, TaughtConfig) else []
    return find(name_of(config)).build(config, catalogue, *taught)


def config_to_dict(config: Any) -> dict[str, Any]:
    """`name` and all fields, as YAML files and checkpoints hold them."""
    return {"name": name_of(config), **asdict(config)}


def config_from_dict(content: dict[str, Any]) -> Any:
    """The config instance of such a mapping; UserError for an unknown model or key or an impossible value."""
    options = dict(content)
    if "name" not in options:
        raise UserError(
            f"the model has no name; add name: with one of {', '.join(MODELS)}"
        )
    name = options.pop("name")
    config = model_config(name)
    known = [f.name for f in fields(config)]
    for key in options:
        if key not in known:
            what = instead(f"model.{key}", [f"model.{field}" for field in known])
            raise UserError(f"unknown key 'model.{key}' for the model '{name}'; {what}")
    try:
        return config(**options)
    except (ValueError, TypeError) as error:
        raise UserError(f"model '{name}': {error}") from error


def load(
    uri: str | Path, catalogue: Any, name: str | None = None
) -> tuple[nn.Module, Checkpoint]:
    """The model of a checkpoint in evaluation mode, and the checkpoint's config.

    `catalogue` must be of the tables that it was trained on, or of such as extend them (see `checkpoint.check`), with
    the checkpoint's scales; `name`, where given, is the model that is expected.
    """
    about = checkpoint.read(uri)
    checkpoint.check(about, uri, catalogue.versions, name, extending=True)
    model = build(config_from_dict(about.model), catalogue)
    if any(
        value and value != catalogue.hashes[table]
        for table, value in about.hashes.items()
    ):
        carry(model, uri, about, catalogue.num_items)
    else:
        checkpoint.load_weights(model, uri)
    return model.eval(), about
