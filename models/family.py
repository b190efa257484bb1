"""What the models of a family share: how tables become a catalogue and batches, what is measured, how it is served.

    find("tiger").family.catalogue(Inputs(tables, sids))

The families are `Retrieval`, `Search` and `Actions`, in `models/<family>/family.py`. Code outside asks for these
methods and never which family it has. What a single model does otherwise stands in its row of `models/registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, Protocol

from torch import nn

from models.fit import Sums
from models.inputs import Inputs
from models.requests import Requests
from models.shares import Sharded
from models.shuffles import Shuffle


class Measured(Protocol):
    """What a validation or an evaluation finds: a module with these."""

    @property
    def SHOWN(self) -> tuple[str, ...]:  # a constant of the module
        """Metrics of a training's best epoch that are printed."""
        ...

    @property
    def measure(self) -> Callable[..., Sums]:
        """`measure(model, batch, by_user=stride, **options)`: sums over a batch that add up to the metrics, and a
        metric of every `stride`th user, of none for 0."""
        ...

    @property
    def means(self) -> Callable[[Sums], dict[str, float]]:
        """Metrics from the sums of all batches and workers."""
        ...

    @property
    def names(self) -> Callable[[Any], list[str]]:
        """`names(catalogue)`: names of what `means` gives."""
        ...

    @property
    def summary(self) -> Callable[[dict[str, float]], list[str]]:
        """Lines that tell the metrics of an evaluation."""
        ...


class Family:
    """What the models of one family share."""

    name: str
    """Folder under `models/`, and the kind of request of its tables."""
    examples: type[Sharded]
    """`examples.load(sequences, split, unit=, max_history=)` gives what batches are made of."""
    eval_unit = "request"
    """What a row of an evaluation batch is; `user` where all candidates of a user are one request."""
    reads: ClassVar[Mapping[str, bool]] = {}
    """Folders of `Inputs` beside the tables that all its models read, and whether they need them."""
    measured: Measured
    """What is measured."""
    ranks: Literal["catalogue", "candidates"]
    """What its models rank: all items after a history, or what a request shows (`model.score(batch)`)."""
    requests: type[Requests]
    """How a request that is served becomes a batch."""
    logged = False
    """Whether every training logs its model to MLflow; those of others are logged when they are registered."""

    def catalogue(self, inputs: Inputs) -> Any:
        """What models are built on."""
        raise NotImplementedError

    def served_catalogue(self, inputs: Inputs) -> Any:
        """The same of a bundle, in which of the sequences the manifest alone is."""
        return self.catalogue(inputs)

    def hashes(self, inputs: Inputs) -> dict[str, str]:
        """Hashes of the tables that a catalogue comes from, from their manifests alone."""
        raise NotImplementedError

    def accompany(self, catalogue: Any, examples: Iterable[Any], config: Any) -> Any:
        """The catalogue without what batches of the `examples` bring along in training."""
        return catalogue

    def parts(self, model: nn.Module) -> dict[str, int]:
        """Learned numbers of a model by part, where a training says them."""
        return {}

    def shuffles(self, model: Any, catalogue: Any) -> dict[str, Shuffle]:
        """By name, what the model ranks candidates by, and how rows exchange it."""
        return {}

    def unread(self, info: Mapping[str, Any]) -> list[str]:
        """What its models do not read of tables whose sequences have this `info`, said before a training."""
        return []
