"""One training or evaluation put together from a config: model, batches and validation, PyTorch only.

Used by `python -m models.train` and by the workers of `pipelines/training` alike, so both train the same.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from models import registry
from models.config import hint
from models.dataset.columns import cache_folder
from models.dataset.dataset import NewExamples, RequestDataset
from models.metrics.per_user_metrics import ByUser
from models.metrics.ranking_metrics import Histogram
from models.own_features import adopt_scales
from models.storage import checkpoint
from models.storage.checkpoint import (
    Checkpoint,
    check,
    load_state,
    load_weights,
    local,
)
from models.storage.inputs import Inputs
from models.storage.tables import (
    UserError,
    code_version,
    family_of,
    join,
    read_manifest,
)
from models.training.fit import (
    REQUESTS,
    Counted,
    FitConfig,
    Sums,
    ValidationStopped,
    captures,
    to_device,
    validation,
)
from models.warm_start import carry, names_of


@dataclass
class Batches:
    """A worker's share of the batches of the train split, as `fit` takes them."""

    dataset: RequestDataset
    """Examples of the train split."""
    batch_size: int
    """Weight of a batch of all workers together, such as its number of requests."""
    seed: int
    """Seed of the order."""
    pad_to_buckets: bool = False
    """Whether batches come in few shapes, as CUDA graphs need them."""

    def steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        return self.dataset.num_steps(self.batch_size)

    def __call__(self, epoch: int, skip: int) -> Iterator[dict[str, Tensor]]:
        return self.dataset.epoch(
            self.batch_size,
            seed=self.seed,
            epoch=epoch,
            skip=skip,
            pad_to_buckets=self.pad_to_buckets,
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
    """Training batches of this rank."""
    val: RequestDataset
    """Examples of the validation split."""
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
        batches = self.val.evaluation_batches(
            self.fit.eval_batch_size, self.fit.eval_examples
        )
        for rows in batches:
            yield to_device(self.val.collate(rows), self.device)

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
        return Checkpoint(
            model=registry.config_to_dict(self.config),
            fit=vars(self.fit).copy(),
            hashes=dict(self.catalogue.hashes),
            learned=self.learned,
            code=code_version(),
            **fields,
        )

    @cached_property
    def learned(self) -> dict[str, Any]:
        """What a checkpoint knows beside weights."""
        new = self.train.dataset.new
        return {
            "scales": self.catalogue.scales(),
            "names": names_of(self.model),
            "until": self.until,
            "since": new.since if new else 0,
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
        self,
        inputs: Inputs,
        split: str,
        max_history: int | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> Any:
        """Load the examples of one split, with histories of at most `config.max_history` behaviours.

        Args:
            inputs: Where the tables are.
            split: The split.
            max_history: Behaviours of a history at most, in place of the config's.
            rank: Number of this worker, which evaluates its part of the users.
            world: Number of workers.
        """
        family = self.entry.family
        longest = self.config.max_history if max_history is None else max_history
        return family.dataset.load(
            inputs.sequences,
            split,
            unit=family.eval_unit,
            max_history=longest,
            rank=rank,
            world=world,
            **family.dataset.dataset_options(self.config),
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
    train, val = load_datasets(entry, sequences, fit, config, since, rank, world)
    examples: dict[str, Any] = {"train": train, "val": val}
    if since and not len(train):
        raise UserError(
            f"nothing is newer than what {init or 'it'} was trained on; wait for more days, or raise fit.replay"
        )
    if not len(train):
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
        notes += [f"weights of {init}", *carried, *warnings]
    entry.teach(module, config, catalogue)
    notes += entry.precompute(module, config, catalogue, examples)
    counted = Counted(train.num_learned / len(train), train.learned_unit)
    if (
        fit.train_examples
    ):  # after the teacher's outputs, which runs on other examples share
        train.keep_random(fit.train_examples)
    megabytes = train.cache_bytes / 2**20
    notes.append(f"decoded tables: {megabytes:,.1f} MiB in the cache {cache_folder()}")
    batches = Batches(train, fit.batch_size, fit.seed, captures(fit, device, world))
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


def load_datasets(
    entry: registry.Entry,
    sequences: str,
    fit: FitConfig,
    config: Any,
    since: int,
    rank: int,
    world: int,
) -> tuple[RequestDataset, RequestDataset]:
    """Load this worker's datasets of training and validation.

    `since` is the time in ms up to which a model that this one continues was trained; 0 for a new model.
    """
    family = entry.family
    common = {
        "max_history": config.max_history,
        "rank": rank,
        "world": world,
        **family.dataset.dataset_options(config),
    }
    new = NewExamples(since, fit.replay, fit.seed)
    train = family.dataset.load(sequences, "train", unit=entry.unit, new=new, **common)
    val = family.dataset.load(sequences, "val", unit=family.eval_unit, **common)
    return train, val


def score(
    model: Any,
    measure: Callable[..., Sums],
    examples: RequestDataset,
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
    chosen = examples.keep_users(examples.evaluation_rows(limit), user_stride)
    for rows in examples.cut_batches(chosen, batch_size):
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


def check_batch(fit: FitConfig, world: int) -> None:
    """Raises UserError where `world` workers cannot have equal parts of a batch."""
    if fit.batch_size % world:
        raise UserError(
            f"fit.batch_size {fit.batch_size} does not divide by {world} workers; choose a multiple of {world}"
        )
