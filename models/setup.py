"""One training or evaluation put together from a config: model, batches and validation, PyTorch only.

Used by `python -m models.train` and by the workers of `pipelines/training` alike, so both train the same.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models import checkpoint, registry
from models.by_user import ByUser
from models.carry import carry, names_of
from models.checkpoint import (
    Checkpoint,
    check,
    load_state,
    load_weights,
    local,
)
from models.config import hint
from models.examples import Sharded, plan
from models.fit import (
    REQUESTS,
    Counted,
    FitConfig,
    Sums,
    ValidationStopped,
    captures,
    reduce,
    to_device,
    validation,
)
from models.inputs import Inputs
from models.own_features import adopt_scales
from models.ranking_metrics import Histogram
from models.shares import Share, shards_of
from models.tables import (
    UserError,
    code_version,
    family_of,
    join,
    read_manifest,
)


@dataclass
class Batches:
    """A worker's share of the train split, as `fit` takes it."""

    examples: Sharded
    """The family's examples of the train split, of the shards that this rank holds."""
    batch_size: int
    """Rows per batch of all workers together."""
    seed: int
    """Seed of the order."""
    few_shapes: bool = False
    """Whether batches come in few shapes, for which a GPU has its kernels in graphs."""

    def steps(self, epoch: int) -> int:
        return self.examples.steps(self.batch_size)

    def __call__(self, epoch: int, skip: int) -> Iterator[dict[str, Tensor]]:
        return self.examples.epoch(
            self.batch_size,
            seed=self.seed,
            epoch=epoch,
            skip=skip,
            few_shapes=self.few_shapes,
        )


@dataclass
class Setup:
    """What a run works on."""

    entry: registry.Entry
    """The model's row of the registry."""
    config: Any
    """The model's config."""
    catalogue: Any
    """What the model is built on."""
    model: nn.Module
    """The model, on its device, freshly initialised from the seed."""
    train: Batches
    """Training data of this rank."""
    val: Sharded
    """Examples of the validation split, of the shards that this rank holds."""
    fit: FitConfig
    """How it is trained."""
    device: torch.device
    """Where the model is."""
    world: int
    """Number of workers."""
    until: int | None = None
    """Time in ms up to which requests are trained on, where the split is by time."""
    notes: list[str] = field(default_factory=list)
    """What was worked out once before training, in a line each."""
    counted: Counted = REQUESTS
    """The unit in which progress is shown."""
    stopping: Callable[[], bool] = lambda: False
    """Return whether the run is to stop; asked before every batch of a validation."""

    def validate(self, model: nn.Module) -> tuple[Sums, int]:
        """Sums of the metrics over this rank's validation rows, and their number."""
        sums, count, _ = score(
            model,
            self.entry.measured.measure,
            self.val,
            batch_size=self.fit.eval_batch_size,
            device=self.device,
            limit=self.fit.eval_examples,
            options=self.fit.eval_options,
            stopping=self.stopping,
        )
        return sums, count

    def fit_counts(self) -> None:
        """Fit a model without gradients in one pass over its training batches.

        A model with early stopping reads the validation batches too.
        """
        model: Any = self.model
        if self.entry.early_stopping:
            model.fit_counts(self.train(0, 0), self._validation_batches())
        else:
            model.fit_counts(self.train(0, 0))

    def _validation_batches(self) -> Iterator[dict[str, Tensor]]:
        rows = self.val.chosen(self.fit.eval_examples)
        for batch_rows in self.val.bounded(rows, self.fit.eval_batch_size):
            yield to_device(self.val.collate(batch_rows), self.device)

    def means(self, sums: Sums) -> dict[str, float]:
        """Metrics from the sums of all ranks."""
        return self.entry.measured.means(sums)

    def check_metric(self) -> None:
        """Raise UserError where `fit.metric` has no value on the validation split, whatever the model ranks.

        Labels alone decide that, so a model whose scores are all 0 is measured. All ranks have to call it.
        """
        if self.entry.own_measured:  # a metric of the model itself, such as its loss
            return
        constant = with_constant_scores(self.model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other metrics may be undefined
            validation(
                constant, self.validate, self.means, self.fit, self.device, self.world
            )

    @property
    def lr_multipliers(self) -> dict[str, float]:
        """Factors on the learning rate, by the beginning of parameters' names."""
        return self.entry.lr_multipliers(self.config)

    def checkpoint(self, **fields: Any) -> Checkpoint:
        """`config.json` of a checkpoint of this run, with `fields` filled in."""
        examples = self.train.examples
        return Checkpoint(
            model=registry.config_to_dict(self.config),
            fit=vars(self.fit).copy(),
            hashes=dict(self.catalogue.hashes),
            shards=[examples.share.shards, examples.buffers],
            learned=self.learned,
            code=code_version(),
            **fields,
        )

    @cached_property
    def learned(self) -> dict[str, Any]:
        """What a checkpoint knows beside weights."""
        scales, names = self.catalogue.scales(), names_of(self.model)
        return {
            "scales": scales,
            "names": names,
            "until": self.until,
            "since": self.train.examples.since,
        }

    def resume(self, folder: str, about: Checkpoint) -> dict[str, Any] | None:
        """Loads the checkpoint `about` of the run in `folder`; the state that `fit` goes on from, where there is one.
        UserError where it is of another model or of other tables."""
        uri = join(folder, about.folder)
        check(
            about,
            uri,
            self.catalogue.hashes,
            registry.config_to_dict(self.config)["name"],
        )
        with local(uri) as copy:
            load_weights(self.model, copy)
            if not self.entry.gradient:
                return None
            state = load_state(copy)
        if (
            about.epoch == about.fit["max_epochs"] < self.fit.max_epochs
        ):  # it had ended, and is to go on
            state["cursor"]["stopped"] = False
        return state


def with_constant_scores(model: nn.Module) -> Any:
    """Return the model with the score 0 for all candidates, and with the first item in all places of a ranking."""
    constant: Any = copy.copy(model)

    def score(batch: dict[str, Tensor], **options: Any) -> Tensor:
        valid = batch.get("candidate_valid")  # of actions
        count = len(batch["labels"]) if valid is None else int(valid.sum())
        return torch.zeros(count, len(constant.labels), device=batch_device(batch))

    def recommend(batch: dict[str, Tensor], k: int, **options: Any) -> Any:
        items = torch.zeros(
            len(batch["history"]), k, dtype=torch.long, device=batch_device(batch)
        )
        return items, items.float()

    constant.score, constant.recommend = score, recommend
    return constant


def batch_device(batch: dict[str, Tensor]) -> torch.device:
    """Return the device of a batch."""
    return next(iter(batch.values())).device


def inputs_of(name: str, inputs: Inputs) -> Inputs:
    """What the model reads. UserError where the tables are of another family, with the models that fit, and where it
    needs another folder and none is given."""
    entry, found = (
        registry.find(name),
        family_of(read_manifest(inputs.sequences, "sequences")),
    )
    if found != (family := entry.family.name):
        fit = (
            ", ".join(
                other
                for other, one in registry.MODELS.items()
                if one.family.name == found
            )
            or "none"
        )
        raise UserError(
            f"the model '{name}' is of {family}, and {inputs.tables} holds tables of {found}; models of {found} are "
            f"{fit}: give a config of one (jobs/configs), or tables that jobs.prepare made with --kind {family}"
        )
    return inputs.of(name, entry.reads)


def load_catalogue(name: str, inputs: Inputs, about: Checkpoint | None = None) -> Any:
    """The catalogue of a model, with the scales of a checkpoint where one is given; UserError as of `inputs_of`."""
    scales = about.learned.get("scales") if about else None
    return registry.find(name).family.catalogue(inputs_of(name, inputs), scales=scales)


def hashes_of(name: str, inputs: Inputs) -> dict[str, str]:
    """Hashes of what the catalogue comes from, without loading it; UserError as of `inputs_of`."""
    return registry.find(name).family.hashes(inputs_of(name, inputs))


@dataclass(frozen=True)
class Loaded:
    """A checkpoint, ready to be looked at."""

    about: Checkpoint
    """What it says of itself."""
    entry: registry.Entry
    """The model's row of the registry."""
    config: Any
    """The model's config."""
    model: Any
    """The model, in evaluation mode, on its device."""
    catalogue: Any
    """What it is built on."""

    @classmethod
    def of(cls, uri: str, inputs: Inputs, device: torch.device | str = "cpu") -> Self:
        """Of the checkpoint at `uri`, and tables that may extend its own; a model that ranks a catalogue takes another
        log of the same items too."""
        about = checkpoint.read(uri)
        catalogue = load_catalogue(about.name, inputs, about)
        trained = replace(catalogue, hashes=of_training(catalogue.hashes, about))
        config, model = (
            registry.config_from_dict(about.model),
            registry.load(uri, trained)[0].to(device),
        )
        return cls(about, registry.find(about.name), config, model, catalogue)

    def examples(
        self, inputs: Inputs, split: str, max_history: int | None = None, **share: Any
    ) -> Any:
        """Those of a split, with as much history as the model reads."""
        kind, longest = (
            self.entry.family,
            self.config.max_history if max_history is None else max_history,
        )
        of_model = kind.examples.of_model(self.config)
        return of_model.load(
            inputs.sequences, split, unit=kind.eval_unit, max_history=longest, **share
        )


def of_training(hashes: dict[str, str], about: Checkpoint) -> dict[str, str]:
    """The hashes of tables, as those of the training where only the log is another one: a model that ranks a catalogue
    takes a fresh log of the same items. Others are for `checkpoint.check` to refuse."""
    trained = about.hashes.get("sequences")
    same = (
        trained
        and registry.find(about.name).recommends
        and hashes.get("items") == about.hashes.get("items")
    )
    return {**hashes, "sequences": str(trained)} if same else hashes


def set_up(
    model: dict[str, Any],
    fit: FitConfig,
    inputs: Inputs,
    *,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world: int = 1,
    goes_on: Checkpoint | None = None,
    init: str | None = None,
) -> Setup:
    """Reads the tables and builds the model that `model` (its `name` and fields) names. `goes_on` is what the run that
    goes on has said last; another one begins with the weights of the checkpoint `init`, where one is given."""
    entry = registry.find(model["name"])
    first = None if goes_on or not init else checkpoint.read(init)
    scales, warnings = scales_of(goes_on, first, inputs)
    catalogue = entry.family.catalogue(inputs_of(model["name"], inputs), scales=scales)
    check_batch(fit, world)
    device = torch.device(device)
    config = registry.resolve(registry.config_from_dict(model), catalogue)
    sequences = inputs.sequences
    if not entry.gradient:  # counted in one pass, by one worker
        rank, world = 0, 1
    since = goes_on.learned.get("since", 0) if goes_on else since_of(first, fit)
    train, val = read_share(
        entry,
        sequences,
        fit,
        config,
        rank,
        world,
        goes_on.shards if goes_on else None,
        since,
    )
    examples: dict[str, Any] = {"train": train, "val": val}
    if world > 1 and train.share.shards > 1:
        for part in (train, val):
            part.agree(lambda rows: reduce(rows, world, device, dist.ReduceOp.MAX))
    if since and not train.rows_per_buffer.any():
        raise UserError(
            f"nothing is newer than what {init or 'it'} was trained on; wait for more days, or raise fit.replay"
        )
    if not train.rows_per_buffer.any():
        raise UserError(
            f"{sequences} has no train request with a history; check the split of jobs.prepare"
        )
    catalogue = entry.family.trim_catalogue(catalogue, examples.values(), config)
    torch.manual_seed(fit.seed)
    module = registry.build(config, catalogue).to(device)
    notes = []
    if first and init:
        check_init(first, init, catalogue.hashes, model["name"])
        carried = carry(module, init, first, catalogue.num_items, learns=True)
        notes = [f"weights of {init}", *carried, *warnings]
    entry.teach(module, config, catalogue)
    notes += entry.precompute(module, config, catalogue, examples)
    counted = Counted(train.learned_per_row(), train.learned_unit)
    if (
        fit.train_examples
    ):  # after the teacher's outputs, which runs on other examples share
        train.limit_to(fit.train_examples)
    batches = Batches(train, fit.batch_size, fit.seed, captures(fit, device, world))
    notes += train.notes()
    until = (
        read_manifest(sequences, "sequences").info.get("split", {}).get("val_start_ms")
    )
    return Setup(
        entry,
        config,
        catalogue,
        module,
        batches,
        val,
        fit,
        device,
        world,
        until,
        notes,
        counted,
    )


def scales_of(
    goes_on: Checkpoint | None, first: Checkpoint | None, inputs: Inputs
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the scales of a run that goes on, or of one that begins with the weights of `first`, and warnings."""
    if goes_on:
        return goes_on.learned.get("scales"), []
    if first is None or "scales" not in first.learned:
        return None, []
    info = read_manifest(inputs.sequences, "sequences").info
    return adopt_scales(first.learned["scales"], info)


def check_init(first: Checkpoint, init: str, hashes: dict[str, str], name: str) -> None:
    """UserError where a model `name` on tables of these hashes cannot begin with the checkpoint `init`."""
    if not registry.find(name).gradient:
        raise UserError(
            f"'{name}' is not trained by steps, so it goes on from nothing; leave out --init"
        )
    checkpoint.check(first, init, hashes, name, extending=True)


def since_of(first: Checkpoint | None, fit: FitConfig) -> int:
    """Time in ms up to which the model of `first` was trained on requests, of which `fit.replay` leaves a share; 0: all
    are trained on."""
    if fit.replay == 1:
        return 0
    if first is None:
        raise UserError(
            f"fit.replay is {fit.replay:g}, but no model is given to go on from; add --init, or leave it out"
        )
    if not (until := first.learned.get("until")):
        raise UserError(
            f"fit.replay is {fit.replay:g}, but the model of --init was not trained up to a time; leave it out, or "
            f"prepare its tables with a split by time"
        )
    return int(until)


def read_share(
    entry: registry.Entry,
    sequences: str,
    fit: FitConfig,
    config: Any,
    rank: int,
    world: int,
    shards: Sequence[int] | None = None,
    since: int = 0,
) -> tuple[Sharded, Sharded]:
    """This rank's examples of training and of validation. The order of training depends on the number of shards and of
    buffers, so a run that goes on keeps it (`shards`); of a new one it is found by the table and the memory budget."""
    family, manifest = (
        entry.family.examples.of_model(config),
        read_manifest(sequences, "sequences"),
    )
    if since:
        family = type(
            family.__name__,
            (family,),
            {"since": since, "replay": fit.replay, "seed": fit.seed},
        )
    number, buffers = shards or check_budget(entry, fit, sequences, config, world)
    # buffers are of about equally many parts
    sizes = np.array([part.bytes if buffers == 1 else 1 for part in manifest.files])
    share = Share.of(sizes, number, rank, world)
    units = {"train": entry.unit, "val": entry.family.eval_unit}
    examples = family.load_share(sequences, units, config.max_history, share, buffers)
    return examples["train"], examples["val"]


def score(
    model: Any,
    measure: Callable[..., Sums],
    examples: Sharded,
    *,
    batch_size: int,
    device: torch.device,
    limit: int = 0,
    options: dict[str, Any] | None = None,
    stopping: Callable[[], bool] = lambda: False,
    user_stride: int = 1,
) -> tuple[Sums, int, float]:
    """Measures the model on the examples' rows, in float32: bfloat16 ties scores that are close, and swaps them.

    Returns the sums of the metrics, the number of rows, and the seconds spent in measuring. With `limit` it takes
    its part of that many rows of all workers, evenly spread over the lengths of their histories. `options` go to
    `measure`. Only the rows of every `user_stride`-th user of the table are measured. Raises ValidationStopped as soon
    as `stopping()` is true between two batches.
    """
    sums: Sums = {}
    count, seconds = 0, 0.0
    model.eval()
    chosen = examples.of_users(examples.chosen(limit), user_stride)
    for rows in examples.bounded(chosen, batch_size):
        if stopping():
            raise ValidationStopped
        batch = to_device(examples.collate(rows), device)
        began = time.perf_counter()
        with torch.no_grad():
            part = measure(model, batch, **(options or {}))
        for name, value in part.items():
            number = (
                value
                if isinstance(value, (Histogram, ByUser))
                else torch.as_tensor(value, dtype=torch.float64)
            )
            sums[name] = sums.get(name, 0.0) + number.cpu()  # waits for the device
        seconds += time.perf_counter() - began
        count += len(rows)
    return sums, count, seconds


def check_fit(fit: FitConfig, name: str, catalogue: Any, world: int) -> None:
    """Refuses what can be known to fail before a step is taken: how batches are shared out, the metric, and options
    of the validation that the model `name` does not have. UserError with the nearest name."""
    check_batch(fit, world)
    known = registry.find(name).measured.names(catalogue)
    if fit.metric not in known:
        raise UserError(
            f"fit.metric is '{fit.metric}', which the model '{name}' does not measure; "
            f"{hint(fit.metric, known)}; known are {', '.join(known)}"
        )
    options = registry.recommend_options(name)
    for key in fit.eval_options:
        if key not in options:
            what = (
                f"{hint(key, options)}; it takes {', '.join(options)}"
                if options
                else "it has none"
            )
            raise UserError(
                f"fit.eval_options has '{key}', which is no option of '{name}' when recommending; {what}"
            )


def check_budget(
    entry: registry.Entry, fit: FitConfig, sequences: str, config: Any, world: int
) -> tuple[int, int]:
    """Shards of the training table and buffers of each; UserError for a memory budget below the least."""
    family = entry.family.examples.of_model(config)
    shards = shards_of(
        read_manifest(sequences, "sequences"), fit.shard_mb, fit.batch_size
    )
    budget = fit.memory_budget_gb * 2**30
    return plan(
        family,
        sequences,
        entry.unit,
        config.max_history,
        shards=shards,
        budget=budget,
        world=world,
    )


def check_batch(fit: FitConfig, world: int) -> None:
    """Raises UserError where `world` workers cannot have equal parts of a batch."""
    if fit.batch_size % world:
        raise UserError(
            f"fit.batch_size {fit.batch_size} does not divide by {world} workers; choose a multiple of {world}"
        )
