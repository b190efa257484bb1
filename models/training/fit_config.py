"""Options of the training loop, without PyTorch, so that a command line is parsed before it is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from models.config import check_choices, check_least, check_shares


@dataclass
class FitConfig:
    """Options of the training loop."""

    optimizer: Literal["adamw", "adagrad"] = "adamw"
    """AdamW, or Adagrad as search models are published with (Sec. 4.1 of QGS: lr 0.01,
    batch 100)."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.05
    """Weight decay on all parameters: decoupled in AdamW, added to the gradient in
    Adagrad."""
    warmup_steps: int = 10_000
    """Steps in which the learning rate rises linearly to `lr` (10,000 in TIGER's
    published set-up)."""
    warmup_share: float = 0.1
    """Largest share of all planned steps that the warm-up takes, so that small data
    gets a short one."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the warm-up: it decays to 0 along a half cosine by the last
    planned step, or is constant."""
    batch_size: int = 256
    """Examples per step, over all workers together: requests or users, by the model's
    unit."""
    eval_batch_size: int = 256
    """Requests per validation batch and worker."""
    max_epochs: int = 150
    """Largest number of passes over the training data; also fixes the length of the
    schedule."""
    patience: int = 20
    """Stop after this many validations (not epochs) in a row without a better `metric`;
    0 never stops early."""
    eval_every_epochs: int = 1
    """Epochs between validations; the last epoch is always validated."""
    eval_every_steps: int = 0
    """Steps between validations within an epoch, for long epochs; 0: at the ends of
    epochs alone."""
    train_examples: int = 0
    """Number of examples to train on, drawn once and the same in every epoch; 0 takes
    all."""
    replay_fraction: float = 1.0
    """Fraction of the examples that the model of --init was trained on to train on
    again, beside all newer examples; drawn once, the same in every epoch."""
    eval_examples: int = 0
    """Largest number of requests to validate on, the same ones each time; 0 takes
    all."""
    eval_options: dict[str, Any] = field(default_factory=dict)
    """Options of the model's `recommend` in validation, such as `beam: 20` for
    TIGER."""
    metric: str = "ndcg@10"
    """Validation metric, larger is better, that picks the best checkpoint and stops the
    run."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient; 0 does not clip."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """On one GPU a step is captured as a CUDA graph once per shape of its batches and
    replayed (auto), or not (off). Auto pads batches to few shapes, so that dropout
    draws other numbers."""
    compile: bool = False
    """Whether torch.compile fuses the model's kernels on a GPU, at half a minute per
    shape of its batches; results differ by rounding."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Autocast of training to bfloat16, or not; auto: bf16 on a GPU that has it, fp32
    elsewhere. Validation is fp32."""
    seed: int = 0
    """Seed of weights, order of batches and dropout."""
    log_every_steps: int = 50
    """Steps between step events."""
    checkpoint_every_steps: int = 0
    """Steps between checkpoints within an epoch, for long epochs; 0: at the ends of
    epochs alone."""

    def __post_init__(self) -> None:
        positive = (
            "batch_size",
            "eval_batch_size",
            "max_epochs",
            "eval_every_epochs",
            "log_every_steps",
        )
        check_least(self, positive, 1, "fit.")
        steps = (
            "warmup_steps",
            "checkpoint_every_steps",
            "eval_every_steps",
            "patience",
        )
        check_least(self, (*steps, "train_examples", "eval_examples"), 0, "fit.")
        check_least(self, ("weight_decay", "clip_norm"), 0, "fit.")
        if isinstance(self.eval_options, str) or not all(
            isinstance(key, str) for key in self.eval_options
        ):
            raise ValueError(
                f"fit.eval_options is {self.eval_options!r}, it must be a mapping such as {{beam: 20}}"
            )
        if not self.lr > 0:
            raise ValueError(f"fit.lr is {self.lr}, it must be above 0; try 0.001")
        check_shares(self, ["warmup_share", "replay_fraction"], "fit.")
        check_choices(self, "fit.")


def check_replay(fit: FitConfig, init: str | None) -> None:
    """Raise ValueError if old requests are left out, and no model is given that was trained on them."""
    if fit.replay_fraction < 1 and not init:
        raise ValueError(
            f"fit.replay_fraction is {fit.replay_fraction:g}, but no model is given to go on from; add --init, or leave it out"
        )
