"""All models and tokenizers by name.

    model_class = find("sasrec")

A class is imported when it is looked up, so that commands start quickly, and a student
can look up the class of its teacher.

A user may also name a class in a file of their own, `my_file.py:MyModel`
(`models/own_code.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from core.errors import UserError
from core.options import NamedConfig, build, check_known
from models import own_code

if TYPE_CHECKING:
    from models.model import Model
    from models.retrieval.tokenizers.tokenizer import Tokenizer

MODELS = {
    "popularity": "models.retrieval.baselines.popularity:Popularity",
    "own_items": "models.retrieval.baselines.own_items:OwnItems",
    "item_knn": "models.retrieval.baselines.item_knn:ItemKNN",
    "sequential_rules": "models.retrieval.baselines.sequential_rules:SequentialRules",
    "ease": "models.retrieval.baselines.ease:EASE",
    "sasrec": "models.retrieval.sasrec:SASRec",
    "sid_sasrec": "models.retrieval.sid_sasrec:SidSASRec",
    "blend": "models.retrieval.blend:Blend",
    "tiger": "models.retrieval.tiger.tiger:Tiger",
    "lc_rec": "models.retrieval.lc_rec.lc_rec:LcRec",
    "lc_rec_sid_mlp": "models.retrieval.lc_rec.students:LcRecSidMlp",
    "lc_rec_nezha": "models.retrieval.lc_rec.students:LcRecNezha",
    "sid_mlp": "models.retrieval.sid_mlp.sid_mlp:SidMlp",
    "one_layer": "models.retrieval.students.one_layer:OneLayer",
    "gdn": "models.retrieval.students.recurrent:GdnStudent",
    "mamba2": "models.retrieval.students.recurrent:Mamba2Student",
    "earn": "models.retrieval.students.earn:Earn",
    "nezha": "models.retrieval.students.nezha:Nezha",
    "atspeed_s": "models.retrieval.atspeed.atspeed:AtSpeedS",
    "atspeed_r": "models.retrieval.atspeed.atspeed:AtSpeedR",
    "sid_mlp_pp_encoder": "models.retrieval.sid_mlp.sid_mlp_pp:SidMlpPpEncoder",
    "sid_mlp_pp": "models.retrieval.sid_mlp.sid_mlp_pp:SidMlpPp",
    "pair_ctr": "models.search.baselines.click_rates:PairCtr",
    "item_ctr": "models.search.baselines.click_rates:ItemCtr",
    "best_number": "models.search.baselines.best_number:BestNumber",
    "shown_order": "models.search.baselines.click_rates:ShownOrder",
    "boosted": "models.search.baselines.boosted:Boosted",
    "base": "models.search.ranker:Base",
    "hstu": "models.search.qgs:HSTU",
    "hllm": "models.search.hllm:HLLM",
    "qgs": "models.search.qgs:QGS",
    "base_rate": "models.actions.baselines:BaseRate",
    "item_rate": "models.actions.baselines:ItemRate",
    "user_rate": "models.actions.baselines:UserRate",
    "boosted_actions": "models.actions.boosted:BoostedActions",
    "interleaved": "models.actions.fusions:Interleaved",
    "attn_lfa": "models.actions.fusions:AttnLFA",
    "attn_mvp": "models.actions.fusions:AttnMVP",
    "attn_dhn": "models.actions.fusions:AttnDHN",
    "lac": "models.actions.fusions:LAC",
    "genrank": "models.actions.fusions:GenRank",
}
"""Module and class of each model. Within a kind, baselines are listed first, from the
cheapest on."""

TOKENIZERS = {
    "rqvae": "models.retrieval.tokenizers.rqvae:RqvaeTokenizer",
    "rqkmeans": "models.retrieval.tokenizers.rqkmeans:Rqkmeans",
    "psid": "models.retrieval.tokenizers.psid:Psid",
    "published": "models.retrieval.tokenizers.tokenizer:Published",
}
"""Module and class of each tokenizer."""

CLASSES = {"model": MODELS, "tokenizer": TOKENIZERS}


def find(name: str) -> type[Model]:
    """Import and return the class of a model."""
    return _import_class("model", name)  # type: ignore[no-any-return]


def find_tokenizer(name: str) -> type[Tokenizer]:
    """Import and return the class of a tokenizer."""
    return _import_class("tokenizer", name)  # type: ignore[no-any-return]


def _import_class(what: str, name: str, prefix: str = "") -> Any:
    """Import and return the class of a name.

    Messages call the name `{prefix}{what}.name`.
    """
    if ":" in name:
        found = own_code.find_class(name, what, "config_class")
        found.name = name
        return found
    check_known([name], CLASSES[what], f"{prefix}{what}.name")
    module, class_name = CLASSES[what][name].split(":")
    module = module.removeprefix("models")  # this package may have another name
    return getattr(importlib.import_module(module, __package__), class_name)


def build_config(what: str, options: Any, prefix: str = "") -> Any:
    """Build the config of the model or tokenizer that options name.

    Args:
        what: `model` or `tokenizer`.
        options: A mapping with a name and options; a config is returned unchanged.
        prefix: Prefix of keys in messages.
    """
    if isinstance(options, NamedConfig):
        return options
    if not options.get("name"):
        raise UserError(f"missing: {prefix}{what}.name")
    named_class = _import_class(what, str(options["name"]), prefix)
    return build(named_class.config_class, options, f"{prefix}{what}.")


def build_model_config(options: Any) -> Any:
    """Build the config of the model that options name."""
    return build_config("model", options)


def name_class(options: Any) -> Any:
    """Return options of the user with the name of a class in a file of the user's.

    Args:
        options: A name, or a mapping with a name and options; a config is returned
            unchanged.
    """
    if isinstance(options, NamedConfig):
        return options
    if not isinstance(options, Mapping):
        options = {"name": options}
    name = str(options.get("name", ""))
    return {**options, "name": own_code.run_file(name) if ":" in name else name}


def _build_section(what: str) -> BeforeValidator:
    """Return a validator that builds the config of the class under a value's `name`."""
    return BeforeValidator(
        lambda value, info: build_config(what, name_class(value), info.context or "")
    )


ModelSection = Annotated[Any, _build_section("model")]
"""Type of the config of a model."""

TokenizerSection = Annotated[Any, _build_section("tokenizer")]
"""Type of the config of a tokenizer."""


def find_baselines(kind: str) -> list[str]:
    """Return the names of a kind's baselines, and of the shown order.

    Baselines are models without training that trained models should outperform.
    """
    models = [model for model in map(find, MODELS) if model.kind.name == kind]
    return [model.name for model in models if model.is_baseline or model.is_diagnostic]
