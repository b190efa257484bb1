"""One training built from a config: model, batches and validation, in PyTorch only.

    run = TrainingRun.build(SASRecConfig(name="sasrec"), FitConfig(), Inputs("tables"))
    for event in fit(run.model, run.train, run.validate, run.fit, means=run.means):
        ...

The workers of `pipelines/training` use this module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from core.errors import UserError
from core.files import join
from core.options import build, check_known
from core.schemas import Inputs, SequencesInfo
from core.tables import Table, open_table
from models import registry
from models.custom_features import adopt_scales
from models.dataset.batch import Batch
from models.dataset.columns import cache_folder
from models.dataset.dataset import NewExamples, RequestDataset
from models.evaluation import measure_examples
from models.loaded_model import load_catalogue
from models.model import Model
from models.training import checkpoint
from models.training.checkpoint import Checkpoint
from models.training.fit_config import FitConfig
from models.training.loop import (
    REQUESTS,
    ProgressUnit,
    Sums,
    run_validation,
    uses_cuda_graphs,
)
from models.warm_start import collect_row_names, load_extended_weights


@dataclass
class Batches:
    """This worker's share of the training batches, as `fit` reads them."""

    dataset: RequestDataset
    """Examples of the train split."""
    batch_size: int
    """Weight of a global batch, such as its number of requests."""
    seed: int
    """Seed of the order of examples."""
    pad_to_buckets: bool = False
    """Whether batches are padded to few shapes, for CUDA graphs."""

    def steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        return self.dataset.num_steps(self.batch_size)

    def __call__(self, epoch: int, skip: int) -> Iterator[Batch]:
        """Yield the batches of an epoch from step `skip` on."""
        return self.dataset.epoch(
            self.batch_size,
            seed=self.seed,
            epoch=epoch,
            skip=skip,
            pad_to_buckets=self.pad_to_buckets,
        )


@dataclass
class TrainingRun:
    """A model and the data on which one worker trains and validates the model."""

    model: Model
    """The model on its device, initialised from the seed or from a checkpoint."""
    catalogue: Any
    """Catalogue of the tables."""
    train: Batches
    """Training batches of this worker."""
    val: RequestDataset
    """Examples of the validation split."""
    fit: FitConfig
    """Options of the training loop."""
    device: torch.device
    """Device of the model."""
    world: int
    """Number of workers."""
    until: int | None = None
    """Time in ms before which training requests lie, if the split is by time."""
    messages: list[str] = field(default_factory=list)
    """Messages to print before training, about weights and precomputed values."""
    progress_unit: ProgressUnit = REQUESTS
    """Unit in which throughput is printed."""
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
            config: Config of the model, from `Model.resolve_config`.
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
        initial = None if last or not init else checkpoint.read(init)
        scales, scale_messages = choose_scales(last, initial, inputs)
        catalogue = model_class.load_catalogue(inputs, scales=scales)
        if not model_class.trains_by_gradient:  # fitted in one pass, by one worker
            rank, world = 0, 1
        since = last.learned.get("since", 0) if last else trained_until(initial, fit)
        new = NewExamples(since, fit.replay_fraction, fit.seed)
        train, val = load_datasets(model_class, config, catalogue, new, rank, world)
        if not len(train):
            newer = f" newer than the training of {init or 'this run'}" if since else ""
            raise UserError(f"{inputs.sequences} has no train request{newer}")
        torch.manual_seed(fit.seed)
        module = model_class(config, catalogue).to(device)
        messages = []
        if initial and init:
            changes = load_extended_weights(
                module, init, initial, catalogue.num_items, trains=True
            )
            messages += [f"weights of {init}", *changes, *scale_messages]
        messages += module.prepare_training(catalogue, {"train": train, "val": val})
        progress_unit = ProgressUnit(train.num_learned / len(train), train.learned_unit)
        # After `prepare_training`: the teacher's outputs cover all examples, as other
        # runs share them.
        if fit.train_examples:
            train.keep_random(fit.train_examples)
        size = train.cache_bytes / 2**20
        messages.append(
            f"decoded tables: {size:,.1f} MiB in the cache {cache_folder()}"
        )
        device = torch.device(device)
        pad_to_buckets = uses_cuda_graphs(fit, device, world)
        return cls(
            model=module,
            catalogue=catalogue,
            train=Batches(train, fit.batch_size, fit.seed, pad_to_buckets),
            val=val,
            fit=fit,
            device=device,
            world=world,
            until=catalogue.versions["sequences"].info.split.val_start_ms or None,
            messages=messages,
            progress_unit=progress_unit,
        )

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config

    def validate(self, model: nn.Module) -> tuple[Sums, int]:
        """Measure the model on this rank's validation examples.

        Returns:
            The sums of the metrics, and the number of examples.
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
        return result.sums, result.num_examples

    def fit_in_one_pass(self) -> None:
        """Fit a model that is not trained by gradient, in one pass over its batches.

        A model with early stopping also reads the validation batches.
        """
        model: Any = self.model
        if self.model.stops_early:
            model.fit_in_one_pass(self.train(0, 0), self._validation_batches())
        else:
            model.fit_in_one_pass(self.train(0, 0))

    def _validation_batches(self) -> Iterator[Batch]:
        """Yield the validation batches on the model's device."""
        batches = self.val.evaluation_batches(
            self.fit.eval_batch_size, self.fit.eval_examples
        )
        for rows in batches:
            yield self.val.collate(rows).to(self.device)

    def means(self, sums: Sums) -> dict[str, float]:
        """Return the metrics from the sums of all ranks."""
        return self.model.metric_means(sums)

    def check_metric(self) -> None:
        """Check that `fit.metric` is defined on the validation split.

        Whether a metric is defined depends on labels alone, so constant scores are
        measured. A collective call.
        """
        if self.model.has_own_metrics:  # the metric may not depend on scores
            return
        constant = ConstantScores(self.model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other metrics may be undefined
            run_validation(constant, self.validate, self.means, self.fit, self.world)

    @property
    def lr_multipliers(self) -> dict[str, float]:
        """Factors on the learning rate, by prefix of parameter names."""
        return self.model.lr_multipliers()

    def checkpoint(self, **fields: Any) -> Checkpoint:
        """Describe a checkpoint of this run.

        Args:
            fields: Fields of the checkpoint that change during a run, such as `step`.
        """
        return Checkpoint(
            model=self.model.config_to_dict(self.config),
            fit=vars(self.fit).copy(),
            hashes=dict(self.catalogue.hashes),
            learned=self.learned,
            **fields,
        )

    @cached_property
    def learned(self) -> dict[str, Any]:
        """Values other than weights that are learned from the tables (`Checkpoint`)."""
        new_examples = self.train.dataset.new_examples
        return {
            "scales": self.catalogue.scales(),
            "names": collect_row_names(self.model),
            "until": self.until,
            "since": new_examples.since if new_examples else 0,
        }

    def resume(self, folder: str, metadata: Checkpoint) -> dict[str, Any] | None:
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
        has_ended = metadata.epoch == metadata.fit["max_epochs"]
        if has_ended and metadata.epoch < self.fit.max_epochs:
            state["position"]["stopped"] = False
        return state


class ConstantScores(nn.Module):
    """A model that scores every candidate 0 and recommends only item 0.

    Metrics are defined on the same examples as the metrics of another model.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model_class = type(model)
        self.labels, self.masks = model.labels, model.masks
        self.train_rates, self.correction = model.train_rates, model.correction
        self.reads_position = False

    def measure(self, batch: Any, **options: Any) -> dict[str, Any]:
        """Return the sums of the other model's metrics for constant scores."""
        return self.model_class.measure(self, batch, **options)  # type: ignore[arg-type]

    def score(self, batch: Any) -> Tensor:
        """Return (N, K) zeros."""
        count = int(batch.candidate_valid.sum())
        return torch.zeros(count, len(self.labels), device=batch.device)

    def recommend(self, batch: Any, k: int, **options: Any) -> tuple[Tensor, Tensor]:
        """Return (B, k) items and (B, k) scores, which are all 0."""
        items = torch.zeros(batch.num_rows, k, dtype=torch.long, device=batch.device)
        return items, items.float()


def choose_scales(
    last: Checkpoint | None, initial: Checkpoint | None, inputs: Inputs
) -> tuple[dict[str, Any] | None, list[str]]:
    """Choose the scales with which features are read.

    Args:
        last: Last checkpoint of the run to resume, which has the scales of the run.
        initial: Checkpoint from which a new run starts, whose scales are adopted.
        inputs: Folders of the tables.

    Returns:
        The scales, or None to use the scales of the tables; and warnings about shifted
        features.
    """
    if last:
        return last.learned.get("scales"), []
    if initial is None or "scales" not in initial.learned:
        return None, []
    info = open_table(inputs.sequences, SequencesInfo).info
    return adopt_scales(initial.learned["scales"], info.custom)


def resolve_training(
    config: Any, fit: FitConfig, inputs: Inputs, init: str | None = None
) -> tuple[Any, Inputs]:
    """Resolve the config of a model, and check the checkpoint of the option --init.

    Args:
        config: Config of the model.
        fit: Options of the training loop.
        inputs: Folders of the tables.
        init: URI of a checkpoint from whose weights a new run starts.

    Returns:
        The config with values from checkpoints that it names, such as the sizes of a
        teacher; and the folders that the model reads.
    """
    model_class = registry.find(config.name)
    catalogue = load_catalogue(model_class.name, inputs)
    if init:
        initial = checkpoint.read(init)
        check_init(initial, init, catalogue.versions, model_class, fit)
    resolved = model_class.resolve_config(config, catalogue)
    return resolved, inputs.select(model_class.name, model_class.extra_inputs)


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


def trained_until(initial: Checkpoint | None, fit: FitConfig) -> int:
    """Return the time in ms from which all training examples are used.

    Of older examples, only a fraction `fit.replay_fraction` is used. The time is the
    end of the training of the --init checkpoint, or 0 to use all examples.

    Args:
        initial: The --init checkpoint, if given.
        fit: Options of the training loop.
    """
    if initial is None or fit.replay_fraction == 1:
        return 0
    return int(initial.learned["until"])


def load_datasets(
    model_class: type[Model],
    config: Any,
    catalogue: Any,
    new: NewExamples,
    rank: int,
    world: int,
) -> tuple[RequestDataset, RequestDataset]:
    """Load the training and the validation dataset of this worker.

    Args:
        model_class: Class of the model.
        config: Config of the model.
        catalogue: Catalogue of the model.
        new: Selection of the training examples.
        rank: Rank of this worker.
        world: Number of workers.
    """
    dataset_class = model_class.dataset_class
    sequences = catalogue.versions["sequences"]
    common: dict[str, Any] = {
        "max_history": config.max_history,
        "rank": rank,
        "world": world,
        **dataset_class.dataset_options(config, catalogue),
    }
    train = dataset_class.load(
        sequences,
        "train",
        unit=model_class.example_unit,
        new=new,
        **common,
    )
    val = dataset_class.load(sequences, "val", unit=model_class.eval_unit, **common)
    return train, val


def check_fit(fit: FitConfig, model_class: type[Model], catalogue: Any) -> None:
    """Check that a model has the metric and the options of validation.

    Args:
        fit: Options of the training.
        model_class: Class of the model.
        catalogue: Catalogue of the model, whose labels are part of the metrics' names.
    """
    check_known([fit.metric], model_class.metric_names(catalogue), "fit.metric")
    if model_class.options_class:
        build(model_class.options_class, fit.eval_options, "fit.eval_options.")
    else:
        check_known(fit.eval_options, [], "fit.eval_options")
