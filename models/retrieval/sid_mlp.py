"""SID-MLP (Guo et al., 2026): TIGER's decoder distilled into one attention readout and an MLP per digit.

    python -m jobs.train --config jobs/configs/sid_mlp.yaml --tables TABLES --sids SIDS --storage runs \\
        --name sid_mlp --model.teacher runs/tiger

The teacher's encoder and embeddings stay frozen. z = readout(states) is computed once per user (equation 1,
`readout.py`), the logits of digit t are f_t([z; e(c_1); ...; e(c_{t-1})]) (equation 2, `heads.py`), and both are
trained on the teacher's logits and the target (equation 3, `distillation.py`), with the teacher in the loop.
Recommending needs no teacher. The paper's ablations are options of the one model; each has its YAML under
`jobs/configs/sid_mlp/`.

Shapes: `B` requests, `S` tokens of a history, `D` width, `W` beams, `L` levels (digits), `C_l` codes of
level l, `V` tokens of the vocabulary.
"""

from __future__ import annotations

from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.retrieval import teacher as teachers
from models.retrieval.data import Catalogue
from models.retrieval.decoding.beam import beam_search, unconstrained_beam_search
from models.retrieval.decoding.fast import fast_walk
from models.retrieval.decoding.shared_kv import SharedKV
from models.retrieval.distillation import Answer, TeacherMemory, distillation_loss
from models.retrieval.heads import make_heads, predict
from models.retrieval.one_layer import OneLayerDecoder
from models.retrieval.readout import make_readout
from models.retrieval.recommend import recommender
from models.retrieval.sid_mlp_config import Path, Scores, SidMlpConfig, check_choice
from models.retrieval.teacher_cache import Question, States
from models.retrieval.tiger import Tiger
from models.tables import UserError


class SidMlp(nn.Module):
    """The student. It holds the teacher's frozen encoder and embeddings in `source`; the teacher's decoder is kept
    only while training, outside of the weights (`set_teacher`), or where m asks for it."""

    first: Tensor

    def __init__(self, config: SidMlpConfig, catalogue: Catalogue) -> None:
        super().__init__()
        if catalogue.sids is None or catalogue.trie is None:
            raise UserError("the model 'sid_mlp' needs semantic IDs; give --sids with what jobs.tokenize made")
        if catalogue.trie.codebook_sizes != catalogue.codebook_sizes:
            raise UserError(
                f"the trie has codebooks of {list(catalogue.trie.codebook_sizes)} codes, the heads score "
                f"{list(catalogue.codebook_sizes)}; give a trie of the same semantic IDs"
            )
        self.config = config
        self.source = Tiger(config.tiger(), catalogue).requires_grad_(False).eval()
        if config.m == 0:
            del self.source.t5.decoder
        self.trie, self.sizes, self.first_token = catalogue.trie, self.source.sizes, self.source.first_token
        if config.m >= len(self.sizes):
            raise UserError(f"m {config.m} leaves no digit of {len(self.sizes)} to the student; give a smaller m")
        self.register_buffer("first", torch.tensor(self.first_token), persistent=False)
        self._teacher: tuple[Tiger, ...] = ()  # no submodule: it is no part of the student's weights
        self._memory = TeacherMemory(config.teacher_memory_mb) if config.teacher_memory_mb else None
        self._known: dict[str, States] = {}  # tables of `teacher_cache`, while training
        dim, vocabulary = self.source.config.d_model, self.source.end + 1
        if config.decoder == "transformer":
            self.decoder = OneLayerDecoder(self.source.t5, config.self_attention, config.cross_attention)
            return
        if config.embeddings == "random":
            self.embeddings = nn.Embedding(vocabulary, dim)
        self.readout: nn.Module = make_readout(config, len(self.sizes), dim)
        self.heads = make_heads(config, self.sizes, dim, vocabulary)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.source.eval()
        return self

    def encode(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The frozen encoder's (states (B, S, D), padding (B, 1, 1, S) of 0 and -inf or None)."""
        if found := self.known("encoder", batch):
            return found
        with torch.no_grad():
            return self.source.encode(batch)

    def known(self, name: str, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None] | None:
        """What the table `name` of `teacher_cache` has of the batch's requests; None where it does not have them all,
        as in all but training and its validation."""
        return self._known[name].padded(batch) if name in self._known else None

    def context(self, states: Tensor, padding: Tensor | None) -> Any:
        """What `logits` reads of a user: z (B, D) of equation 1; in variants that keep the states, a tuple."""
        if self.config.decoder == "transformer":
            return self.decoder.context(states, padding)
        if self.config.readout == "per_digit":
            return states, padding
        return self.readout(states, padding)

    def code_table(self) -> Tensor:
        """(V, D): e of each token; code c of level l is token `first_token[l] + c`."""
        return self.embeddings.weight if self.config.embeddings == "random" else self.source.t5.shared.weight

    def logits(self, level: int, context: Any, prefix: Tensor) -> Tensor:
        """(B, W, C_level): equation 2 after the codes `prefix` (B, W, level)."""
        outputs = self.outputs(level, context, prefix)
        begin = self.first_token[level] if self.config.logits == "vocabulary" else 0
        return outputs.narrow(-1, begin, self.sizes[level])

    def outputs(self, level: int, context: Any, prefix: Tensor) -> Tensor:
        """As `logits`, as the head gives them: (B, W, V) where it predicts the vocabulary."""
        tokens = prefix + self.first[:level]
        if self.config.decoder == "transformer":
            x = self.decoder(context, tokens)  # (B, W, D)
            weight = self.source.t5.shared.weight
            if self.config.logits == "codebook":
                weight = weight.narrow(0, self.first_token[level], self.sizes[level])
            return functional.linear(x, weight)
        given = functional.embedding(tokens, self.code_table())  # (B, W, level, D)
        if self.config.readout == "per_digit":
            states, padding = context
            z = cast(nn.ModuleList, self.readout)[level](states, padding, given.flatten(2))  # (B, W, D)
        else:
            z = context.unsqueeze(1).expand(-1, given.shape[1], -1)
        return predict(self.heads, self.config.prefix, z, given)

    def set_teacher(self, teacher: Tiger) -> None:
        """Takes encoder and embeddings (and the decoder where m asks for it) from `teacher`, and keeps it, outside of
        the weights, for its logits."""
        own = self.source.state_dict()
        self.source.load_state_dict({name: value for name, value in teacher.state_dict().items() if name in own})
        self._teacher = (teacher.to(self.first.device),)

    @property
    def teacher(self) -> Tiger:
        """The teacher that training learns from. Raises UserError where there is none."""
        if not self._teacher:
            raise UserError("the student has no teacher to learn from; train it by jobs.train with model.teacher set")
        return self._teacher[0]

    def teacher_logits(self, batch: dict[str, Tensor], encoded: tuple[Tensor, Tensor | None]) -> Tensor:
        """(B, L, V): the teacher's logits of each digit of the target given those before. `encoded` is what `encode`
        gave, here the teacher's own states."""
        with torch.no_grad():
            found = self.known("decoder", batch)
            return self.teacher.t5.logits(found[0] if found else self.teacher_states(batch, encoded))

    def teacher_states(self, batch: dict[str, Tensor], encoded: tuple[Tensor, Tensor | None]) -> Tensor:
        """(B, L, D): the states of the teacher's decoder that `teacher_logits` are made of."""
        given = functional.pad(self.source.sids[batch["target"]][:, :-1], (1, 0))  # the start, then all but the last
        t5, (states, padding) = self.teacher.t5, encoded
        return t5.decoder(t5.shared(given), t5.decoder.position_bias(given.shape[1]), 0.0, states, padding)

    def questions(self) -> list[Question]:
        """What `teacher_cache` can keep: states of an encoder that is not trained, and the teacher's answers."""
        config = {"width": self.source.config.d_model, "teacher_model": self.config.teacher_model}
        found = [Question("encoder", self.config.teacher_hash, config, self._ask_encoder, ("train", "val"))]
        if self.config.alpha > 0:
            found.append(Question("decoder", self.config.teacher_hash, config, self._ask_decoder, ("train",)))
        return found

    def _ask_encoder(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.encode(batch)[0], 2 + len(self.sizes) * batch["history_length"]

    def _ask_decoder(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        states = self.teacher_states(batch, self.teacher.encode(batch))
        return states, torch.full_like(batch["target"], states.shape[1])

    def set_known(self, known: dict[str, States]) -> None:
        """Takes the tables that answer `questions`."""
        self._known = known

    def ask(self, batch: dict[str, Tensor]) -> Answer:
        """What does not change while the student learns: encoded histories, and the teacher's logits cut to what the
        heads predict, level after level (B, O), none where alpha is 0."""
        states, padding = self.encode(batch)
        if self.config.alpha == 0:
            return states, padding, states.new_zeros((len(states), 0))
        logits = self.teacher_logits(batch, (states, padding))
        spans = [self.span(level) for level in range(self.config.m, len(self.sizes))]
        cut = [logits[:, self.config.m + i].narrow(-1, *span) for i, span in enumerate(spans)]
        return states, padding, torch.cat(cut, -1)

    def span(self, level: int) -> tuple[int, int]:
        """(first token, number of tokens) that the level's head predicts."""
        if self.config.logits == "vocabulary":
            return 0, self.source.end + 1
        return self.first_token[level], self.sizes[level]

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Equation 3 summed over the student's digits, each given the target's before it (unit `request`)."""
        config, levels = self.config, range(self.config.m, len(self.sizes))
        states, padding, soft = self._memory(batch, self.ask) if self._memory else self.ask(batch)
        context = self.context(states, padding)
        tokens = self.source.sids[batch["target"]]  # (B, L)
        codes = tokens - self.first
        spans = [self.span(level) for level in levels]
        taught = soft.split([count for _, count in spans], -1) if config.alpha > 0 else [None] * len(spans)
        losses = []
        for level, (begin, count), teacher in zip(levels, spans, taught, strict=True):
            student = self.outputs(level, context, codes[:, None, :level])[:, 0, :count]
            losses.append(distillation_loss(student, teacher, tokens[:, level] - begin, config.alpha, config.tau))
        return {"loss": torch.stack(losses).sum()}

    def fast_supported(self) -> bool:
        """Whether the fast path covers this variant: the paper's main model."""
        config = self.config
        return (
            config.m == 0
            and (config.decoder, config.prefix, config.readout) == ("mlp", "concat", "attention")
            and config.logits == "codebook"
            and config.context_ffn
        )

    @recommender
    def recommend(
        self,
        batch: dict[str, Tensor],
        k: int,
        beam: int | None = None,
        path: Path | None = None,
        scores: Scores | None = None,
        constrained: bool | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(items, scores), each (B, k), by falling score; the search is the teacher's (see `beam_search`).

        Options left out are the config's. Without the trie (`constrained` False) there are no valid children
        and scores are the codebooks'. Where fewer than k items are found the tail is item -1 with score -inf.
        """
        beam = self.config.beam if beam is None else beam
        scores = self.config.scores if scores is None else scores
        path = self.config.path if path is None else path
        check_choice("scores", scores)
        check_choice("path", path)
        if path == "fast" and constrained is not False and self.fast_supported():
            walk, known = fast_walk(self), self.known("encoder", batch)
            z = walk.read(*known) if known else walk.context(batch)
            return walk.walk(z, k, beam, children=scores == "children")
        scorer = StudentScorer(self, batch)
        if constrained is False:
            return unconstrained_beam_search(scorer, self.trie, k, beam)
        return beam_search(scorer, self.trie, k, beam, children=scores == "children")


class StudentScorer:
    """A `Scorer` (see `beam.py`): the student's codebook log-probabilities, after the teacher's for the first m
    digits, which keep its normalisation over the whole vocabulary."""

    def __init__(self, student: SidMlp, batch: dict[str, Tensor]) -> None:
        self.student, self.m = student, student.config.m
        states, padding = student.encode(batch)
        self.context = student.context(states, padding)
        self.prefix = batch["history"].new_zeros((len(states), 1, 0))
        if self.m > 0:
            source = student.source
            self.teacher = SharedKV(source.t5, states, padding, source.first_token, source.sizes)

    def start(self) -> Tensor:
        return (self.teacher.start() if self.m > 0 else self._score(0)[:, 0]).float()

    def step(self, parents: Tensor, tokens: Tensor) -> Tensor:
        level = self.prefix.shape[2] + 1
        before = self.prefix.gather(1, parents.unsqueeze(-1).expand(-1, -1, level - 1))
        self.prefix = torch.cat([before, tokens.unsqueeze(-1)], -1)  # (B, W, level)
        return self.teacher.step(parents, tokens).float() if level < self.m else self._score(level)

    def _score(self, level: int) -> Tensor:
        return self.student.logits(level, self.context, self.prefix).float().log_softmax(-1)


def teach(model: nn.Module, config: SidMlpConfig, catalogue: Catalogue) -> None:
    """Loads the teacher of a resolved config into a new student."""
    cast(SidMlp, model).set_teacher(teachers.load(config, catalogue))
