"""The base class of all models.

    class Popularity(RetrievalModel):
        name = "popularity"
        config_class = PopularityConfig
        example_unit = "behaviour"
        trains_by_gradient = False

A model states what it is by class attributes and overrides the methods in which it
differs. `RetrievalModel`, `SearchModel` and `ActionsModel` hold what the models of a
family share; `models/registry.py` lists all models by name. The commands ask a model's
class and never which model it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from types import ModuleType
from typing import Any, ClassVar, Literal

from torch import nn

from models.config import did_you_mean_key
from models.cpu.matmul import use_exact_onednn
from models.dataset.dataset import RequestDataset
from models.requests import Requests
from models.storage.inputs import Inputs
from models.storage.tables import UserError

Ranked = Literal["catalogue", "candidates", "nothing"]
"""What a model can rank."""


class Model(nn.Module):
    """A model that the commands train, evaluate, compare and serve.

    Its constructor takes the resolved config and the catalogue. A model trained by
    gradient has `forward(batch)`, which returns a mapping with the mean `loss` of the
    batch; another one has `fit_counts(batches)`. A model that ranks a catalogue has
    `recommend(batch, k, **options)`, a model that ranks candidates `score(batch)`.
    """

    name: ClassVar[str]
    """Name in the registry."""
    family: ClassVar[str]
    """Kind of tables that it reads: `retrieval`, `search` or `actions`."""
    config_class: ClassVar[type]
    """Dataclass of its options, with a `max_history`."""

    dataset_class: ClassVar[type[RequestDataset]]
    """Dataset of its training and evaluation."""
    requests_class: ClassVar[type[Requests]]
    """Parser of the requests that a served model gets."""
    catalogue_tables: ClassVar[Mapping[str, Sequence[str]]]
    """Tables that a catalogue is loaded from, by folder of `Inputs`."""
    extra_inputs: ClassVar[Mapping[str, bool]] = {}
    """Folders of `Inputs` beside the tables that it reads, and whether it needs
    them."""
    example_unit: ClassVar[str]
    """What a training example is, such as `request` or `user`; the dataset documents
    it."""
    eval_unit: ClassVar[str] = "request"
    """What an example of an evaluation is."""

    trains_by_gradient: ClassVar[bool] = True
    """Whether it is trained by steps; otherwise `fit_counts` is called once."""
    stops_early: ClassVar[bool] = False
    """Whether `fit_counts(train, val)` learns at random and stops on batches of val."""
    supports_fsdp: ClassVar[bool] = False
    """Whether it can be trained in shards, one per worker."""
    can_teach: ClassVar[bool] = False
    """Whether a student can learn from it: it has a backbone and a decoder."""

    is_floor: ClassVar[bool] = False
    """Whether it is a model without training that trained models have to clear."""
    is_diagnostic: ClassVar[bool] = False
    """Whether it ranks by what is known only after results were shown."""
    metrics_module: ClassVar[ModuleType]
    """The family's module with `means`, `names` and `summary` of its metrics."""
    has_own_metrics: ClassVar[bool] = False
    """Whether it is measured by other metrics than its family's."""
    shown_metrics: ClassVar[tuple[str, ...]]
    """Metrics of a training's best epoch that are printed."""

    ranks: ClassVar[Ranked]
    """What it ranks: all items after a history, or the candidates of a request."""
    options_class: ClassVar[type | None] = None
    """Dataclass of the options of `recommend`, each None if left out."""
    requirements: ClassVar[tuple[str, ...]] = ()
    """Python packages that it is served with, beside those of all models."""
    logs_every_run: ClassVar[bool] = False
    """Whether each training logs the model to MLflow; otherwise its registration
    does."""

    config: Any
    """Options of this model."""
    labels: Sequence[str] = ()
    """Names of the K labels that it scores; none for a model that ranks a catalogue."""
    masks: Sequence[int | None] = ()
    """(K,) index of the label that must be true where a label is learned and
    measured."""
    train_rates: Sequence[float] = ()
    """(K,) shares of positives in training, if known."""
    correction: float = 0.0
    """Number added to logits that undoes the sampling of negatives."""

    def __init__(self, config: Any, catalogue: Any) -> None:
        super().__init__()
        use_exact_onednn()
        self.config = config

    @classmethod
    def parse_config(cls, options: Mapping[str, Any]) -> Any:
        """Return the config with these options.

        Raises:
            UserError: For an unknown option or an impossible value.
        """
        known = [f.name for f in fields(cls.config_class)]
        for key in options:
            if key not in known:
                remedy = did_you_mean_key(
                    f"model.{key}", [f"model.{name}" for name in known]
                )
                raise UserError(
                    f"unknown key 'model.{key}' for the model '{cls.name}'; {remedy}"
                )
        try:
            return cls.config_class(**options)
        except (ValueError, TypeError) as error:
            raise UserError(f"model '{cls.name}': {error}") from error

    @classmethod
    def config_to_dict(cls, config: Any) -> dict[str, Any]:
        """Return the model's name and all options, as YAML files and checkpoints hold them."""
        return {"name": cls.name, **asdict(config)}

    @classmethod
    def resolve_config(cls, config: Any, catalogue: Any) -> Any:
        """Return the config with options that follow from checkpoints that it names.

        Called before training; resolving a config again changes nothing.
        """
        return config

    @classmethod
    def load_catalogue(
        cls,
        inputs: Inputs,
        *,
        scales: Mapping[str, Any] | None = None,
        manifest_only: bool = False,
    ) -> Any:
        """Load the catalogue that models are built on.

        Args:
            inputs: Where the tables are.
            scales: Scales of a checkpoint, in place of those of the tables
                (`models/warm_start.py`).
            manifest_only: Whether of `sequences` only the manifest is there, as for a
                served model, whose checkpoint holds the features' means.
        """
        raise NotImplementedError

    @classmethod
    def recommend_options(cls) -> list[str]:
        """Return the names of the options of `recommend`."""
        return [f.name for f in fields(cls.options_class)] if cls.options_class else []

    @classmethod
    def reason_not_served(cls) -> str:
        """Return why the model cannot be served, or an empty string if it can."""
        if cls.is_diagnostic:
            return "it ranks by what is known only after results were shown"
        if cls.ranks == "nothing":
            return "it ranks nothing"
        return ""

    @classmethod
    def describe_requests(cls, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the names of features, actions and labels that requests refer to.

        `info` is that of the manifest of `sequences`.
        """
        return cls.requests_class.about(info)

    @classmethod
    def list_unread(cls, info: Mapping[str, Any]) -> list[str]:
        """Return the columns of the tables that the model ignores, reported before
        training.
        """
        return []

    def prepare_training(
        self, catalogue: Any, datasets: Mapping[str, RequestDataset]
    ) -> list[str]:
        """Load training inputs other than the tables, and return messages about them.

        Called on every worker, with the worker's datasets by split.
        """
        return []

    def lr_multipliers(self) -> dict[str, float]:
        """Return factors on the learning rate, by the beginning of parameters' names."""
        return {}

    def fsdp_blocks(self) -> list[nn.Module]:
        """Return the parts of the model that FSDP shards one by one."""
        raise NotImplementedError

    def parameter_counts(self) -> dict[str, int]:
        """Return the numbers of learned parameters by part, where a training reports them."""
        return {}

    def measure(self, batch: Any, **options: Any) -> dict[str, Any]:
        """Return sums over a batch that add up to the metrics.

        `by_user`: Stride of the users of whom metrics are kept user by user; 0 for
        none.
        """
        raise NotImplementedError

    @classmethod
    def metric_means(cls, sums: dict[str, Any]) -> dict[str, float]:
        """Return the metrics from the sums of all batches and workers."""
        return dict(cls.metrics_module.means(sums))

    @classmethod
    def metric_names(cls, catalogue: Any) -> list[str]:
        """Return the names of the metrics of a model on this catalogue."""
        return list(cls.metrics_module.names(catalogue))

    @classmethod
    def format_metrics(cls, metrics: dict[str, float]) -> list[str]:
        """Return the lines in which an evaluation prints its metrics."""
        return list(cls.metrics_module.summary(metrics))
