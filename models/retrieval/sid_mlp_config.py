"""The options of SID-MLP: the paper's student and, by other values, each of its ablations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from models.retrieval.tiger import TigerConfig

Scores = Literal["children", "codebook"]
Path = Literal["fast", "plain"]


@dataclass
class SidMlpConfig:
    """SID-MLP; the defaults are the paper's student and the facts of its public code."""

    teacher: str = ""
    """Checkpoint of a trained TIGER or folder of its finished run; for training only."""
    teacher_model: dict[str, Any] = field(default_factory=dict)
    """The teacher's `TigerConfig`, filled in from its checkpoint; empty: TIGER's defaults."""
    teacher_hash: str = ""
    """SHA-256 of the teacher's weights file, filled in from its checkpoint."""
    beam: int = 50
    """Beams when recommending (Sec. 4.1)."""
    scores: Scores = "children"
    """What a digit's log-probabilities are normalised over when recommending: the valid children of the prefix
    (the public code, and so the paper's figures; the first digit always over its codebook) or the codebook."""
    path: Path = "fast"
    """`fast` is the same search with shared work done once, where it covers the variant; `plain` is the definition."""
    attention_heads: int = 4
    """Heads of the readout (public code; swept over 4 and 8, Appendix C.2)."""
    attention_width: int = 384
    """Inner width of the readout (public code; swept from 128 to 512, Appendix C.2)."""
    ffn_width: int = 1024
    """Inner width of the readout's feed-forward (public code)."""
    head_width: int = 512
    """Hidden width of each digit's head (public code; swept from 128 to 2048, Appendix C.2)."""
    dropout: float = 0.2
    """Dropout of heads and feed-forward (public code; 0.1 and 0.2 in Appendix C.2)."""
    alpha: float = 0.7
    """Weight of the teacher against the target (Eq. 3); 0 is training from scratch (Table 8; Table 5, w/o KL)."""
    tau: float = 1.0
    """Temperature of the teacher's and the student's distributions (Eq. 3)."""
    teacher_memory_mb: int = 0
    """Memory of each worker for what the frozen teacher says of the training requests (5 to 25 kB each at the
    published sizes), so that epochs after the first do not ask it again; 0 asks it at every step. Remembered
    answers are of half precision, and a resumed run equals an undisturbed one up to that."""
    teacher_cache: str = ""
    """Folder of tables of what the frozen teacher says, which runs share: the first one makes them, so that epochs,
    validation included, need no pass of its encoder or decoder; of half precision, unpadded (`teacher_cache.py`)."""
    m: int = 0
    """Digits that the teacher's decoder generates before the student takes over (Table 1; Appendix E.1)."""
    decoder: Literal["mlp", "transformer"] = "mlp"
    """`transformer` is one T5 decoder layer instead of readout and heads (Tables 1, 2, 8, 9)."""
    self_attention: bool = True
    """Whether the transformer decoder attends to the prefix (Tables 2 and 9)."""
    cross_attention: bool = True
    """Whether the transformer decoder attends to the encoder's states (Tables 2 and 9)."""
    prefix: Literal["concat", "none", "sum", "cascade"] = "concat"
    """What a head sees of the prefix (Table 5, G1): all embeddings in order; nothing; [z; their sum]; or the newest
    embedding and the previous head's hidden activation in place of z."""
    shared_head: bool = False
    """One head for all digits, on the summed prefix (Table 5, G1)."""
    readout: Literal["attention", "mean", "per_digit"] = "attention"
    """z by one attention per user; by a linear projection of the mean state; or by one attention per digit whose
    query reads the prefix too (Table 5, G2)."""
    context_ffn: bool = True
    """Whether the readout has its feed-forward (Table 5, G2)."""
    logits: Literal["codebook", "vocabulary"] = "codebook"
    """What heads predict and the teacher's logits are cut to (Table 5, G3)."""
    embeddings: Literal["teacher", "random"] = "teacher"
    """Embeddings of the prefix: the teacher's, frozen, or random ones, trained (Table 5, G3)."""

    def __post_init__(self) -> None:
        for name in ("beam", "attention_heads", "attention_width", "ffn_width", "head_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is below 1; give a positive number")
        if self.attention_width % self.attention_heads:
            raise ValueError(
                f"attention_width {self.attention_width} does not divide by attention_heads {self.attention_heads}; "
                f"give a multiple"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout {self.dropout} is not in [0, 1); give a share")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha {self.alpha} is not in [0, 1]; give the teacher's share of the loss")
        if not self.tau > 0:
            raise ValueError(f"tau {self.tau} is not above 0; give a temperature such as 1")
        for name, meaning in {"m": "digits that the teacher generates", "teacher_memory_mb": "megabytes"}.items():
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is below 0; give the number of {meaning}")
        for name in ("scores", "path", "decoder", "prefix", "readout", "logits", "embeddings"):
            check_choice(name, getattr(self, name))
        if self.teacher_memory_mb and self.teacher_cache:
            raise ValueError(
                f"teacher_memory_mb {self.teacher_memory_mb} and teacher_cache {self.teacher_cache} keep the same "
                f"twice; leave one of them out"
            )
        self.tiger()
        self._check_combination()

    def _check_combination(self) -> None:
        if self.decoder == "transformer":
            for name in ("prefix", "shared_head", "readout", "context_ffn", "embeddings"):
                if getattr(self, name) != SidMlpConfig.__dataclass_fields__[name].default:
                    raise ValueError(
                        f"{name} {getattr(self, name)} is of the MLP decoder; leave it out or set decoder mlp"
                    )
        elif not (self.self_attention and self.cross_attention):
            raise ValueError("self_attention and cross_attention are of the transformer; set decoder transformer")
        impossible = {
            "shared_head needs the same input for every digit; set prefix sum": (
                self.shared_head and self.prefix != "sum"
            ),
            "readout mean has no feed-forward; leave context_ffn out": (
                self.readout == "mean" and not self.context_ffn
            ),
            f"readout per_digit reads the prefix and prefix {self.prefix} does not fit it; set prefix concat or sum": (
                self.readout == "per_digit" and self.prefix in ("none", "cascade")
            ),
            "prefix none has no embeddings to train; leave embeddings out": (
                self.prefix == "none" and self.embeddings == "random"
            ),
            f"prefix cascade starts at the first digit, and m is {self.m}; set m 0": (
                self.prefix == "cascade" and self.m > 0
            ),
        }
        for message, holds in impossible.items():
            if holds:
                raise ValueError(message)

    def tiger(self) -> TigerConfig:
        """The teacher's sizes. Raises ValueError where they are not TIGER's fields."""
        try:
            return TigerConfig(**self.teacher_model)
        except TypeError as error:
            raise ValueError(f"teacher_model is not a config of TIGER ({error}); leave it out") from error

    @property
    def max_history(self) -> int:
        """Latest items read: the teacher's."""
        return self.tiger().max_history


CHOICES: dict[str, tuple[str, ...]] = {
    "scores": ("children", "codebook"),
    "path": ("fast", "plain"),
    "decoder": ("mlp", "transformer"),
    "prefix": ("concat", "none", "sum", "cascade"),
    "readout": ("attention", "mean", "per_digit"),
    "logits": ("codebook", "vocabulary"),
    "embeddings": ("teacher", "random"),
}


def check_choice(name: str, value: str) -> None:
    """Raises ValueError for a value that the option does not have."""
    if value not in CHOICES[name]:
        raise ValueError(f"{name} '{value}' is unknown; choose one of {', '.join(CHOICES[name])}")
