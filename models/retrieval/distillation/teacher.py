"""The frozen teacher of a retrieval model, loaded from a checkpoint.

config = resolve_teacher(config, catalogue)  # sets teacher_model and teacher_hash
teacher = load_teacher(config, catalogue)    # frozen, in evaluation mode
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, ClassVar, TypeVar, cast

from pydantic.dataclasses import dataclass

from core.errors import UserError
from core.files import absolute
from core.options import STRICT, NamedConfig
from models import registry
from models.build import build_model
from models.retrieval.data import Catalogue
from models.retrieval.distillation.teacher_cache import (
    CachedStates,
    TeacherOutput,
    cache_teacher_outputs,
)
from models.retrieval.model import RetrievalModel
from models.retrieval.retriever import Retriever
from models.training import checkpoint


@dataclass(config=STRICT)
class TeacherConfig(NamedConfig):
    """The teacher of a model that learns from one."""

    default_teacher: ClassVar[str] = "tiger"
    """Model of the teacher if `teacher_model` is empty."""
    has_fixed_outputs: ClassVar[bool] = True
    """Whether the teacher's outputs stay the same during training, so that they can be
    cached."""
    teacher: str = field(default="", metadata={"names": "checkpoint"})
    """Checkpoint of a trained model with a backbone and a decoder, such as TIGER, or
    folder of its finished run; used in training only."""
    teacher_model: dict[str, Any] = field(default_factory=dict)
    """Name and config of the teacher, filled in from its checkpoint; empty: the
    defaults of the teacher's model."""
    teacher_hash: str = ""
    """SHA-256 of the teacher's weights file, filled in from its checkpoint."""
    teacher_cache: str = field(default="", metadata={"names": "folder"})
    """Folder to cache the teacher's outputs in, in half precision. Runs share it: the
    first run computes the outputs, and later epochs and runs skip the teacher's forward
    pass."""

    @property
    def max_history(self) -> int:
        """Number of latest items that the teacher reads."""
        teacher = self.teacher_model
        while "teacher_model" in teacher:  # the teacher is a student itself
            teacher = teacher["teacher_model"]
        return int(teacher.get("max_history", 20))


C = TypeVar("C", bound=TeacherConfig)
P = TypeVar("P")


class TaughtModel(RetrievalModel):
    """A retrieval model whose training needs a trained teacher."""

    config: TeacherConfig
    example_unit = "request"
    extra_inputs: ClassVar[Mapping[str, bool]] = {"sids": True}

    @classmethod
    def resolve_config(cls, config: Any, catalogue: Catalogue) -> Any:
        """Return the config with the teacher's config and hash (`resolve_teacher`)."""
        return resolve_teacher(config, catalogue)

    def prepare_training(
        self, catalogue: Catalogue, datasets: Mapping[str, Any]
    ) -> list[str]:
        """Load the teacher, and open or compute the teacher cache."""
        self.load_teacher(catalogue)
        return cache_teacher_outputs(self, self.config, catalogue, datasets)

    def load_teacher(self, catalogue: Catalogue) -> None:
        """Load the teacher of the config and copy the weights that it shares."""
        self.set_teacher(load_teacher(self.config, catalogue))

    def set_teacher(self, teacher: Retriever) -> None:
        """Copy the weights that the model shares with its teacher."""
        raise NotImplementedError

    def outputs_to_cache(self) -> list[TeacherOutput]:
        """Describe the outputs that the teacher cache stores, by default none."""
        return []

    def set_teacher_outputs(self, tables: dict[str, CachedStates]) -> None:
        """Set the cached tables of `outputs_to_cache`, by name."""
        raise NotImplementedError


def resolve_teacher(config: C, catalogue: Catalogue) -> C:
    """Return the config with the teacher's config, weights hash and absolute paths."""
    if not config.teacher:
        raise UserError("model.teacher is not set", "teacher")
    uri = checkpoint.locate(config.teacher, "teacher")
    teacher = checkpoint.read(uri)
    if not registry.find(teacher.name).can_teach:
        raise UserError(
            f"the teacher {uri} is of the model '{teacher.name}', which has no decoder",
            "teacher",
        )
    checkpoint.check(teacher, uri, catalogue.versions)
    resolved: dict[str, Any] = {
        "teacher_model": dict(teacher.model),
        "teacher_hash": checkpoint.weights_hash(uri),
    }
    for name, value in resolved.items():
        config_value = getattr(config, name)
        if config_value and config_value != value:
            raise UserError(
                f"model.{name} is {config_value}, the teacher {uri} has {value}"
            )
    cache = absolute(config.teacher_cache) if config.teacher_cache else ""
    return replace(config, teacher=uri, teacher_cache=cache, **resolved)


def build_teacher(config: TeacherConfig, catalogue: Catalogue) -> Retriever:
    """Build the teacher that the config describes, with random weights."""
    options = {"name": config.default_teacher, **config.teacher_model}
    return cast(Retriever, build_model(options, catalogue))


def require(part: Any, expected: type[P]) -> P:
    """Return a teacher, or its backbone or decoder, which must be of a class."""
    if not isinstance(part, expected):
        raise UserError(
            f"the student learns from a {expected.__name__}, and its teacher has a "
            f"{type(part).__name__}",
            "teacher",
        )
    return part


def load_teacher(config: TeacherConfig, catalogue: Catalogue) -> Retriever:
    """Load the teacher of a resolved config, frozen and in evaluation mode."""
    uri = checkpoint.locate(config.teacher, "teacher")
    weights = checkpoint.weights_hash(uri)
    if config.teacher_hash not in ("", weights):
        raise UserError(
            f"the teacher {uri} has the weights {weights[:12]}, the student was "
            f"trained with {config.teacher_hash[:12]}"
        )
    teacher = build_teacher(config, catalogue)
    checkpoint.load_weights(teacher, uri)
    return teacher.requires_grad_(False).eval()
