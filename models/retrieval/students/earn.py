"""EARN (Yang et al., 2025) on TIGER, as Appendix D.3 of SID-MLP ports it.

    python -m jobs.train --config jobs/configs/earn.yaml --tables TABLES --sids SIDS \\
        --storage runs --name earn --model.teacher runs/tiger

A register, which is a learned embedding, stands before the history and another after
it. The encoder's layers up to k read all positions; above k the states of the two
registers alone go on, at the positions that they have, and the decoder's
cross-attention reads nothing else. The appendix gives k, the joint fine-tuning from the
teacher's weights and the loss, which is that of EARN's paper. It does not say what the
registers start from: here a normal distribution, as TIGER's own tokens do.

Shapes: `B` requests, `S` tokens of a history with its registers, `D` width, `H` heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from models.layers.t5 import Block, dropout
from models.retrieval.backbones.t5 import ExtendedT5, T5Backbone
from models.retrieval.data import Catalogue, HistoryBatch
from models.retrieval.decoders.t5 import T5Decoder
from models.retrieval.distillation.teacher import build_teacher
from models.retrieval.parts import History, padding_mask
from models.retrieval.students.joint import Joint, JointConfig, require_tiger
from models.storage.tables import UserError

REGISTERS = 2
"""Learned embeddings around a history."""


@dataclass
class EarnConfig(JointConfig):
    """EARN on TIGER; sizes are the teacher's."""

    register_layer: int = 1
    """k: the last encoder layer that reads the history (swept over 1, 2, 3 in Appendix
    D.3)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.register_layer < 1:
            raise ValueError(
                f"register_layer {self.register_layer} is below 1; no layer would read the history"
            )


class EarnBackbone(ExtendedT5):
    """Gives the states of the two registers: a history of two positions."""

    def __init__(self, teacher: T5Backbone, layer: int) -> None:
        """`teacher` gives the vocabulary and the sizes."""
        super().__init__(teacher.tokens, teacher.sizes, teacher.max_history, REGISTERS)
        if layer > self.sizes.num_encoder_layers:
            raise UserError(
                f"register_layer {layer} exceeds the teacher's {self.sizes.num_encoder_layers} encoder layers; give "
                f"one of them"
            )
        self.layer = layer

    def inputs(self, batch: HistoryBatch) -> tuple[Tensor, Tensor]:
        """[prefix register, history, suffix register]."""
        tokens, lengths = super().inputs(batch)
        prefix = self.tokens.vocabulary
        tokens = functional.pad(functional.pad(tokens, (1, 0), value=prefix), (0, 1))
        return tokens.scatter(
            1, lengths.unsqueeze(1) + 1, prefix + 1
        ), lengths + REGISTERS

    def encode(self, batch: HistoryBatch) -> History:
        """States (B, 2, D) of the registers."""
        tokens, lengths = self.inputs(batch)
        table, dropout_p = self.table(), self.sizes.dropout if self.training else 0.0
        x = dropout(functional.embedding(tokens, table), dropout_p)
        position = self.encoder.position_bias(tokens.shape[1])  # (1, H, S, S)
        padding = padding_mask(lengths, tokens.shape[1], table.dtype)
        at = torch.stack(
            [torch.zeros_like(lengths), lengths - 1], 1
        )  # (B, 2): where the registers are
        of_registers = position[0][:, at].transpose(
            0, 1
        )  # (B, H, 2, S): to all positions
        between = of_registers.take_along_dim(at[:, None, None], 3)  # (B, H, 2, 2)
        if padding is not None:
            position, of_registers = position + padding, of_registers + padding
        *all_see_all, last = self.encoder.blocks[: self.layer]
        for block in all_see_all:
            x = block(x, position, dropout_p)
        x = run_at_positions(last, x, at, of_registers, dropout_p)
        for block in self.encoder.blocks[self.layer :]:
            x = block(x, between, dropout_p)
        states = dropout(self.encoder.final_layer_norm(x), dropout_p)
        return History(states, torch.full_like(lengths, REGISTERS))

    def infer(self, batch: HistoryBatch) -> History:
        return self.encode(batch)


def run_at_positions(
    block: Block, x: Tensor, at: Tensor, bias: Tensor, dropout_p: float
) -> Tensor:
    """Return the (B, 2, D) outputs of `block` at the positions `at` (B, 2) of x (B, S,
    D).

    Outputs at other positions would be dropped, so they are not computed.

    Args:
        bias: Attention bias (B, H, 2, S) of these positions to all positions.
    """
    normed, at = block.norm(0, x), at.unsqueeze(-1)
    (q,) = block.attention.project(normed.take_along_dim(at, 1), "q")
    k, v = block.attention.project(normed, "kv")
    x = x.take_along_dim(at, 1) + dropout(
        block.attention.attend(q, k, v, bias, dropout_p), dropout_p
    )
    return x + dropout(block.feedforward(block.norm(-1, x), dropout_p), dropout_p)


class Earn(Joint):
    """TIGER's decoder on an encoder that gives the states of two registers."""

    name = "earn"
    config_class = EarnConfig
    config: EarnConfig

    def __init__(self, config: EarnConfig, catalogue: Catalogue) -> None:
        teacher = require_tiger(build_teacher(config, catalogue))
        backbone = EarnBackbone(teacher.backbone, config.register_layer)
        decoder = T5Decoder(backbone.tokens, backbone.sizes, backbone.embedding)
        super().__init__(config, catalogue, backbone, decoder)
