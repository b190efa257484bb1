r"""SID-MLP++ (Guo et al., 2026, Sec. 3.5): SID-MLP with an encoder of MLPs.

    python -m jobs.train --config jobs/configs/retrieval/sid_mlp_pp_encoder.yaml \
        --tables TABLES --sids SIDS --storage runs --name encoder \
        --model.teacher runs/tiger
    python -m jobs.train --config jobs/configs/retrieval/sid_mlp_pp.yaml \
        --tables TABLES --sids SIDS --storage runs --name sid_mlp_pp \
        --model.encoder runs/encoder

Stage 1 (`sid_mlp_pp_encoder`) trains MLPs to match the encoder states of the frozen
teacher by squared error. Stage 2 (`sid_mlp_pp`) freezes the MLPs and trains SID-MLP's
readout and heads on their states by equation 3. The encoder is in `mlp_encoder.py`.

Shapes: `B` requests, `S` tokens of a history, `D` width.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal, Self

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from core.errors import UserError
from core.options import STRICT, CheckpointPath
from models.loaded_model import load_model
from models.model import NoOptions
from models.retrieval.data import Catalogue, HistoryBatch, RequestBatch
from models.retrieval.distillation.teacher import (
    TaughtModel,
    TeacherConfig,
    build_teacher,
    read_checkpoint,
    require_class,
    resolve_teacher,
)
from models.retrieval.retriever import History, Retriever, real_positions
from models.retrieval.sid_mlp.decoder import SidMlpConfig
from models.retrieval.sid_mlp.mlp_encoder import EncoderSizes, MlpBackbone
from models.retrieval.sid_mlp.sid_mlp import SidMlp
from models.retrieval.tiger.tiger import Tiger
from models.training.distributed import global_mean


@dataclass(config=STRICT)
class SidMlpPpEncoderConfig(EncoderSizes, TeacherConfig):
    """Options of stage 1 of SID-MLP++: representation matching."""


class SidMlpPpEncoder(TaughtModel):
    """Stage 1: an encoder that learns the teacher's states and ranks nothing."""

    name = "sid_mlp_pp_encoder"
    config_class = SidMlpPpEncoderConfig
    options_class = NoOptions
    ranks = "nothing"
    not_served = "it ranks nothing"
    config: SidMlpPpEncoderConfig

    def __init__(self, config: SidMlpPpEncoderConfig, catalogue: Catalogue) -> None:
        super().__init__(config, catalogue)
        teacher = require_class(build_teacher(config, catalogue), Tiger)
        self.backbone = MlpBackbone(teacher.backbone, config)
        self._catalogue = catalogue

    def set_teacher(self, teacher: Any) -> None:
        """Copy the teacher's embeddings and last norm, and store the teacher.

        The last norm of a trained TIGER has weights of about 0.2. From 1, AdamW would
        need a thousand steps of 0.001 to reach 0.2, more than a small log has.
        """
        super().set_teacher(teacher)
        self.backbone.embedding.load_state_dict(teacher.backbone.embedding.state_dict())
        encoder = teacher.backbone.encoder
        self.backbone.norm.weight.data.copy_(encoder.final_layer_norm.weight)

    @property
    def teacher(self) -> Retriever:
        """The teacher, loaded from the path in the config at first use."""
        if not self._teacher:
            config = resolve_teacher(self.config, self._catalogue)
            teacher, _ = load_model(config.teacher, self._catalogue)
            TaughtModel.set_teacher(self, teacher)
        return super().teacher

    def match_states(self, batch: RequestBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Compare the encoder's states with the teacher's.

        Returns:
            Errors (B, S, D) and the teacher's states (B, S, D), both 0 at padding, and
            a mask (B, S, 1) of real positions.
        """
        history = self.backbone.encode(batch)
        with torch.no_grad():
            target = self.teacher.encode(batch).states
        states = history.states
        is_real = real_positions(history.lengths, states.shape[1]).unsqueeze(-1)
        target = target.float().masked_fill(~is_real, 0.0)
        return states.float() - target, target, is_real

    def forward(self, batch: RequestBatch) -> dict[str, Tensor]:
        """Return the mean squared error of real tokens' states (Sec. 3.5, stage 1)."""
        error, _, is_real = self.match_states(batch)
        num_tokens = is_real.sum()
        mse = error.square().sum() / (num_tokens * error.shape[-1])
        return {"loss": global_mean(mse, num_tokens)}

    @torch.no_grad()
    def measure(  # type: ignore[override]  # no ranking, so no `shown` and options
        self, batch: RequestBatch, by_user: int = 0
    ) -> dict[str, Tensor]:
        """Return the float64 sums of `metric_means`; `by_user` is ignored."""
        error, target, is_real = (x.double() for x in self.match_states(batch))
        return {
            "examples": target.new_full((), len(target)),
            "tokens": is_real.sum(),
            "squared_error": error.square().sum(),
            "state": target.sum((0, 1)),  # (D,)
            "squared_state": target.square().sum(),
        }

    @classmethod
    def metric_names(cls, catalogue: Catalogue) -> list[str]:
        """Return the names of the metrics of `metric_means`."""
        return list(cls.shown_metrics())

    @classmethod
    def metric_means(cls, sums: dict[str, Tensor]) -> dict[str, float]:
        """Return `mse` per element, `neg_mse` for model selection, and `r2`.

        `r2` is the share of the states' variance that the encoder explains.
        """
        tokens, error = sums["tokens"], sums["squared_error"]
        mse = float(error / (tokens * len(sums["state"])))
        variance = sums["squared_state"] - sums["state"].square().sum() / tokens
        return {"mse": mse, "neg_mse": -mse, "r2": float(1 - error / variance)}

    @classmethod
    def shown_metrics(cls) -> tuple[str, ...]:
        """Return the metrics of the best epoch that are printed after a training."""
        return ("mse", "neg_mse", "r2")

    @classmethod
    def format_metrics(cls, metrics_: dict[str, float]) -> list[str]:
        """Return one line with all metrics."""
        values = (f"{name} {value:.6g}" for name, value in metrics_.items())
        return ["  " + "  ".join(values)]


@dataclass(config=STRICT)
class SidMlpPpConfig(SidMlpConfig, EncoderSizes):
    """Options of stage 2 of SID-MLP++: SID-MLP on the student encoder's states."""

    m: Literal[0] = 0
    """The teacher's decoder cannot read the student's encoder."""
    encoder: CheckpointPath = ""
    """Checkpoint of stage 1 or folder of its finished run, which sets the encoder's
    sizes; used in training only."""
    encoder_hash: str = ""
    """SHA-256 of stage 1's weights file, filled in from its checkpoint."""
    end_to_end: bool = False
    """Whether to skip stage 1 and train the encoder together with readout and heads by
    equation 3 (Table 14, End2End)."""

    def __post_init__(self) -> None:
        SidMlpConfig.__post_init__(self)
        if self.end_to_end and self.encoder:
            raise ValueError(
                f"encoder {self.encoder} and end_to_end cannot be set together, as "
                "end_to_end trains its own encoder"
            )


class SidMlpPp(SidMlp):
    """Stage 2: SID-MLP on the states of the student's encoder."""

    name = "sid_mlp_pp"
    config_class = SidMlpPpConfig
    config: SidMlpPpConfig
    backbone: MlpBackbone

    def __init__(self, config: SidMlpPpConfig, catalogue: Catalogue) -> None:
        super().__init__(config, catalogue)
        self.backbone = MlpBackbone(self.backbone, config)
        self.backbone.requires_grad_(config.end_to_end).embedding.requires_grad_(False)

    @classmethod
    def resolve_config(
        cls, config: SidMlpPpConfig, catalogue: Catalogue
    ) -> SidMlpPpConfig:
        """Return the config with teacher and stage 1 filled in from their checkpoints.

        If no teacher is set, the teacher of stage 1 is used.
        """
        if config.end_to_end:
            return resolve_teacher(config, catalogue)
        uri, stage_1, encoder_hash = read_checkpoint(
            config, "encoder", catalogue, SidMlpPpEncoder.name
        )
        teacher = config.teacher or stage_1.model["teacher"]
        config = resolve_teacher(replace(config, teacher=teacher), catalogue)
        trained_with = stage_1.model["teacher_hash"]
        if trained_with != config.teacher_hash:
            raise UserError(
                f"the encoder {uri} matches another teacher ({trained_with[:12]}) than "
                f"{config.teacher} ({config.teacher_hash[:12]})"
            )
        sizes = {f.name: stage_1.model[f.name] for f in fields(EncoderSizes)}
        return replace(config, encoder=uri, encoder_hash=encoder_hash, **sizes)

    def prepare_training(self, catalogue: Catalogue) -> list[str]:
        """Load the teacher, and the encoder trained in stage 1."""
        messages = super().prepare_training(catalogue)
        if not self.config.end_to_end:
            stage_1: Any = load_model(self.config.encoder, catalogue)[0]
            self.backbone.load_state_dict(stage_1.backbone.state_dict())
        return messages

    def train(self, mode: bool = True) -> Self:
        """Set training mode; a frozen encoder stays in evaluation mode."""
        super().train(mode)
        self.backbone.train(mode and self.config.end_to_end)
        return self

    def copy_backbone(self, teacher: Retriever) -> None:
        """Copy the teacher's embeddings only, as the student has its own encoder."""
        self.backbone.embedding.load_state_dict(teacher.backbone.embedding.state_dict())

    def encode(self, batch: HistoryBatch) -> History:
        """Return the states of the student's encoder."""
        if not self.config.end_to_end:
            return super().encode(batch)
        return self.backbone.encode(batch)

    def teacher_hidden(self, batch: RequestBatch, history: History) -> Tensor:
        """Return the teacher's states after the teacher's own encoder."""
        return super().teacher_hidden(batch, self.teacher.encode(batch))
