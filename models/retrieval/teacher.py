"""A trained TIGER as a frozen teacher: found at its checkpoint, checked against the catalogue, loaded.

config = resolve(config, catalogue)     # fills in teacher_model and teacher_hash
tiger = load(config, catalogue)         # frozen, in evaluation mode
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import safetensors
import torch

from models import checkpoint
from models.retrieval import teacher_cache
from models.retrieval.data import Catalogue, Examples
from models.retrieval.tiger import Tiger, TigerConfig
from models.tables import UserError, join
from models.uri import hide


class Taught(Protocol):
    """A config with a teacher."""

    teacher: str
    """Path of the teacher's checkpoint, or of a finished run."""
    teacher_model: dict[str, Any]
    """The teacher's `TigerConfig`."""
    teacher_hash: str
    """SHA-256 of the teacher's weights file."""
    teacher_cache: str
    """Folder of the tables of what the teacher says; empty for none."""


C = TypeVar("C", bound=Taught)


def resolve(config: C, catalogue: Catalogue) -> C:
    """`config` with teacher and cache as absolute paths, the teacher's sizes and the hash of its weights.

    Raises UserError where no teacher is named, it is gone, is not TIGER, was trained on other tables or
    semantic IDs than the catalogue's, or is not the one that `config` was made with.
    """
    if not config.teacher:
        raise UserError(
            "model.teacher is not set; give the folder of a trained TIGER (jobs.train --config jobs/configs/tiger.yaml)"
        )
    uri = locate(config.teacher)
    about = checkpoint.read(uri)
    if about.name != "tiger":
        raise UserError(f"the teacher {uri} is of the model '{about.name}'; give a checkpoint of 'tiger'")
    model = {name: value for name, value in about.model.items() if name != "name"}
    _check_vocabulary(uri, TigerConfig(**model), catalogue)
    try:
        checkpoint.check(about, uri, dict(catalogue.hashes))
    except UserError as error:
        raise UserError(f"the teacher {error}, for teacher and student alike") from error
    found = {"teacher_model": model, "teacher_hash": checkpoint.weights_hash(uri)}
    for name, value in found.items():
        given = getattr(config, name)
        if given and given != value:
            raise UserError(
                f"model.{name} is {given}, the teacher {uri} has {value}; leave model.{name} out, or give back the "
                f"teacher that this run began with"
            )
    cache = absolute(config.teacher_cache) if config.teacher_cache else ""
    return replace(config, teacher=uri, teacher_cache=cache, **found)  # type: ignore[type-var]


def load(config: Taught, catalogue: Catalogue) -> Tiger:
    """The teacher of a resolved config with its weights, frozen and in evaluation mode."""
    tiger = Tiger(TigerConfig(**config.teacher_model), catalogue)
    checkpoint.load_weights(tiger, config.teacher)
    return tiger.requires_grad_(False).eval()


def remember(model: Any, config: Taught, catalogue: Catalogue, examples: dict[str, Examples]) -> list[str]:
    """Gives a student the tables of its `teacher_cache`, made where they are not there yet; a line about each."""
    if not config.teacher_cache:
        return []
    model.eval()  # without dropout
    device = next(model.parameters()).device
    with torch.no_grad():
        known, lines = teacher_cache.remember(config.teacher_cache, model.questions(), catalogue, examples, device)
    model.set_known(known)
    return lines


def absolute(given: str) -> str:
    """A path made absolute, since workers run in other folders; URIs without what they hide."""
    return hide(given.rstrip("/")) if "://" in given else str(Path(given).expanduser().absolute())


def locate(given: str, what: str = "teacher") -> str:
    """The checkpoint at `given`, or the best one of the finished run whose folder it is; absolute. `what` is said in
    the UserError where there is none."""
    uri = absolute(given)
    for candidate in (uri, join(uri, "best")):
        if checkpoint.exists(candidate):
            return candidate
    raise UserError(
        f"the {what} {uri} is neither a checkpoint nor a finished run: it holds no {checkpoint.CONFIG} and no best/; "
        f"give the folder that jobs.train printed"
    )


def _check_vocabulary(uri: str, config: TigerConfig, catalogue: Catalogue) -> None:
    """Raises UserError where the teacher has another number of tokens than the semantic IDs ask for."""
    with checkpoint.local(uri) as folder:
        file = checkpoint.whole(folder, checkpoint.WEIGHTS, uri)
        with safetensors.safe_open(str(file), "pt") as weights:
            tokens = weights.get_slice("t5.shared.weight").get_shape()[0]
    sizes = catalogue.codebook_sizes
    needed = 2 + sum(sizes) + config.n_user_tokens  # padding and end, codes, users
    if tokens != needed:
        raise UserError(
            f"the teacher {uri} has {tokens} tokens, semantic IDs of {len(sizes)} levels {list(sizes)} need {needed}; "
            f"give the --sids that it was trained with, or train another teacher"
        )
