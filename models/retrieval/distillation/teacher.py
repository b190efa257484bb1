"""The frozen teacher of a retrieval model: named by a checkpoint, checked, built and loaded.

config = resolve_teacher(config, catalogue)  # fills in teacher_model and teacher_hash
teacher = load_teacher(config, catalogue)    # its weights, frozen, in evaluation mode
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar, cast

from models import registry
from models.build import build_model
from models.retrieval.data import Catalogue
from models.retrieval.distillation.teacher_cache import Query, States, precompute
from models.retrieval.model import RetrievalModel
from models.retrieval.retriever import Retriever
from models.storage import checkpoint
from models.storage.tables import UserError
from models.storage.uri import absolute


@dataclass
class TeacherConfig:
    """The teacher of a model that learns from one."""

    default_teacher: ClassVar[str] = "tiger"
    """Model that the teacher is assumed to be before a checkpoint is given."""
    has_fixed_outputs: ClassVar[bool] = True
    """Whether the teacher's outputs stay the same during training, so that they can be
    cached."""
    teacher: str = field(default="", metadata={"names": "checkpoint"})
    """Checkpoint of a trained backbone with a decoder, such as TIGER, or folder of its
    finished run; for training only."""
    teacher_model: dict[str, Any] = field(default_factory=dict)
    """The teacher's name and config, filled in from its checkpoint; empty: TIGER's
    defaults."""
    teacher_hash: str = ""
    """SHA-256 of the teacher's weights file, filled in from its checkpoint."""
    teacher_cache: str = field(default="", metadata={"names": "folder"})
    """Folder of tables of the teacher's outputs, which runs share: the first one makes
    them, so that epochs, validation on a CPU included, need no pass of its backbone or
    decoder; of half precision, unpadded (`teacher_cache.py`)."""

    @property
    def max_history(self) -> int:
        """Latest items read: the teacher's."""
        teacher = self.teacher_model
        while "teacher_model" in teacher:  # a teacher that was a student itself
            teacher = teacher["teacher_model"]
        return int(teacher.get("max_history", 20))


C = TypeVar("C", bound=TeacherConfig)


class TaughtModel(RetrievalModel):
    """A retrieval model that needs a trained teacher before it is trained itself."""

    config: TeacherConfig
    example_unit = "request"
    extra_inputs: ClassVar[Mapping[str, bool]] = {"sids": True}

    @classmethod
    def resolve_config(cls, config: Any, catalogue: Catalogue) -> Any:
        return resolve_teacher(config, catalogue)

    def prepare_training(
        self, catalogue: Catalogue, datasets: Mapping[str, Any]
    ) -> list[str]:
        """Load the teacher, and open or make the tables of its outputs."""
        self.load_teacher(catalogue)
        return precompute(self, self.config, catalogue, datasets)

    def load_teacher(self, catalogue: Catalogue) -> None:
        """Load the teacher of the config and take over its weights."""
        self.set_teacher(load_teacher(self.config, catalogue))

    def set_teacher(self, teacher: Retriever) -> None:
        """Copy the weights that the model shares with its teacher."""
        raise NotImplementedError

    def teacher_queries(self) -> list[Query]:
        """Return the outputs of the teacher that `teacher_cache` may keep."""
        return []

    def set_teacher_outputs(self, tables: dict[str, States]) -> None:
        """Take the tables that `teacher_queries` asked for, by name."""
        raise NotImplementedError


def resolve_teacher(config: C, catalogue: Catalogue) -> C:
    """Return the config with absolute paths, the teacher's config and the hash of its weights.

    Raises:
        UserError: If no teacher is named, or it does not exist, has no decoder, was
            trained on other tables or semantic IDs than the catalogue's, or is another
            one than the config was made with.
    """
    if not config.teacher:
        raise UserError(
            "model.teacher is not set; give the folder of a trained TIGER's run, which is STORAGE/NAME of jobs.train "
            "(--config jobs/configs/tiger.yaml)"
        )
    uri = checkpoint.locate(config.teacher, "teacher")
    about = checkpoint.read(uri)
    if about.name not in registry.MODELS or not registry.find(about.name).can_teach:
        teachers = [name for name in registry.MODELS if registry.find(name).can_teach]
        raise UserError(
            f"the teacher {uri} is of the model '{about.name}', which has no decoder; give a checkpoint of one of "
            f"{', '.join(teachers)}"
        )
    try:
        checkpoint.check(about, uri, catalogue.versions)
    except UserError as error:
        raise UserError(
            f"the teacher {error}, for teacher and student alike"
        ) from error
    resolved: dict[str, Any] = {
        "teacher_model": dict(about.model),
        "teacher_hash": checkpoint.weights_hash(uri),
    }
    for name, value in resolved.items():
        given = getattr(config, name)
        if given and given != value:
            raise UserError(
                f"model.{name} is {given}, the teacher {uri} has {value}; leave model.{name} out, or give back the "
                f"teacher that this run began with"
            )
    cache = absolute(config.teacher_cache) if config.teacher_cache else ""
    return replace(config, teacher=uri, teacher_cache=cache, **resolved)


def build_teacher(config: TeacherConfig, catalogue: Catalogue) -> Retriever:
    """Build the teacher that the config describes, with random weights."""
    options = {"name": config.default_teacher, **config.teacher_model}
    return cast(Retriever, build_model(options, catalogue))


def load_teacher(config: TeacherConfig, catalogue: Catalogue) -> Retriever:
    """Load the teacher of a resolved config, frozen and in evaluation mode.

    Raises:
        UserError: If its checkpoint does not exist, or holds other weights than those
            that the config was resolved with.
    """
    if not config.teacher:
        raise UserError(
            "model.teacher is not set; give the folder of the trained teacher"
        )
    uri = checkpoint.locate(config.teacher, "teacher")
    weights = checkpoint.weights_hash(uri)
    if config.teacher_hash not in ("", weights):
        raise UserError(
            f"the teacher {uri} has the weights {weights[:12]}, the student learned from {config.teacher_hash[:12]}; "
            f"give that one back"
        )
    teacher = build_teacher(config, catalogue)
    checkpoint.load_weights(teacher, uri)
    return teacher.requires_grad_(False).eval()
