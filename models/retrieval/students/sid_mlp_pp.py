"""SID-MLP++ (Guo et al., 2026, Sec. 3.5): SID-MLP with the teacher's encoder distilled into MLPs as well.

    python -m jobs.train --config jobs/configs/sid_mlp_pp_encoder.yaml --tables TABLES --sids SIDS --storage runs \\
        --name encoder --model.teacher runs/tiger
    python -m jobs.train --config jobs/configs/sid_mlp_pp.yaml --tables TABLES --sids SIDS --storage runs \\
        --name sid_mlp_pp --model.encoder runs/encoder

Stage 1 (`sid_mlp_pp_encoder`) matches the frozen teacher's encoder states by squared
error. Stage 2 (`sid_mlp_pp`) freezes that encoder and trains SID-MLP's readout and
heads on its states by equation 3. The encoder is in `backbones/mlp.py`.

Shapes: `B` requests, `S` tokens of a history, `D` width.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Self, cast

import torch
from torch import Tensor

from models.build import build_model
from models.retrieval.backbones.mlp import EncoderSizes, MlpBackbone
from models.retrieval.backbones.t5 import T5Backbone
from models.retrieval.data import Catalogue, HistoryBatch, RequestBatch
from models.retrieval.decoders.sid_mlp import SidMlpConfig
from models.retrieval.distillation.teacher import (
    TaughtModel,
    TeacherConfig,
    build_teacher,
    load_teacher,
    resolve_teacher,
)
from models.retrieval.distillation.teacher_cache import Query, States
from models.retrieval.parts import History, real_positions
from models.retrieval.retriever import Retriever
from models.retrieval.students.sid_mlp import SidMlp
from models.storage import checkpoint
from models.storage.tables import UserError
from models.training.distributed import global_mean


@dataclass
class SidMlpPpEncoderConfig(EncoderSizes, TeacherConfig):
    """Options of stage 1 of SID-MLP++: representation matching."""


class SidMlpPpEncoder(TaughtModel):
    """Stage 1: the encoder alone, trained to give the teacher's encoder states. It recommends nothing."""

    name = "sid_mlp_pp_encoder"
    config_class = SidMlpPpEncoderConfig
    options_class = None
    ranks = "nothing"
    has_own_metrics = True
    shown_metrics = ("mse", "neg_mse", "r2")
    config: SidMlpPpEncoderConfig

    def __init__(self, config: SidMlpPpEncoderConfig, catalogue: Catalogue) -> None:
        super().__init__(config, catalogue)
        teacher = build_teacher(config, catalogue)
        if type(teacher.backbone) is not T5Backbone:
            raise UserError(
                f"stage 1 gives the states of T5's encoder, and those of a '{teacher.name}' are others; give a "
                f"TIGER as model.teacher"
            )
        self.backbone = MlpBackbone(teacher.backbone, config)
        self._catalogue = catalogue
        self._teacher: tuple[Retriever, ...] = ()  # no submodule: not saved with it
        self._states: States | None = None  # table of `teacher_cache`, while training

    def set_teacher(self, teacher: Retriever) -> None:
        """Copy the teacher's embeddings, and keep it, outside of the weights, for its states.

        The last norm starts at the teacher's scale: AdamW's steps of 0.001 would take a
        thousand to come from 1 to the 0.2 of a trained TIGER, more than a small log
        has.
        """
        self.backbone.embedding.load_state_dict(teacher.backbone.embedding.state_dict())
        self.backbone.norm.weight.data.copy_(
            cast(T5Backbone, teacher.backbone).encoder.final_layer_norm.weight
        )
        self._teacher = (
            teacher.requires_grad_(False).eval().to(self.backbone.tokens.items.device),
        )

    @property
    def teacher(self) -> Retriever:
        """The teacher whose states are matched; after loading a checkpoint it is read from its path again."""
        if not self._teacher:
            teacher = load_teacher(self.config, self._catalogue)
            self._teacher = (teacher.to(self.backbone.tokens.items.device),)
        return self._teacher[0]

    def teacher_queries(self) -> list[Query]:
        """Return a query for the teacher's states."""
        config = {
            "width": self.backbone.embedding.embedding_dim,
            "teacher_model": self.config.teacher_model,
        }
        return [
            Query(
                "encoder",
                self.config.teacher_hash,
                config,
                self._encode_by_teacher,
                ("train", "val"),
            )
        ]

    def _encode_by_teacher(self, batch: RequestBatch) -> tuple[Tensor, Tensor]:
        """Return the teacher's states and their lengths."""
        history = self.teacher.encode(batch)
        return history.states, history.lengths

    def set_teacher_outputs(self, tables: dict[str, States]) -> None:
        self._states = tables["encoder"]

    def match_states(self, batch: RequestBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return errors (B, S, D), the teacher's states (B, S, D), both 0 at padding, and real positions (B, S, 1)."""
        history = self.backbone.encode(batch)
        outputs = self._states.pad_states(batch) if self._states else None
        with torch.no_grad():
            target = (outputs or self.teacher.encode(batch)).states
        states = history.states
        real = real_positions(history.lengths, states.shape[1]).unsqueeze(-1)
        target = target.float().masked_fill(~real, 0.0)
        return states.float() - target, target, real

    def forward(self, batch: RequestBatch) -> dict[str, Tensor]:
        """Return the mean squared error over the real tokens' states (Sec. 3.5, stage 1)."""
        error, _, real = self.match_states(batch)
        tokens = real.sum()
        return {
            "loss": global_mean(
                error.square().sum() / (tokens * error.shape[-1]), tokens
            )
        }

    @torch.no_grad()
    def measure(  # type: ignore[override]  # it ranks nothing
        self, batch: RequestBatch, by_user: int = 0
    ) -> dict[str, Tensor]:
        """Return float64 sums over the batch; nothing user by user."""
        error, target, real = (x.double() for x in self.match_states(batch))
        return {
            "examples": target.new_full((), len(target)),
            "tokens": real.sum(),
            "squared_error": error.square().sum(),
            "state": target.sum((0, 1)),  # (D,)
            "squared_state": target.square().sum(),
        }

    @classmethod
    def metric_names(cls, catalogue: Catalogue) -> list[str]:
        return list(cls.shown_metrics)

    @classmethod
    def metric_means(cls, sums: dict[str, Tensor]) -> dict[str, float]:
        """Return `mse` per number, `neg_mse`, to select by, and `r2`, the explained variance."""
        tokens, error = sums["tokens"], sums["squared_error"]
        mse = float(error / (tokens * len(sums["state"])))
        variance = sums["squared_state"] - sums["state"].square().sum() / tokens
        return {"mse": mse, "neg_mse": -mse, "r2": float(1 - error / variance)}

    @classmethod
    def format_metrics(cls, metrics_: dict[str, float]) -> list[str]:
        values = (f"{name} {value:.6g}" for name, value in metrics_.items())
        return ["  " + "  ".join(values)]


@dataclass
class SidMlpPpConfig(SidMlpConfig, EncoderSizes):
    """Options of stage 2 of SID-MLP++: SID-MLP on the student encoder's states."""

    encoder: str = field(default="", metadata={"names": "checkpoint"})
    """Checkpoint of stage 1 or folder of its finished run, which decides the encoder's
    sizes; for training only."""
    encoder_hash: str = ""
    """SHA-256 of stage 1's weights file, filled in from its checkpoint."""
    end_to_end: bool = False
    """No stage 1: the encoder is trained with readout and heads by equation 3 (Table
    14, End2End)."""

    def __post_init__(self) -> None:
        SidMlpConfig.__post_init__(self)
        EncoderSizes.__post_init__(self)
        if self.end_to_end and self.encoder:
            raise ValueError(
                f"encoder {self.encoder} is of stage 1, and end_to_end has none; leave one of them out"
            )
        if self.m:
            raise ValueError(
                f"m {self.m}: the teacher's decoder cannot read the student's encoder; set m 0"
            )


class SidMlpPp(SidMlp):
    """Stage 2, which recommends: `SidMlp` with the student's encoder in place of the teacher's."""

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

        The teacher is stage 1's where none is named.
        """
        if config.end_to_end:
            return resolve_teacher(config, catalogue)
        return resolve_encoder(config, catalogue)

    def load_teacher(self, catalogue: Catalogue) -> None:
        """Load the teacher, and the encoder that stage 1 trained."""
        super().load_teacher(catalogue)
        if not self.config.end_to_end:
            about = checkpoint.read(self.config.encoder)
            stage_1 = cast(SidMlpPpEncoder, build_model(about.model, catalogue))
            checkpoint.load_weights(stage_1, self.config.encoder)
            self.backbone.load_state_dict(stage_1.backbone.state_dict())

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.backbone.train(mode and self.config.end_to_end)
        return self

    def take_backbone(self, teacher: Retriever) -> None:
        """Copy the teacher's embeddings; the encoder is the student's own."""
        self.backbone.embedding.load_state_dict(teacher.backbone.embedding.state_dict())

    def encode(self, batch: HistoryBatch) -> History:
        """Return the states of the student's own encoder."""
        if found := self.teacher_outputs("encoder", batch):
            return found
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.config.end_to_end):
            return self.backbone.encode(batch)

    def teacher_history(self, batch: HistoryBatch, history: History) -> History:
        """Return the states of the teacher's own encoder."""
        return self.teacher.encode(batch)

    def teacher_queries(self) -> list[Query]:
        """Return the queries of `SidMlp`, with the student's encoder unless it is trained."""
        encoder, *rest = super().teacher_queries()
        if self.config.end_to_end:
            return rest
        sizes = {
            name: value
            for name, value in asdict(self.config).items()
            if name in EncoderSizes.__dataclass_fields__
        }
        return [
            replace(
                encoder,
                weights=self.config.encoder_hash,
                config={**encoder.config, **sizes},
            ),
            *rest,
        ]


def resolve_encoder(config: SidMlpPpConfig, catalogue: Catalogue) -> SidMlpPpConfig:
    """Return the config with stage 1 and its teacher filled in.

    Raises:
        UserError: If stage 1 is not named, does not exist, or is of another model, of
            other tables or of another teacher.
    """
    if not config.encoder:
        raise UserError(
            "model.encoder is not set; give the folder of a trained sid_mlp_pp_encoder (jobs.train --config "
            "jobs/configs/sid_mlp_pp_encoder.yaml), or set model.end_to_end true"
        )
    uri = checkpoint.locate(config.encoder, "encoder")
    about = checkpoint.read(uri)
    checkpoint.check(about, uri, catalogue.versions, SidMlpPpEncoder.name)
    teacher = config.teacher or about.model["teacher"]
    config = resolve_teacher(replace(config, teacher=teacher), catalogue)
    if about.model["teacher_hash"] != config.teacher_hash:
        raise UserError(
            f"the encoder {uri} matches another teacher ({about.model['teacher_hash'][:12]}) than {config.teacher} "
            f"({config.teacher_hash[:12]}); leave model.teacher out, or train stage 1 with this one"
        )
    weights = checkpoint.weights_hash(uri)
    if config.encoder_hash not in ("", weights):
        raise UserError(
            f"the encoder {uri} is not the one that this run began with ({weights[:12]} and "
            f"{config.encoder_hash[:12]}); give that one back, or take another --name"
        )
    sizes = {name: about.model[name] for name in EncoderSizes.__dataclass_fields__}
    return replace(config, encoder=uri, encoder_hash=weights, **sizes)
