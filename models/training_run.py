"""One training built from a config: model, batches and validation, in PyTorch only.

    run = TrainingRun.build(SASRecConfig(name="sasrec"), FitConfig(), Inputs("tables"))
    for event in fit(run.model, run.train, run.validate, run.fit):
        ...

The workers of `pipelines/training` use this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from core.errors import UserError
from core.files import join
from core.options import build, check_known
from core.schemas import Inputs
from core.tables import Table, table_hashes
from models import own_code, registry
from models.custom_features import adopt_scales
from models.dataset.dataset import Dataset, NewExamples
from models.evaluation import add_sums, measure_examples
from models.loaded_model import load_catalogue
from models.metrics.metric import lower_is_better
from models.model import Model
from models.retrieval.popular import encode_counts
from models.training import checkpoint
from models.training.checkpoint import Checkpoint, Learned, State
from models.training.fit_config import FitConfig
from models.warm_start import collect_row_names, load_extended_weights


@dataclass
class TrainingRun:
    """A model and the data on which one worker trains and validates the model."""

    model: Model
    """The model on its device, initialised from the seed or from a checkpoint."""
    catalogue: Any
    """Catalogue of the tables."""
    train: Dataset
    """Examples of the train split."""
    val: Dataset
    """Examples of the validation split."""
    fit: FitConfig
    """Options of the training loop."""
    device: torch.device
    """Device of the model."""
    world: int
    """Number of workers."""
    messages: list[str] = field(default_factory=list)
    """Messages to print before training, about weights and precomputed values."""
    learned_per_example: float = 1.0
    """Number of `kind.learned_unit` of a training example, which may be a window that
    serves many requests."""
    should_stop: Callable[[], bool] = lambda: False
    """Called before every validation batch; the validation stops if it returns true."""

    @classmethod
    def build(
        cls,
        config: Any,
        fit: FitConfig,
        inputs: Inputs,
        *,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world: int = 1,
        last: Checkpoint | None = None,
        init: str | None = None,
    ) -> Self:
        """Load the tables and build the model.

        Args:
            config: Config of the model, from `resolve_config`.
            fit: Options of the training loop.
            inputs: Folders that the model reads.
            device: Device of the model.
            rank: Rank of this worker.
            world: Number of workers.
            last: Last checkpoint of the run to resume; its weights are loaded by
                `resume`.
            init: URI of a checkpoint from whose weights a new run starts.
        """
        model_class = registry.find(config.name)
        if not model_class.trains_by_gradient:  # fitted in one pass, by one worker
            rank, world = 0, 1
        initial = None if last or not init else checkpoint.read(init)
        scales: dict[str, Any] | None = None
        since = 0  # time in ms from which all training examples are used
        if last:
            scales, since = last.learned.get("scales"), last.learned.get("since", 0)
        elif initial:
            if "scales" in initial.learned:
                scales = adopt_scales(initial.learned["scales"])
            if fit.replay_fraction < 1:
                since = initial.learned.get("until") or 0
        catalogue = load_catalogue(config.name, inputs, scales)
        if initial and init:
            check_init(initial, init, catalogue.versions, model_class, fit)
        new = NewExamples(since, fit.replay_fraction, fit.seed) if since else None
        torch.manual_seed(fit.seed)
        module = model_class(config, catalogue).to(device)
        train = Dataset.load(module, catalogue, "train", rank, world, new=new)
        if not len(train):
            newer = f" newer than the training of {init or 'this run'}" if since else ""
            raise UserError(f"{inputs.sequences} has no train request{newer}")
        val = Dataset.load(module, catalogue, "val", rank, world)
        messages: list[str] = []
        if initial and init:
            messages = [f"weights of {init}"]
            messages += load_extended_weights(
                module, init, initial, catalogue.num_items, trains=True
            )
        messages += module.prepare_training(catalogue)
        return cls(
            model=module,
            catalogue=catalogue,
            train=train,
            val=val,
            fit=fit,
            device=torch.device(device),
            world=world,
            messages=messages,
            learned_per_example=train.examples.num_learned / len(train),
        )

    def validate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        """Measure the model on the validation examples of all ranks.

        Returns:
            The metrics and the number of examples. There are no metrics without an
            example.
        """
        result = measure_examples(
            model,
            self.val,
            batch_size=self.fit.eval_batch_size,
            device=self.device,
            limit=self.fit.eval_examples,
            options=self.fit.eval_options,
            should_stop=self.should_stop,
        )
        results: list[Any] = [result]
        if self.world > 1:
            results = [None] * self.world
            dist.all_gather_object(results, result)
        count = sum(result.num_examples for result in results)
        # by rank, so that the sum is bit-identical on every rank
        sums = add_sums(result.sums for result in results)
        metrics = self.model.metric_means(sums) if count else {}
        if not math.isfinite(metrics.get(self.fit.metric, 0.0)):
            raise UserError(
                f"fit.metric is {self.fit.metric}, which is not defined on the "
                f"{count:,} rows of the validation split, so no checkpoint can be the "
                "best"
            )
        return metrics, count

    def fit_in_one_pass(self) -> None:
        """Fit a model that is not trained by gradient, in one pass over its batches.

        A model with early stopping also reads the validation batches.
        """
        model: Any = self.model
        fit = self.fit
        train = self.train.epoch(fit.batch_size, seed=fit.seed, epoch=0)
        if not model.stops_early:
            model.fit_in_one_pass(train)
            return
        rows = self.val.evaluation_batches(fit.eval_batch_size, fit.eval_examples)
        val = (self.val.collate(batch).to(self.device) for batch in rows)
        model.fit_in_one_pass(train, val)

    @cached_property
    def popularity(self) -> Learned:
        """The counts of the training behaviours by item, if the model ranks them."""
        if self.model.ranks != "catalogue":
            return {}
        catalogue = self.catalogue
        train: Any = Dataset.load(self.model, catalogue, "train", unit="behaviour")
        counts = encode_counts(train.examples.targets, catalogue.num_items)
        return {"popularity": counts}

    def checkpoint(self, **fields: Any) -> Checkpoint:
        """Describe a checkpoint of this run.

        Args:
            fields: Fields of the checkpoint that change during a run, such as `step`.
        """
        new_examples = self.train.selection.new
        split = self.catalogue.versions["sequences"].info.split
        model = asdict(self.model.config)
        return Checkpoint(
            model=model,
            fit=self.fit,
            hashes=table_hashes(self.catalogue.versions),
            code=own_code.find_sources(model),
            learned={
                "scales": self.catalogue.scales(),
                "names": collect_row_names(self.model),
                "until": split.val_start_ms or None,
                "since": new_examples.since if new_examples else 0,
                "choice": self.model.choice,
                **self.popularity,
            },
            **fields,
        )

    def resume(self, folder: str, metadata: Checkpoint) -> State | None:
        """Load the weights of a checkpoint of the run in `folder`.

        Returns:
            The state from which `fit` resumes; None for a model that is not trained by
            gradient.
        """
        uri = join(folder, metadata.folder)
        checkpoint.check(metadata, uri, self.catalogue.versions, self.model.name)
        with checkpoint.local(uri) as copy:
            checkpoint.load_weights(self.model, copy)
            if not self.model.trains_by_gradient:
                return None
            state = checkpoint.load_state(copy)
        has_ended = metadata.epoch == metadata.fit.max_epochs
        if has_ended and metadata.epoch < self.fit.max_epochs:
            state["position"]["stopped"] = False
        return state


def resolve_config(config: Any, inputs: Inputs) -> Any:
    """Return a model's config with values from the checkpoints that it names."""
    resolve = registry.find(config.name).resolve_config
    return resolve(config, load_catalogue(config.name, inputs))


def check_init(
    initial: Checkpoint,
    init: str,
    versions: Mapping[str, Table[Any]],
    model_class: type[Model],
    fit: FitConfig,
) -> None:
    """Check that a training can start from the weights of a checkpoint.

    Args:
        initial: `config.json` of the checkpoint.
        init: URI of the checkpoint, for messages.
        versions: Versions of the tables by name.
        model_class: Class of the model.
        fit: Options of the training loop.
    """
    if not model_class.trains_by_gradient:
        raise UserError(
            f"'{model_class.name}' is not trained by gradient, so it cannot start from "
            "a checkpoint"
        )
    checkpoint.check(initial, init, versions, model_class.name, extending=True)
    if fit.replay_fraction < 1 and not initial.learned.get("until"):
        raise UserError(
            f"fit.replay_fraction is {fit.replay_fraction:g}, but {init} was not "
            "trained up to a time"
        )


def check_fit(
    fit: FitConfig, model_class: type[Model], catalogue: Any, section: str = ""
) -> None:
    """Check that a model has the metric and the options of validation.

    Args:
        fit: Options of the training.
        model_class: Class of the model.
        catalogue: Catalogue of the model, whose labels are part of the metrics' names.
        section: Prefix of keys in messages.
    """
    names = [
        name
        for name in model_class.metric_names(catalogue)
        if not lower_is_better(name)
    ]
    check_known([fit.metric], names, f"{section}fit.metric")
    build(model_class.options_class, fit.eval_options, f"{section}fit.eval_options.")
