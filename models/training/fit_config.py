"""Options of the training loop.

This module does not import PyTorch, so that command lines are parsed quickly.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from core.options import STRICT, Fraction, Free, Seed
from models.own_code import MetricName


@dataclass(config=STRICT)
class FitConfig:
    """Options of the training loop."""

    optimizer: Literal["adamw", "adagrad"] = "adamw"
    """AdamW, or Adagrad, with which search models are published (Sec. 4.1 of QGS:
    lr 0.01, batch 100)."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.05
    """Weight decay on all parameters: decoupled in AdamW, added to the gradient in
    Adagrad."""
    warmup_steps: NonNegativeInt = 10_000
    """Steps of the warm-up, in which the learning rate rises linearly to `lr` (10,000
    in TIGER's published set-up)."""
    warmup_share: Fraction = 0.1
    """Upper limit of the warm-up as a fraction of all planned steps, for small
    datasets."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the warm-up: it decays to 0 along a half cosine by the last
    planned step, or is constant."""
    batch_size: PositiveInt = 256
    """Examples per step, all workers together. An example is a request or a user,
    depending on the model."""
    eval_batch_size: PositiveInt = 256
    """Requests per validation batch and worker."""
    max_epochs: PositiveInt = 150
    """Maximum number of passes over the training data; it also sets the length of the
    learning rate schedule."""
    patience: NonNegativeInt = 20
    """Number of validations (not epochs) in a row without a better `metric` after which
    training stops early; 0 disables early stopping."""
    eval_every_epochs: PositiveInt = 1
    """Epochs between validations; the last epoch is always validated."""
    replay_fraction: Fraction = 1.0
    """Fraction of the training examples of the --init checkpoint to train on again,
    in addition to all newer examples; sampled once and used in every epoch."""
    eval_examples: NonNegativeInt = 0
    """Maximum number of validation requests, the same in every validation; 0 uses all
    requests."""
    eval_options: dict[str, Free] = field(default_factory=dict)
    """Options of the model's `recommend` method in validation, such as `beam: 20` for
    TIGER."""
    metric: MetricName = "ndcg@10"
    """Validation metric, larger is better, or FILE.py:CLASS of one; it selects the best
    checkpoint and decides on early stopping."""
    clip_norm: NonNegativeFloat = 1.0
    """Maximum global norm of the gradient; 0 disables clipping."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """Whether steps on one GPU are captured as CUDA graphs, once per batch shape, and
    replayed (auto), or not (off). With auto, batches are padded to few shapes, which
    changes the random numbers of dropout."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of training: bf16 autocast or fp32. Auto is bf16 on GPUs that support
    it, and fp32 elsewhere. Validation always runs in fp32."""
    seed: Seed = 0
    """Random seed of the initial weights, the order of batches and dropout."""
    log_every_steps: PositiveInt = 50
    """Steps between logged training losses."""
    checkpoint_every_steps: NonNegativeInt = 0
    """Steps between checkpoints within an epoch; 0 saves them at the end of epochs, and
    every `checkpoint_every_minutes`."""
    checkpoint_every_minutes: NonNegativeFloat = 5
    """Minutes after which the next logged step is also saved in a checkpoint, so that a
    lost process costs no more; 0 saves none."""


def check_replay(fit: FitConfig, init: str | None) -> None:
    """Raise ValueError if old examples are dropped without an --init checkpoint.

    Args:
        fit: Options of the training loop.
        init: Checkpoint of the option --init, if given.
    """
    if fit.replay_fraction < 1 and not init:
        raise ValueError(
            f"fit.replay_fraction is {fit.replay_fraction:g}, but there is no "
            "checkpoint to continue from"
        )
