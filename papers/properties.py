"""What kind of accelerator each student of a TIGER is: Table 4 of SID-MLP, found out and not typed in.

    python -m papers.properties

A small teacher with random weights teaches each model, and the code is watched:

    plug-and-play          no weight that comes from the teacher is trained
    verify-free            no weight of the teacher's decoder is kept beside the model's own, frozen, to be asked
    attention-free steps   no attention is computed from the second code on
    update-free beams      a step leaves no float state behind: all that a beam has is its codes

Prints the table in Markdown.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models import registry
from models.retrieval.data import Catalogue
from models.retrieval.parts import Scorer

STUDENTS = (
    "atspeed_s",
    "atspeed_r",
    "earn",
    "nezha",
    "gdn",
    "mamba2",
    "one_layer",
    "sid_mlp",
    "sid_mlp_pp",
)
"""The models of the table."""

SIZES: dict[str, dict[str, Any]] = {
    "tiger": {"d_model": 16, "d_ff": 16, "num_heads": 2, "d_kv": 8},
    "sid_mlp_pp": {"end_to_end": True},
}
"""Options of models, so that all are small and none asks for a checkpoint."""

ATTENTION = ("aten::_softmax", "aten::_safe_softmax", "aten::_scaled_dot_product")
"""Beginnings of the operators that weigh positions; probabilities of codes are `log_softmax`."""


@dataclass(frozen=True)
class Properties:
    """A row of the table."""

    plug_and_play: bool
    verify_free: bool
    attention_free: bool
    update_free: bool


def properties(name: str) -> Properties:
    """Of the model `name`, taught by a TIGER."""
    torch.manual_seed(0)
    codes = torch.cartesian_prod(*[torch.arange(4)] * 3)[torch.randperm(64)[:40]]
    catalogue = Catalogue.from_codes(codes, (4, 4, 4))
    teacher = build("tiger", catalogue)
    student = build(name, catalogue)
    student.set_teacher(teacher)
    taken = list(of_teacher(student, teacher))
    of_decoder = list(of_teacher(student, teacher.decoder))
    batch = {
        "history": torch.randint(0, 40, (3, 5)),
        "history_length": torch.full((3,), 5),
        "user": torch.arange(3),
    }
    with (
        torch.no_grad(),
        patch.dict(os.environ, TRIELINE_KERNELS="0"),
    ):  # an operation of PyTorch's own is seen by its name
        scorer = student.decoder.scorer(student.encode(batch))
        scorer.start()
        before = floats(scorer)
        with Operators() as ran:
            scorer.step(
                torch.zeros((3, 2), dtype=torch.long),
                torch.tensor([[0, 1]]).expand(3, 2),
            )
        after = floats(scorer)
    return Properties(
        plug_and_play=not any(weight.requires_grad for weight in taken),
        verify_free=not any(not weight.requires_grad for weight in of_decoder),
        attention_free=not any(name.startswith(ATTENTION) for name in ran.names),
        update_free=before.keys() == after.keys()
        and all(
            after[key][0] is value and after[key][1] == count
            for key, (value, count) in before.items()
        ),
    )


def build(name: str, catalogue: Catalogue) -> Any:
    """A model of small size with random weights, in evaluation mode; a student's teacher is the small TIGER."""
    sizes: dict[str, Any] = {"name": name, **SIZES.get(name, {})}
    if name != "tiger":
        sizes |= {"teacher_model": {"name": "tiger", **SIZES["tiger"]}}
    return registry.build(registry.config_from_dict(sizes), catalogue).eval()


def of_teacher(student: nn.Module, teacher: nn.Module) -> Iterator[nn.Parameter]:
    """The student's matrices that have a value of the teacher's. Vectors may be equal by chance, such as norms' ones;
    embeddings are the backbone's."""
    theirs = [weight for weight in teacher.parameters() if weight.ndim > 1]
    for weight in student.parameters():
        if any(
            weight.shape == other.shape and torch.equal(weight, other)
            for other in theirs
        ):
            yield weight


def floats(scorer: Scorer) -> dict[str, tuple[Tensor, int]]:
    """The float tensors that a scorer holds, and how often each was written to."""
    found: dict[str, tuple[Tensor, int]] = {}

    def look(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                found[name] = (value, value._version)
        elif isinstance(value, (list, tuple)):
            for i, each in enumerate(value):
                look(f"{name}.{i}", each)
        elif type(value).__module__.startswith("models.") and not isinstance(
            value, nn.Module
        ):
            for key, each in vars(value).items():  # a module's weights are no state
                look(f"{name}.{key}", each)

    look("scorer", scorer)
    return found


class Operators(TorchDispatchMode):
    """Names of the operators that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def table() -> str:
    """Table 4 in Markdown, with more models."""
    head = ["model", *(field.name.replace("_", "-") for field in fields(Properties))]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name in STUDENTS:
        marks = ["yes" if value else "no" for value in astuple(properties(name))]
        lines.append(f"| `{name}` | {' | '.join(marks)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
