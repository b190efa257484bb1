"""A trained backbone with its decoder as a frozen teacher: found at its checkpoint, checked against the catalogue.

config = resolve(config, catalogue, known)     # fills in teacher_model and teacher_hash
teacher = load(teacher, config)                # its weights, frozen and in evaluation mode
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, TypeVar

from models.retrieval.data import Catalogue
from models.retrieval.distillation.student import TaughtConfig
from models.retrieval.retriever import Retriever
from models.storage import checkpoint
from models.storage.tables import UserError, join
from models.storage.uri import absolute

C = TypeVar("C", bound=TaughtConfig)


def resolve(config: C, catalogue: Catalogue, known: Collection[str]) -> C:
    """`config` with teacher and cache as absolute paths, the teacher's config and the hash of its weights.

    Raises UserError where no teacher is named, it is gone, is none of the models `known`, was trained on other tables
    or semantic IDs than the catalogue's, or is not the one that `config` was made with.
    """
    if not config.teacher:
        raise UserError(
            "model.teacher is not set; give the folder of a trained TIGER's run, which is STORAGE/NAME of jobs.train "
            "(--config jobs/configs/tiger.yaml)"
        )
    uri = locate(config.teacher)
    about = checkpoint.read(uri)
    if about.name not in known:
        raise UserError(
            f"the teacher {uri} is of the model '{about.name}', which has no decoder; give a checkpoint of one of "
            f"{', '.join(known)}"
        )
    try:
        checkpoint.check(about, uri, catalogue.versions)
    except UserError as error:
        raise UserError(
            f"the teacher {error}, for teacher and student alike"
        ) from error
    found: dict[str, Any] = {
        "teacher_model": dict(about.model),
        "teacher_hash": checkpoint.weights_hash(uri),
    }
    for name, value in found.items():
        given = getattr(config, name)
        if given and given != value:
            raise UserError(
                f"model.{name} is {given}, the teacher {uri} has {value}; leave model.{name} out, or give back the "
                f"teacher that this run began with"
            )
    cache = absolute(config.teacher_cache) if config.teacher_cache else ""
    return replace(config, teacher=uri, teacher_cache=cache, **found)


def load(teacher: Retriever, config: TaughtConfig) -> Retriever:
    """The model `teacher` of `config.teacher_model` with its weights, frozen and in evaluation mode. UserError where
    the checkpoint is gone, or not the one that `config` was resolved with."""
    if not config.teacher:
        raise UserError(
            "model.teacher is not set; give the folder of the trained teacher"
        )
    uri = locate(config.teacher)
    if config.teacher_hash not in ("", weights := checkpoint.weights_hash(uri)):
        raise UserError(
            f"the teacher {uri} has the weights {weights[:12]}, the student learned from {config.teacher_hash[:12]}; "
            f"give that one back"
        )
    checkpoint.load_weights(teacher, uri)
    return teacher.requires_grad_(False).eval()


def locate(given: str, what: str = "teacher") -> str:
    """The checkpoint at `given`, or the best one of the finished run whose folder it is; absolute. `what` is said in
    the UserError where there is none."""
    uri = absolute(given)
    for candidate in (uri, join(uri, checkpoint.BEST)):
        if checkpoint.exists(candidate):
            return candidate
    raise UserError(
        f"the {what} {uri} is neither a checkpoint nor a finished run: it holds no {checkpoint.CONFIG} and no best/; "
        f"give the folder of a run of jobs.train, which is its STORAGE/NAME"
    )
