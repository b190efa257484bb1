"""The frozen teacher of a retrieval model, loaded from a checkpoint.

config = resolve_teacher(config, catalogue)  # sets teacher_model and teacher_hash
teacher = build_teacher(config, catalogue)   # with random weights
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, ClassVar, TypeVar, cast

from pydantic.dataclasses import dataclass

from core.errors import UserError
from core.options import STRICT, CheckpointPath, NamedConfig
from models import registry
from models.loaded_model import build_model, load_model
from models.retrieval.data import Catalogue
from models.retrieval.model import RetrievalModel
from models.retrieval.retriever import Retriever
from models.training import checkpoint


@dataclass(config=STRICT)
class TeacherConfig(NamedConfig):
    """The teacher of a model that learns from one."""

    default_teacher: ClassVar[str] = "tiger"
    """Model of the teacher if `teacher_model` is empty."""
    teacher: CheckpointPath = ""
    """Checkpoint of a trained model with a backbone and a decoder, such as TIGER, or
    folder of its finished run; used in training only."""
    teacher_model: dict[str, Any] = field(default_factory=dict)
    """Name and config of the teacher, filled in from its checkpoint; empty: the
    defaults of the teacher's model."""
    teacher_hash: str = ""
    """SHA-256 of the teacher's weights file, filled in from its checkpoint."""

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
    _teacher: tuple[Retriever, ...] = ()
    """The teacher in a tuple, so that it is no submodule and is not saved."""

    @classmethod
    def resolve_config(cls, config: Any, catalogue: Catalogue) -> Any:
        """Return the config with the teacher's config and hash (`resolve_teacher`)."""
        return resolve_teacher(config, catalogue)

    def prepare_training(self, catalogue: Catalogue) -> list[str]:
        """Load the teacher of the config and copy the weights that it shares."""
        self.set_teacher(load_model(self.config.teacher, catalogue)[0])
        return []

    def set_teacher(self, teacher: Any) -> None:
        """Store the teacher; a subclass copies the weights that it shares, too."""
        device = next(self.parameters()).device
        self._teacher = (teacher.requires_grad_(False).eval().to(device),)

    @property
    def teacher(self) -> Retriever:
        """The teacher that the model learns from."""
        if not self._teacher:
            raise UserError("the student has no teacher to learn from")
        return self._teacher[0]


def read_checkpoint(
    config: TeacherConfig, part: str, catalogue: Catalogue, model: str | None = None
) -> tuple[str, checkpoint.Checkpoint, str]:
    """Find and check a checkpoint that a config names.

    Args:
        config: Config of the student.
        part: Option that names the checkpoint: `teacher` or `encoder`.
        catalogue: Catalogue of the student.
        model: Model of the checkpoint, if it has to be a certain one.

    Returns:
        Absolute URI, content and weights hash of the checkpoint.
    """
    if not getattr(config, part):
        raise UserError(f"model.{part} is not set", part)
    uri = checkpoint.locate(getattr(config, part), part)
    content = checkpoint.read(uri)
    checkpoint.check(content, uri, catalogue.versions, model)
    weights_hash = checkpoint.weights_hash(uri)
    first_hash = getattr(config, f"{part}_hash")
    if first_hash not in ("", weights_hash):
        raise UserError(
            f"the {part} {uri} is not the one that this run started with: "
            f"model.{part}_hash is {first_hash[:12]}, not {weights_hash[:12]}",
            "name",
        )
    return uri, content, weights_hash


def resolve_teacher(config: C, catalogue: Catalogue) -> C:
    """Return the config with the teacher's config, weights hash and absolute paths."""
    uri, teacher, weights = read_checkpoint(config, "teacher", catalogue)
    if not issubclass(registry.find(teacher.name), Retriever):
        raise UserError(
            f"the teacher {uri} is of the model '{teacher.name}', which has no decoder",
            "teacher",
        )
    return replace(
        config,
        teacher=uri,
        teacher_model=dict(teacher.model),
        teacher_hash=weights,
    )


def build_teacher(config: TeacherConfig, catalogue: Catalogue) -> Retriever:
    """Build the teacher that the config describes, with random weights."""
    options = {"name": config.default_teacher, **config.teacher_model}
    return cast(Retriever, build_model(options, catalogue))


def require_class(part: Any, expected: type[P]) -> P:
    """Return `part`, a teacher or its backbone or decoder.

    Raises:
        UserError: If the part is not an `expected`.
    """
    if not isinstance(part, expected):
        raise UserError(
            f"the student learns from a {expected.__name__}, and its teacher has a "
            f"{type(part).__name__}",
            "teacher",
        )
    return part
