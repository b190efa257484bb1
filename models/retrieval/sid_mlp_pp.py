"""SID-MLP++ (Guo et al., 2026, Sec. 3.5): SID-MLP with the teacher's encoder distilled into MLPs as well.

    python -m jobs.train --config jobs/configs/sid_mlp_pp_encoder.yaml --tables TABLES --sids SIDS --storage runs \\
        --name encoder --model.teacher runs/tiger
    python -m jobs.train --config jobs/configs/sid_mlp_pp.yaml --tables TABLES --sids SIDS --storage runs \\
        --name sid_mlp_pp --model.encoder runs/encoder

Stage 1 (`sid_mlp_pp_encoder`) matches the frozen teacher's encoder states by squared error. Stage 2
(`sid_mlp_pp`) freezes that encoder and trains SID-MLP's readout and heads on its states by equation 3.
Instead of attention each layer has the mean of a request's states and one MLP per role (equation 4). Roles
follow positions: code l of an item has role l, and the last code's role also serves user and end.

Shapes: `B` requests, `T` items and `S = 2 + L * T` tokens of a history, `L` levels (codes of an item), `D`
width, `R` items in the batch, `V` tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import checkpoint
from models.retrieval import teacher as teachers
from models.retrieval.data import Catalogue
from models.retrieval.sid_mlp import SidMlp, SidMlpConfig
from models.retrieval.t5 import dropout
from models.retrieval.teacher_cache import Question, States
from models.retrieval.tiger import Tiger, TigerConfig
from models.tables import UserError

STAGE_1 = "sid_mlp_pp_encoder"

IN_CACHE = 128
"""Tokens that an MLP takes at once on a CPU: at the published width their activations stay in the core's cache."""


@dataclass
class EncoderSizes:
    """Sizes of the MLP encoder; the defaults are those of the public code."""

    encoder_layers: int = 4
    """Layers (Appendix C.2; swept over 1, 2, 4, 6, 8)."""
    encoder_width: int = 2048
    """Inner width of each MLP (swept from 256 to 8192, Appendix C.2)."""
    encoder_dropout: float = 0.1
    """Dropout on the inner width."""
    shared_mlp: bool = False
    """One MLP per layer for all roles (Table 14, Shared MLP)."""

    def __post_init__(self) -> None:
        for name in ("encoder_layers", "encoder_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is below 1; give a positive number")
        if not 0 <= self.encoder_dropout < 1:
            raise ValueError(f"encoder_dropout {self.encoder_dropout} is not in [0, 1); give a share")


def on_cpu(x: Tensor) -> bool:
    """Whether sizes can be read without waiting for a device, and be other ones at the next call."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


class RoleMlp(nn.Module):
    """F of equation 4: Linear, LayerNorm, GELU, dropout, Linear (the public code's)."""

    def __init__(self, dim: int, width: int, share: float) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(2 * dim, width), nn.LayerNorm(width)
        self.outer, self.share = nn.Linear(width, dim), share

    def forward(self, x: Tensor, mean: Tensor, owner: Tensor) -> Tensor:
        """(n, D): F([x; mean of its request]) of tokens x (n, D) of the requests `owner` (n,); mean (B, D)."""
        if not on_cpu(x) or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            hidden = self.inner(torch.cat([x, mean[owner]], 1))  # (n, width)
            return self.outer(dropout(functional.gelu(self.norm(hidden)), self.share if self.training else 0.0))
        own, given = self.inner.weight.tensor_split(2, 1)  # [x; mean] W = x W_own + mean W_given
        shared = functional.linear(mean, given, self.inner.bias)  # (B, width), once per request
        pieces = [
            self.outer(functional.gelu(self.norm(torch.addmm(shared[request], piece, own.T))))
            for piece, request in zip(x.split(IN_CACHE), owner.split(IN_CACHE), strict=True)
        ]
        return torch.cat(pieces)


@dataclass(frozen=True)
class Layout:
    """The tokens of a batch by role, level l at index l; the last role has a user and an end per request too.

    Packed, it has real items only, R of them, so nothing is done for padding. Otherwise it has all R = B * T
    places, those of padding marked, and its shapes follow from the batch's.
    """

    tokens: list[Tensor]
    """(R,) tokens of each role, the last (R + 2 B,): codes, users, ends."""
    owners: list[Tensor]
    """Of each token, its request."""
    places: list[Tensor]
    """Of each token, its position."""
    counts: Tensor
    """(B, 1) real tokens of each request."""
    real: Tensor | None
    """(B, T) which items are no padding, where padding is in it."""

    @classmethod
    def of(cls, batch: dict[str, Tensor], source: Tiger, packed: bool) -> Self:
        history, length = batch["history"], batch["history_length"]
        rows, items = history.shape
        levels = len(source.sizes)
        request = torch.arange(rows, device=history.device)
        real: Tensor | None = torch.arange(items, device=history.device) < length.unsqueeze(1)  # (B, T)
        if packed:
            owner, item = cast(Tensor, real).nonzero(as_tuple=True)
            codes, real = source.sids[history[owner, item]], None  # (R, L)
        else:
            owner = request.repeat_interleave(items)
            item = torch.arange(items, device=history.device).repeat(rows)
            codes = source.sids[torch.where(cast(Tensor, real), history, 0).flatten()]
        tokens, places = list(codes.unbind(1)), [1 + level + levels * item for level in range(levels)]
        user = source.first_user + batch["user"] % source.config.n_user_tokens
        tokens[-1] = torch.cat([tokens[-1], user, torch.full_like(user, source.end)])
        places[-1] = torch.cat([places[-1], torch.zeros_like(user), 1 + levels * length])
        owners = [owner] * (levels - 1) + [torch.cat([owner, request, request])]
        return cls(tokens, owners, places, (2 + levels * length).unsqueeze(1), real)

    def mean(self, states: list[Tensor]) -> Tensor:
        """(B, D): g of equation 4, the mean over the real tokens of each request of their states."""
        rows, places = self.counts.shape[0], self.owners[-1].shape[0]
        codes, ends = states[-1].split([places - 2 * rows, 2 * rows])
        for other in states[:-1]:
            codes = codes + other  # (R, D)
        total = ends[:rows] + ends[rows:]
        if self.real is None:
            total = total.index_add(0, self.owners[-1][: codes.shape[0]], codes)
        else:  # summed in a fixed order, which adding by index on a GPU is not
            total = total + codes.unflatten(0, self.real.shape).masked_fill(~self.real.unsqueeze(-1), 0.0).sum(1)
        return total / self.counts

    def padded(self, states: list[Tensor], length: int) -> Tensor:
        """(B, S, D): the states at their positions, zero at padding."""
        states = list(states)
        if self.real is not None:
            real = self.real.flatten().unsqueeze(-1)
            states = [state * real for state in states[:-1]] + [
                torch.cat([states[-1][: real.shape[0]] * real, states[-1][real.shape[0] :]])
            ]
        place = torch.cat([owner * length + at for owner, at in zip(self.owners, self.places, strict=True)])
        joined = torch.cat(states)
        flat = joined.new_zeros((self.counts.shape[0] * length, joined.shape[1]))
        return flat.index_add(0, place, joined).unflatten(0, (-1, length))  # padding adds zeros where an end is


class RoleEncoder(nn.Module):
    """Equation 4: x <- x + F_role([x; g]), g the mean of the request's states; then a layer norm.

    x starts as the teacher's token embedding, frozen, plus a learned one of the position. Every token goes
    through the MLP of its own role only.
    """

    def __init__(self, source: Tiger, sizes: EncoderSizes) -> None:
        super().__init__()
        dim, levels = source.config.d_model, len(source.sizes)
        self.max_history, self.shared = source.config.max_history, sizes.shared_mlp

        self.positions = nn.Embedding(2 + levels * self.max_history, dim)
        roles = 1 if self.shared else levels
        self.layers = nn.ModuleList(
            nn.ModuleList(RoleMlp(dim, sizes.encoder_width, sizes.encoder_dropout) for _ in range(roles))
            for _ in range(sizes.encoder_layers)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(
        self, batch: dict[str, Tensor], source: Tiger, packed: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(states (B, S, D), zero at padding; padding (B, 1, 1, S) of 0 and -inf or None where nothing is padded).

        `source` gives tokens and their embeddings. Left out, `packed` is chosen: on a CPU, where real items can be
        counted without waiting for a device, yes. Raises ValueError for a longer history than `max_history`.
        """
        if packed is None:
            packed = on_cpu(batch["history"])
        items = batch["history"].shape[1]
        if items > self.max_history:
            raise ValueError(
                f"a history of {items} items exceeds the encoder's {self.max_history}; give the latest "
                f"{self.max_history}"
            )
        layout = Layout.of(batch, source, packed)
        states = [
            source.t5.shared(token) + self.positions(place)
            for token, place in zip(layout.tokens, layout.places, strict=True)
        ]
        for layer in self.layers:
            mean = layout.mean(states)
            updates = self._updates(cast(nn.ModuleList, layer), states, mean, layout.owners)
            states = [x + update for x, update in zip(states, updates, strict=True)]
        length = 2 + len(source.sizes) * items
        padded = layout.padded([self.norm(x) for x in states], length)
        padding = None
        if not on_cpu(padded) or bool((layout.counts < length).any()):  # the check would wait for a GPU
            outside = torch.arange(length, device=padded.device) >= layout.counts
            padding = padded.new_zeros(outside.shape).masked_fill(outside, -torch.inf)[:, None, None]
        return padded, padding

    def _updates(self, layer: nn.ModuleList, states: list[Tensor], mean: Tensor, owners: list[Tensor]) -> list[Tensor]:
        """F_role of the states of each role."""
        if self.shared:
            return list(layer[0](torch.cat(states), mean, torch.cat(owners)).split([x.shape[0] for x in states]))
        return [mlp(x, mean, owner) for mlp, x, owner in zip(layer, states, owners, strict=True)]


@dataclass
class SidMlpPpEncoderConfig(EncoderSizes):
    """Stage 1 of SID-MLP++: representation matching."""

    teacher: str = ""
    """Checkpoint of a trained TIGER or folder of its finished run; for training only."""
    teacher_model: dict[str, Any] = field(default_factory=dict)
    """The teacher's `TigerConfig`, filled in from its checkpoint; empty: TIGER's defaults."""
    teacher_hash: str = ""
    """SHA-256 of the teacher's weights file, filled in from its checkpoint."""
    teacher_cache: str = ""
    """As of SID-MLP: folder of the table of the teacher's states, which is SID-MLP's too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tiger()

    def tiger(self) -> TigerConfig:
        """The teacher's sizes. Raises ValueError where they are not TIGER's fields."""
        return SidMlpConfig(teacher_model=self.teacher_model).tiger()

    @property
    def max_history(self) -> int:
        """Latest items read: the teacher's."""
        return self.tiger().max_history


class SidMlpPpEncoder(nn.Module):
    """Stage 1: the encoder alone, trained to give the teacher's encoder states. It recommends nothing."""

    METRICS = ("mse", "neg_mse", "r2")
    """What `means` gives."""

    def __init__(self, config: SidMlpPpEncoderConfig, catalogue: Catalogue) -> None:
        super().__init__()
        self.config = config
        self.source = Tiger(config.tiger(), catalogue).requires_grad_(False).eval()
        del self.source.t5.encoder, self.source.t5.decoder  # what is left are tokens and their embeddings
        self.encoder = RoleEncoder(self.source, config)
        self._catalogue = catalogue
        self._teacher: tuple[Tiger, ...] = ()  # no submodule: it is no part of the student's weights
        self._known: States | None = None  # the table of `teacher_cache`, while training

    def set_teacher(self, teacher: Tiger) -> None:
        """Takes the embeddings from `teacher`, and keeps it, outside of the weights, for its states.

        The last norm starts at the teacher's scale: AdamW's steps of 0.001 would take a thousand to come from 1
        to the 0.2 of a trained TIGER, more than a small log has.
        """
        self.source.load_state_dict(teacher.state_dict(), strict=False)
        self.encoder.norm.weight.data.copy_(teacher.t5.encoder.final_layer_norm.weight)
        self._teacher = (teacher.to(self.source.sids.device),)

    @property
    def teacher(self) -> Tiger:
        """What the states are compared with; of a loaded checkpoint found again at its path, which has to be there."""
        if not self._teacher:
            teacher = teachers.load(teachers.resolve(self.config, self._catalogue), self._catalogue)
            self._teacher = (teacher.to(self.source.sids.device),)
        return self._teacher[0]

    def encode(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The student's states, as `RoleEncoder` gives them."""
        return self.encoder(batch, self.source)

    def questions(self) -> list[Question]:
        """What `teacher_cache` can keep: the teacher's states."""
        config = {"width": self.source.config.d_model, "teacher_model": self.config.teacher_model}
        return [Question("encoder", self.config.teacher_hash, config, self._ask_teacher, ("train", "val"))]

    def _ask_teacher(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.teacher.encode(batch)[0], 2 + len(self.source.sizes) * batch["history_length"]

    def set_known(self, known: dict[str, States]) -> None:
        """Takes the table that answers the question."""
        self._known = known["encoder"]

    def matched(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(error (B, S, D), the teacher's states (B, S, D), real (B, S, 1)); error and states are 0 at padding."""
        states, _ = self.encode(batch)
        known = self._known.padded(batch) if self._known else None
        with torch.no_grad():
            target, _ = known or self.teacher.encode(batch)
        end = 1 + len(self.source.sizes) * batch["history_length"].unsqueeze(1)
        real = (torch.arange(states.shape[1], device=end.device) <= end).unsqueeze(-1)
        target = target.float().masked_fill(~real, 0.0)
        return states.float() - target, target, real

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Mean squared error over the real tokens' states (Sec. 3.5, stage 1)."""
        error, _, real = self.matched(batch)
        return {"loss": error.square().sum() / (real.sum() * error.shape[-1])}

    @torch.no_grad()
    def measure(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums over the batch for `means`, in float64."""
        error, target, real = (x.double() for x in self.matched(batch))
        return {
            "examples": target.new_full((), len(target)),
            "tokens": real.sum(),
            "squared_error": error.square().sum(),
            "state": target.sum((0, 1)),  # (D,)
            "squared_state": target.square().sum(),
        }

    @staticmethod
    def means(sums: dict[str, Tensor]) -> dict[str, float]:
        """`mse` per number; `neg_mse`, its negative, to select by; `r2`, the share of the variance explained."""
        tokens, error = sums["tokens"], sums["squared_error"]
        mse = float(error / (tokens * len(sums["state"])))
        variance = sums["squared_state"] - sums["state"].square().sum() / tokens
        return {"mse": mse, "neg_mse": -mse, "r2": float(1 - error / variance)}


@dataclass
class SidMlpPpConfig(SidMlpConfig, EncoderSizes):
    """Stage 2 of SID-MLP++: SID-MLP on the student encoder's states."""

    encoder: str = ""
    """Checkpoint of stage 1 or folder of its finished run, which decides the encoder's sizes; for training only."""
    encoder_hash: str = ""
    """SHA-256 of stage 1's weights file, filled in from its checkpoint."""
    end_to_end: bool = False
    """No stage 1: the encoder is trained with readout and heads by equation 3 (Table 14, End2End)."""

    def __post_init__(self) -> None:
        SidMlpConfig.__post_init__(self)
        EncoderSizes.__post_init__(self)
        if self.end_to_end and self.encoder:
            raise ValueError(f"encoder {self.encoder} is of stage 1, and end_to_end has none; leave one of them out")
        if self.end_to_end and self.teacher_memory_mb:
            raise ValueError(
                f"teacher_memory_mb {self.teacher_memory_mb} remembers the states of a frozen encoder, and end_to_end "
                f"trains it; set it to 0"
            )
        if self.m:
            raise ValueError(f"m {self.m}: the teacher's decoder cannot read the student's encoder; set m 0")


class SidMlpPp(SidMlp):
    """Stage 2, and what recommends: as `SidMlp`, with the student's encoder in place of the teacher's."""

    config: SidMlpPpConfig

    def __init__(self, config: SidMlpPpConfig, catalogue: Catalogue) -> None:
        super().__init__(config, catalogue)
        del self.source.t5.encoder
        self.encoder = RoleEncoder(self.source, config).requires_grad_(config.end_to_end)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.encoder.train(mode and self.config.end_to_end)
        return self

    def encode(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The student encoder's (states (B, S, D), padding (B, 1, 1, S) of 0 and -inf or None)."""
        if found := self.known("encoder", batch):
            return found
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.config.end_to_end):
            return self.encoder(batch, self.source)

    def teacher_states(self, batch: dict[str, Tensor], encoded: tuple[Tensor, Tensor | None]) -> Tensor:
        """(B, L, D): as in `SidMlp`, from the teacher's own encoder, not the student's."""
        return super().teacher_states(batch, self.teacher.encode(batch))

    def questions(self) -> list[Question]:
        """As in `SidMlp`, but that the encoder is the student's, and not to be kept where it is trained."""
        encoder, *rest = super().questions()
        if self.config.end_to_end:
            return rest
        sizes = {name: getattr(self.config, name) for name in EncoderSizes.__dataclass_fields__}
        return [replace(encoder, weights=self.config.encoder_hash, config={**encoder.config, **sizes}), *rest]


def resolve(config: SidMlpPpConfig, catalogue: Catalogue) -> SidMlpPpConfig:
    """`config` with teacher and stage 1 filled in from their checkpoints; the teacher is stage 1's where none is named.

    Raises UserError where stage 1 is not named, gone, of another model, of other tables, or of another teacher.
    """
    if config.end_to_end:
        return teachers.resolve(config, catalogue)
    if not config.encoder:
        raise UserError(
            "model.encoder is not set; give the folder of a trained sid_mlp_pp_encoder (jobs.train --config "
            "jobs/configs/sid_mlp_pp_encoder.yaml), or set model.end_to_end true"
        )
    uri = teachers.locate(config.encoder, "encoder")
    about = checkpoint.read(uri)
    checkpoint.check(about, uri, dict(catalogue.hashes), STAGE_1)
    config = teachers.resolve(replace(config, teacher=config.teacher or about.model["teacher"]), catalogue)
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


def teach_encoder(model: nn.Module, config: SidMlpPpEncoderConfig, catalogue: Catalogue) -> None:
    """Loads the teacher of a resolved config into stage 1."""
    cast(SidMlpPpEncoder, model).set_teacher(teachers.load(config, catalogue))


def teach(model: nn.Module, config: SidMlpPpConfig, catalogue: Catalogue) -> None:
    """Loads the teacher and stage 1's encoder of a resolved config into stage 2."""
    student = cast(SidMlpPp, model)
    student.set_teacher(teachers.load(config, catalogue))
    if not config.end_to_end:
        stage_1 = {key: value for key, value in checkpoint.read(config.encoder).model.items() if key != "name"}
        trained = SidMlpPpEncoder(SidMlpPpEncoderConfig(**stage_1), catalogue)
        checkpoint.load_weights(trained, config.encoder)
        student.encoder.load_state_dict(trained.encoder.state_dict())
