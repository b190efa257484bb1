"""LC-Rec (Zheng et al., 2024): a causal language model that reads a history of semantic IDs and writes the next one.

    python -m jobs.train --config jobs/configs/lc_rec.yaml --tables TABLES --sids SIDS --storage runs --name lc_rec \\
        --model.lm meta-llama/Llama-2-7b-hf

`lm` is any causal language model of `transformers`, trained whole or by LoRA; without one a small LLaMA is trained from
random weights. Codes are new tokens. Prompts are instructions (`prompts.py`), the loss is that of the response alone,
over words and codes together. Where the log has titles of items, those tasks of the paper that need them are trained
beside: of each batch a share, on items drawn from the whole catalogue.

Every semantic ID has as many codes, so none is ended by a token.

Shapes: `B` requests, `L` levels (codes of an item), `D` width, `V` words of the language model, `R` rows of a task, `M`
tokens of the longest title, `n` tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import check_dropout, check_least, check_positive
from models.retrieval.backbones.causal_lm import LmBackbone, Segment, joined
from models.retrieval.data import Catalogue
from models.retrieval.decoders.causal_lm import LmDecoder
from models.retrieval.language.prompts import (
    TASKS,
    Pretrained,
    Tokenizer,
    Words,
    encoded_titles,
    prompt,
    titles_of,
)
from models.retrieval.parts import SidTokens, real_positions
from models.retrieval.retriever import Retriever
from models.storage.tables import UserError
from models.text import language_model
from models.training.distributed import global_mean


@dataclass
class LcRecConfig:
    """LC-Rec; the sizes are those of a small LLaMA from random weights, which the paper has not."""

    lm: str = field(default="", metadata={"names": "encoder"})
    """Pretrained causal language model, a Hugging Face name or a folder (LLaMA of 7 billion parameters in the paper,
    LLaMA-2 in SID-MLP's Appendix D.1); read when a training begins. Empty: one of the sizes below, from random
    weights."""
    width: int = 256
    """Width of the states, where `lm` is empty."""
    num_layers: int = 8
    """Blocks, where `lm` is empty."""
    num_heads: int = 4
    """Attention heads, where `lm` is empty."""
    ffn_width: int = 704
    """Inner width of the feed-forward layers, where `lm` is empty; LLaMA has 8/3 of the width."""
    dropout: float = 0.0
    """Dropout of attention, where `lm` is empty (LLaMA has none)."""
    max_words: int = 8000
    """Most words of titles in the vocabulary, where `lm` is empty; others are one unknown word."""
    lora_rank: int = 0
    """Rank of LoRA on all linear layers of the language model; 0 trains all of it, as the paper does."""
    lora_alpha: float = 32.0
    """LoRA's products are scaled by this over the rank."""
    lora_dropout: float = 0.05
    """Dropout before LoRA's products."""
    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    """What is trained: `next` (history -> codes), `next_title` (history -> title), `title_to_item`, `item_to_title`;
    all but the first need titles and are left out where the log has none (Sec. 3.3 of LC-Rec)."""
    title: str = "title"
    """Text of the items that is their title, as the source file calls it."""
    title_tokens: int = 32
    """Tokens of a title that are read or written at most."""
    task_share: float = 0.25
    """Rows of each task beside `next` in a batch, as a share of its requests; the paper mixes whole data sets."""
    max_history: int = 20
    """Latest items read (public settings of LC-Rec)."""
    beam: int = 20
    """Beams when recommending (Sec. 4.1 of LC-Rec)."""
    constrained: bool = True
    """Whether decoding keeps to the trie; without it, tuples of no item are dropped in the end."""
    lm_model: dict[str, Any] = field(default_factory=dict)
    """The language model's own config, filled in before training."""
    prompt: dict[str, list[int]] = field(default_factory=dict)
    """Tokens of the words of the prompt that recommending reads, filled in before training."""

    def __post_init__(self) -> None:
        check_positive(
            self,
            (
                "width",
                "num_layers",
                "num_heads",
                "ffn_width",
                "title_tokens",
                "max_history",
                "beam",
            ),
        )
        check_least(self, ("max_words", "lora_rank"), 0)
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"width {self.width} gives {self.num_heads} heads no even width; give a multiple of "
                f"{2 * self.num_heads}"
            )
        check_dropout(self, "dropout", "lora_dropout")
        if not 0 < self.task_share <= 1:
            raise ValueError(
                f"task_share {self.task_share} is not in (0, 1]; leave tasks out with tasks: [next]"
            )
        if "next" not in self.tasks or not set(self.tasks) <= set(TASKS):
            raise ValueError(
                f"tasks are {self.tasks}; give 'next', which recommending asks, and others of {TASKS}"
            )


def tokenizer_of(
    config: LcRecConfig, titles: list[str] | None, rows: int = 0
) -> Tokenizer:
    """The words of the language model, whose embedding has so many `rows` where it is a pretrained one."""
    return (
        Pretrained(config.lm, rows)
        if config.lm
        else Words(titles or [], config.max_words)
    )


class LcRec(Retriever):
    """The language model as backbone, and its way from a prompt to codes as decoder."""

    name = "lc_rec"
    config_class = LcRecConfig
    supports_fsdp = True
    config: LcRecConfig
    backbone: LmBackbone
    decoder: LmDecoder

    def __init__(self, config: LcRecConfig, catalogue: Catalogue) -> None:
        config = self.resolve_config(config, catalogue)
        tokens = SidTokens(catalogue, 1)
        items = config.max_history * (tokens.levels + len(config.prompt["between"]))
        words = sum(len(part) for part in config.prompt.values())
        response = (
            tokens.levels
            if config.tasks == ["next"]
            else max(tokens.levels, config.title_tokens + words)
        )
        longest = (
            items + words + response
        )  # a title's prompt may be of more words than the codes'
        lm = language_model.build_model(config.lm_model, longest)
        tied = language_model.has_tied_embeddings(lm)
        if config.lora_rank:
            language_model.add_lora(
                lm, config.lora_rank, config.lora_alpha, config.lora_dropout
            )
        backbone = LmBackbone(tokens, lm, config.prompt, config.max_history)
        super().__init__(config, catalogue, backbone, LmDecoder(backbone, tied))
        self._texts: tuple[
            Texts, ...
        ] = ()  # no submodule: it is no part of the weights

    @classmethod
    def resolve_config(cls, config: LcRecConfig, catalogue: Catalogue) -> LcRecConfig:
        """Return the config with the language model's own, the prompt's tokens, and the tasks that the log has texts for."""
        if config.lm_model:
            return config
        titles = titles_of(catalogue, config.title)
        tokenizer = tokenizer_of(config, titles)
        if config.lm:
            made = language_model.pretrained_config(config.lm)
        else:
            made = language_model.llama_config(
                tokenizer.size,
                config.width,
                config.num_layers,
                config.num_heads,
                config.ffn_width,
                config.dropout,
            )
        tasks = config.tasks if titles is not None else ["next"]
        return replace(
            config, lm_model=made, prompt=prompt(tokenizer, "next"), tasks=tasks
        )

    def prepare_training(
        self, catalogue: Catalogue, datasets: Mapping[str, Any]
    ) -> list[str]:
        """Load the pretrained weights that the config names, and the titles that its tasks need."""
        config = self.config
        if config.lm:
            language_model.load_pretrained(self.backbone.lm, config.lm)
            start_codes(self)
        tasks = [task for task in config.tasks if task != "next"]
        if not tasks:
            return [
                f"tasks: next alone; the others need a text '{config.title}' of the items, and to be in model.tasks"
            ]
        titles = titles_of(catalogue, config.title)
        if titles is None:
            raise UserError(
                f"the items have no text '{config.title}', which the tasks {', '.join(tasks)} are of; set model.title to "
                f"one of the source file, or model.tasks to [next]"
            )
        tokenizer = tokenizer_of(config, titles, self.backbone.vocabulary)
        tokens, lengths = encoded_titles(tokenizer, titles, config.title_tokens)
        words = {task: prompt(tokenizer, task) for task in tasks}
        around = {
            task: (
                torch.tensor(words[task]["before"]),
                torch.tensor(words[task]["after"]),
            )
            for task in tasks
        }
        self.set_texts(Texts(tokens, lengths, around, tokenizer.end))
        return [
            f"tasks: next, and beside it {', '.join(tasks)} on the items' text '{config.title}'"
        ]

    def fsdp_blocks(self) -> list[nn.Module]:
        return language_model.find_blocks(self)

    def set_texts(self, texts: Texts) -> None:
        """Takes the titles that the tasks beside `next` are of."""
        device = self.tokens.items.device
        self._texts = (
            replace(
                texts, titles=texts.titles.to(device), lengths=texts.lengths.to(device)
            ),
        )

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Cross-entropy of the responses' tokens, the mean over rows of each row's mean (unit `request`); and that of
        each task, where there are several."""
        count = len(batch["target"])
        found = {
            "next": self.response_loss(
                self.backbone.prompts(batch), self.backbone.response(batch["target"])
            )
        }
        weights = {"next": count}
        for task in self.config.tasks if self._texts else []:
            if task != "next":
                weights[task] = max(1, round(self.config.task_share * count))
                found[task] = self.response_loss(
                    *self._texts[0].example(self.backbone, task, batch, weights[task])
                )
        loss = torch.stack([weights[task] * found[task] for task in found]).sum() / sum(
            weights.values()
        )
        loss = global_mean(loss, count)
        return {
            "loss": loss,
            **(
                {f"{task}_loss": found[task].detach() for task in found}
                if len(found) > 1
                else {}
            ),
        }

    def response_loss(self, prompts: list[Segment], response: Segment) -> Tensor:
        """Mean over rows of the mean cross-entropy of the tokens of `response` (R, n), whose real ones come first,
        after those of `prompts`."""
        target, mask = response
        tokens, lengths = joined([*prompts, response])
        states = self.backbone.run(self.backbone.embed(tokens))[0]
        first = (
            lengths - mask.sum(1) - 1
        )  # the state that gives the first token of the response
        at = first.unsqueeze(1) + torch.arange(target.shape[1], device=target.device)
        given = states.take_along_dim(
            at.clamp(max=tokens.shape[1] - 1).unsqueeze(-1), 1
        )  # (R, n, D)
        lm: Any = self.backbone.lm
        of_words = lm.get_output_embeddings()(given)  # (R, n, V)
        logits = torch.cat(
            [of_words, functional.linear(given, self.decoder.rows())], -1
        ).float()
        is_code = target >= self.backbone.vocabulary
        row = torch.where(
            is_code, target - self.tokens.first[0], target
        )  # codes stand behind the words
        losses = functional.cross_entropy(
            logits.flatten(0, 1), row.flatten(), reduction="none"
        ).view_as(target)
        return ((losses * mask).sum(1) / mask.sum(1)).mean()


def lc_rec_of(teacher: Retriever) -> LcRec:
    """The teacher. UserError for another model than LC-Rec."""
    if not isinstance(teacher, LcRec):
        raise UserError(
            f"the teacher is a '{teacher.name}', and this model is made of the parts of a language model; give "
            f"an LC-Rec as model.teacher"
        )
    return teacher


@dataclass(frozen=True)
class Texts:
    """Titles, and the words around them in each task."""

    titles: Tensor
    """(N, M) tokens, 0 behind each."""
    lengths: Tensor
    """(N,) tokens of each."""
    prompts: dict[str, tuple[Tensor, Tensor]]
    """Tokens before and after what a task gives."""
    end: int
    """What a title ends with."""

    def title(self, items: Tensor) -> Segment:
        """The titles of `items` (R,)."""
        return self.titles[items], real_positions(
            self.lengths[items], self.titles.shape[1]
        )

    def written(self, items: Tensor) -> Segment:
        """The titles of `items` (R,) as responses, which end."""
        tokens, mask = self.title(items)
        tokens, lengths = joined(
            [
                (tokens, mask),
                (torch.full_like(tokens[:, :1], self.end), mask[:, :1] | True),
            ]
        )
        return tokens, real_positions(lengths, tokens.shape[1])

    def example(
        self, backbone: LmBackbone, task: str, batch: dict[str, Tensor], rows: int
    ) -> tuple[list[Segment], Segment]:
        """Prompts and responses of `rows` examples of the task: the batch's first requests, or items drawn from the
        whole catalogue."""
        device = batch["target"].device
        before, after = (words.to(device) for words in self.prompts[task])
        if task == "next_title":
            part = {name: value[:rows] for name, value in batch.items()}
            items, given = part["target"], backbone.history_tokens(part)
        else:
            items = torch.randint(0, len(self.titles), (rows,), device=device)
            given = (
                self.title(items)
                if task == "title_to_item"
                else backbone.response(items)
            )
        prompts = [
            backbone.constant(before, items),
            given,
            backbone.constant(after, items),
        ]
        return prompts, backbone.response(
            items
        ) if task == "title_to_item" else self.written(items)


@torch.no_grad()
def start_codes(module: LcRec) -> None:
    """Starts the codes' tokens as `transformers` does new ones of a pretrained model: around the mean of the words."""
    lm: Any = module.backbone.lm
    pairs = [(module.backbone.embedding.weight, lm.get_input_embeddings().weight)]
    if module.decoder.output is not None:
        pairs.append((module.decoder.output.weight, lm.get_output_embeddings().weight))
    for new, words in pairs:
        new.copy_(words.mean(0) + torch.randn_like(new) * words.std(0))
