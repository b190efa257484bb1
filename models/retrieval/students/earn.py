r"""EARN (Yang et al., 2025) on TIGER, as ported in Appendix D.3 of SID-MLP.

    python -m jobs.train --config jobs/configs/retrieval/earn.yaml --tables TABLES \
        --sids SIDS --storage runs --name earn --model.teacher runs/tiger

Two learned embeddings, the registers, are added before and after the history. The
encoder's layers up to k read all positions. Layers above k, and the decoder's
cross-attention, read only the states of the two registers. The appendix specifies k,
the joint fine-tuning from the teacher's weights, and the loss of the EARN paper. It
does not specify the initialisation of the registers: here a normal distribution, as for
TIGER's tokens.

Shapes: `B` requests, `S` tokens of a history with its registers, `D` width, `H` heads.
"""

from __future__ import annotations

import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional

from core.errors import UserError
from core.options import STRICT
from models.layers.t5 import dropout
from models.retrieval.data import HistoryBatch
from models.retrieval.distillation.student import Joint, JointConfig
from models.retrieval.distillation.teacher import require_class
from models.retrieval.retriever import History, Retriever, padding_mask
from models.retrieval.tiger.decoder import T5Decoder
from models.retrieval.tiger.encoder import ExtendedT5, T5Backbone
from models.retrieval.tiger.tiger import Tiger

NUM_REGISTERS = 2
"""Number of learned embeddings around a history."""


@dataclass(config=STRICT)
class EarnConfig(JointConfig):
    """Options of EARN on TIGER; sizes are the teacher's."""

    register_layer: PositiveInt = 1
    """Number k of the last encoder layer that reads the history, from 1 (swept over 1,
    2, 3 in Appendix D.3)."""


class EarnBackbone(ExtendedT5):
    """T5's encoder that returns the states of the two registers only."""

    def __init__(self, teacher: T5Backbone, layer: int) -> None:
        """Build the backbone.

        Args:
            teacher: Backbone whose vocabulary and sizes are used.
            layer: Last layer that reads the history, from 1.
        """
        super().__init__(
            teacher.tokens, teacher.sizes, teacher.max_history, NUM_REGISTERS
        )
        num_layers = self.sizes.num_encoder_layers
        if layer > num_layers:
            raise UserError(
                f"register_layer {layer} exceeds the teacher's {num_layers} encoder "
                f"layers"
            )
        self.layer = layer

    def inputs(self, batch: HistoryBatch) -> tuple[Tensor, Tensor]:
        """Return tokens `[register, history, register]` (B, S), and lengths (B,)."""
        tokens, lengths = super().inputs(batch)
        first_register = self.tokens.vocabulary
        tokens = functional.pad(tokens, (1, 0), value=first_register)
        tokens = functional.pad(tokens, (0, 1))
        last_position = lengths.unsqueeze(1) + 1
        tokens = tokens.scatter(1, last_position, first_register + 1)
        return tokens, lengths + NUM_REGISTERS

    def encode(self, batch: HistoryBatch) -> History:
        """Return the states (B, 2, D) of the registers."""
        tokens, lengths = self.inputs(batch)
        table = self.table()
        dropout_p = self.sizes.dropout if self.training else 0.0
        x = dropout(functional.embedding(tokens, table), dropout_p)
        bias = self.encoder.position_bias(tokens.shape[1])  # (1, H, S, S)
        registers = torch.stack([torch.zeros_like(lengths), lengths - 1], 1)  # (B, 2)
        by_position = bias[0].transpose(0, 1)  # (S, H, S)
        rows = functional.embedding(registers, by_position.flatten(1))  # (B, 2, H * S)
        # (B, H, 2, S): from the registers to all positions
        register_bias = rows.unflatten(2, by_position.shape[1:]).transpose(1, 2)
        # (B, H, 2, 2): between the registers
        inner_bias = register_bias.take_along_dim(registers[:, None, None], 3)
        padding = padding_mask(lengths, tokens.shape[1], table.dtype)
        if padding is not None:
            bias = bias + padding
            register_bias = register_bias + padding
        *full_blocks, last_block = self.encoder.blocks[: self.layer]
        for block in full_blocks:
            x = block(x, bias, dropout_p)
        # the last block that reads the history is needed at the registers only
        index = registers.unsqueeze(-1)
        normed = last_block.get_norm(0)(x)
        attention = last_block.attention
        (q,) = attention.project(normed.take_along_dim(index, 1), "q")
        k, v = attention.project(normed, "kv")
        attended = attention.attend(q, k, v, register_bias, dropout_p)
        x = x.take_along_dim(index, 1) + dropout(attended, dropout_p)
        inner = last_block.feedforward(last_block.get_norm(-1)(x), dropout_p)
        x = x + dropout(inner, dropout_p)
        for block in self.encoder.blocks[self.layer :]:
            x = block(x, inner_bias, dropout_p)
        states = dropout(self.encoder.final_layer_norm(x), dropout_p)
        return History(states, torch.full_like(lengths, NUM_REGISTERS))

    def infer(self, batch: HistoryBatch) -> History:
        """Return the states of `encode`; no packed encoder handles registers."""
        return self.encode(batch)


class Earn(Joint):
    """TIGER's decoder on an encoder that returns the states of two registers."""

    name = "earn"
    config_class = EarnConfig
    config: EarnConfig

    @staticmethod
    def build_parts(
        config: EarnConfig, teacher: Retriever
    ) -> tuple[EarnBackbone, T5Decoder]:
        """Return TIGER's decoder on an encoder with registers."""
        source = require_class(teacher, Tiger).backbone
        backbone = EarnBackbone(source, config.register_layer)
        return backbone, T5Decoder(backbone)
