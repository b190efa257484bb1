"""LC-Rec (Zheng et al., 2024): a causal language model that reads semantic IDs and writes the next one.

    python -m jobs.train --config jobs/configs/lc_rec.yaml --tables TABLES --sids SIDS --storage runs --name lc_rec \\
        --model.lm meta-llama/Llama-2-7b-hf

`lm` is any causal language model of `transformers`, trained in full or by LoRA. Without
one, a small LLaMA is trained from random weights. Codes are new tokens. Prompts are
instructions (`prompts.py`); the loss is that of the response, over words and codes
together. If the log has titles of items, the tasks of the paper that need titles are
trained too: in each batch a share of rows, on items drawn from the whole catalogue.

All semantic IDs have the same number of codes, so no token ends them.

Shapes: `B` requests, `L` levels (codes of an item), `D` width, `V` words of the
language model, `R` rows of a task, `M` tokens of the longest title, `n` tokens of the
longest response.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import check_dropout, check_least, check_positive
from models.retrieval.backbones.causal_lm import (
    LmBackbone,
    Segment,
    concat_segments,
)
from models.retrieval.data import Catalogue, RequestBatch
from models.retrieval.decoders.causal_lm import LmDecoder
from models.retrieval.language.prompts import (
    TASKS,
    Pretrained,
    Tokenizer,
    Words,
    encode_prompt,
    encode_titles,
    read_titles,
)
from models.retrieval.parts import SidTokens, real_positions
from models.retrieval.retriever import Retriever
from models.storage.tables import UserError
from models.text import language_model
from models.training.distributed import global_mean


@dataclass
class LcRecConfig:
    """Options of LC-Rec; default sizes are a small LLaMA with random weights, unlike
    the paper's.
    """

    lm: str = field(default="", metadata={"names": "encoder"})
    """Pretrained causal language model, a Hugging Face name or a folder (LLaMA of 7
    billion parameters in the paper, LLaMA-2 in SID-MLP's Appendix D.1); read when a
    training begins. Empty: one of the sizes below, from random weights."""
    width: int = 256
    """Width of the states, if `lm` is empty."""
    num_layers: int = 8
    """Blocks, if `lm` is empty."""
    num_heads: int = 4
    """Attention heads, if `lm` is empty."""
    ffn_width: int = 704
    """Inner width of the feed-forward layers, if `lm` is empty; LLaMA has 8/3 of the
    width."""
    dropout: float = 0.0
    """Dropout of attention, if `lm` is empty (LLaMA has none)."""
    max_words: int = 8000
    """Words of titles in the vocabulary at most, if `lm` is empty; other words are
    unknown."""
    lora_rank: int = 0
    """Rank of LoRA on all linear layers of the language model; 0 trains the model in
    full, as the paper does."""
    lora_alpha: float = 32.0
    """LoRA's products are scaled by this over the rank."""
    lora_dropout: float = 0.05
    """Dropout before LoRA's products."""
    tasks: list[str] = field(default_factory=lambda: list(TASKS))
    """Training tasks: `next` (history -> codes), `next_title` (history -> title),
    `title_to_item`, `item_to_title`. All but the first need titles, and are left out if
    the log has none (Sec. 3.3 of LC-Rec)."""
    title: str = "title"
    """Text column of the items that holds their title, as named in the source file."""
    title_tokens: int = 32
    """Tokens of a title at most."""
    task_share: float = 0.25
    """Rows of each task other than `next`, as a share of the batch's requests; the
    paper mixes whole data sets."""
    max_history: int = 20
    """Latest items read (public settings of LC-Rec)."""
    beam: int = 20
    """Beams when recommending (Sec. 4.1 of LC-Rec)."""
    constrained: bool = True
    """Whether decoding keeps to the trie; without it, tuples of no item are dropped in
    the end."""
    lm_model: dict[str, Any] = field(default_factory=dict)
    """Config of the language model, filled in before training."""
    prompt: dict[str, list[int]] = field(default_factory=dict)
    """Tokens of the prompt of `next`, filled in before training."""

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


def choose_tokenizer(
    config: LcRecConfig, titles: list[str] | None, rows: int = 0
) -> Tokenizer:
    """Return the tokenizer; `rows` is the number of rows of a pretrained model's embedding."""
    if config.lm:
        return Pretrained(config.lm, rows)
    return Words(titles or [], config.max_words)


class LcRec(Retriever):
    """A language model as backbone, and its output layer over codes as decoder."""

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
        longest = items + words + response
        lm = language_model.build_model(config.lm_model, longest)
        tied = language_model.has_tied_embeddings(lm)
        if config.lora_rank:
            language_model.add_lora(
                lm, config.lora_rank, config.lora_alpha, config.lora_dropout
            )
        backbone = LmBackbone(tokens, lm, config.prompt, config.max_history)
        super().__init__(config, catalogue, backbone, LmDecoder(backbone, tied))
        self._texts: Texts | None = None  # not saved with the weights

    @classmethod
    def resolve_config(cls, config: LcRecConfig, catalogue: Catalogue) -> LcRecConfig:
        """Return the config with the language model's config, the prompt's tokens, and the tasks that the log has titles for."""
        if config.lm_model:
            return config
        titles = read_titles(catalogue, config.title)
        tokenizer = choose_tokenizer(config, titles)
        if config.lm:
            lm_model = language_model.pretrained_config(config.lm)
        else:
            lm_model = language_model.llama_config(
                tokenizer.size,
                config.width,
                config.num_layers,
                config.num_heads,
                config.ffn_width,
                config.dropout,
            )
        tasks = config.tasks if titles is not None else ["next"]
        return replace(
            config,
            lm_model=lm_model,
            prompt=encode_prompt(tokenizer, "next"),
            tasks=tasks,
        )

    def prepare_training(
        self, catalogue: Catalogue, datasets: Mapping[str, Any]
    ) -> list[str]:
        """Load the pretrained weights that the config names, and the titles that its tasks need."""
        config = self.config
        if config.lm:
            language_model.load_pretrained(self.backbone.lm, config.lm)
            init_codes(self)
        tasks = [task for task in config.tasks if task != "next"]
        if not tasks:
            return [
                f"tasks: next alone; the others need a text '{config.title}' of the items, and to be in model.tasks"
            ]
        titles = read_titles(catalogue, config.title)
        if titles is None:
            raise UserError(
                f"the items have no text '{config.title}', which the tasks {', '.join(tasks)} are of; set model.title to "
                f"one of the source file, or model.tasks to [next]"
            )
        tokenizer = choose_tokenizer(config, titles, self.backbone.vocabulary)
        tokens, lengths = encode_titles(tokenizer, titles, config.title_tokens)
        words = {task: encode_prompt(tokenizer, task) for task in tasks}
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
        """Set the titles that the tasks other than `next` read and write."""
        device = self.tokens.items.device
        self._texts = replace(
            texts, titles=texts.titles.to(device), lengths=texts.lengths.to(device)
        )

    def forward(self, batch: RequestBatch) -> dict[str, Tensor]:
        """Return the cross-entropy of the responses' tokens, the mean over rows of each row's mean.

        With several tasks, the loss of each task is returned too.
        """
        count = len(batch.target)
        prompts = self.backbone.prompts(batch)
        response = self.backbone.response(batch.target)
        losses = {"next": self.response_loss(prompts, response)}
        rows = {"next": count}
        for task in self.config.tasks:
            if self._texts is not None and task != "next":
                rows[task] = max(1, round(self.config.task_share * count))
                prompts, response = self._texts.example(
                    self.backbone, task, batch, rows[task]
                )
                losses[task] = self.response_loss(prompts, response)
        total = torch.stack([rows[task] * losses[task] for task in losses]).sum()
        result = {"loss": global_mean(total / sum(rows.values()), count)}
        if len(losses) > 1:
            result |= {f"{task}_loss": losses[task].detach() for task in losses}
        return result

    def response_loss(self, prompts: list[Segment], response: Segment) -> Tensor:
        """Return the mean over rows of the mean cross-entropy of a response's tokens.

        Args:
            prompts: Segments before the response.
            response: (R, n) tokens, and which of them are real; real tokens come first.
        """
        target, mask = response
        tokens, lengths = concat_segments([*prompts, response])
        states = self.backbone.run(self.backbone.embed(tokens))[0]
        first = lengths - mask.sum(1) - 1  # state before the response's first token
        offset = torch.arange(target.shape[1], device=target.device)
        position = (first.unsqueeze(1) + offset).clamp(max=tokens.shape[1] - 1)
        states = states.take_along_dim(position.unsqueeze(-1), 1)  # (R, n, D)
        lm: Any = self.backbone.lm
        word_logits = lm.get_output_embeddings()(states)  # (R, n, V)
        code_logits = functional.linear(states, self.decoder.rows())
        logits = torch.cat([word_logits, code_logits], -1).float()
        is_code = target >= self.backbone.vocabulary
        index = torch.where(is_code, target - self.tokens.first[0], target)
        losses = functional.cross_entropy(
            logits.flatten(0, 1), index.flatten(), reduction="none"
        ).view_as(target)
        return ((losses * mask).sum(1) / mask.sum(1)).mean()


def require_lc_rec(teacher: Retriever) -> LcRec:
    """Return the teacher, or raise a UserError if it is no LC-Rec."""
    if not isinstance(teacher, LcRec):
        raise UserError(
            f"the teacher is a '{teacher.name}', and this model is made of the parts of a language model; give "
            f"an LC-Rec as model.teacher"
        )
    return teacher


@dataclass(frozen=True)
class Texts:
    """Titles of all items, and the prompt around them in each task."""

    titles: Tensor
    """(N, M) tokens, padded with 0."""
    lengths: Tensor
    """(N,) number of tokens of each title."""
    prompts: dict[str, tuple[Tensor, Tensor]]
    """Tokens before and after the input of a task."""
    end: int
    """Token that ends a title."""

    def title(self, items: Tensor) -> Segment:
        """Return the titles of `items` (R,)."""
        return self.titles[items], real_positions(
            self.lengths[items], self.titles.shape[1]
        )

    def response(self, items: Tensor) -> Segment:
        """Return the titles of `items` (R,) as responses, with the end token."""
        tokens, mask = self.title(items)
        tokens, lengths = concat_segments(
            [
                (tokens, mask),
                (torch.full_like(tokens[:, :1], self.end), mask[:, :1] | True),
            ]
        )
        return tokens, real_positions(lengths, tokens.shape[1])

    def example(
        self, backbone: LmBackbone, task: str, batch: RequestBatch, rows: int
    ) -> tuple[list[Segment], Segment]:
        """Return prompts and responses of `rows` examples of a task.

        They are the batch's first requests, or items drawn from the whole catalogue.
        """
        device = batch.target.device
        before, after = (words.to(device) for words in self.prompts[task])
        if task == "next_title":
            part = batch.select("B", slice(rows))
            items, given = part.target, backbone.history_tokens(part)
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
        ) if task == "title_to_item" else self.response(items)


@torch.no_grad()
def init_codes(module: LcRec) -> None:
    """Initialise the codes' tokens around the mean of the words, as `transformers` does for new tokens."""
    lm: Any = module.backbone.lm
    pairs = [(module.backbone.embedding.weight, lm.get_input_embeddings().weight)]
    if module.decoder.output is not None:
        pairs.append((module.decoder.output.weight, lm.get_output_embeddings().weight))
    for new, words in pairs:
        new.copy_(words.mean(0) + torch.randn_like(new) * words.std(0))
