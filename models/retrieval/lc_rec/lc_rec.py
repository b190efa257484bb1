r"""LC-Rec (Zheng et al., 2024): a causal language model that generates semantic IDs.

    python -m jobs.train --config jobs/configs/retrieval/lc_rec.yaml --tables TABLES \
        --sids SIDS --storage runs --name lc_rec --model.lm meta-llama/Llama-2-7b-hf

`lm` is any causal language model of `transformers`, trained in full or by LoRA. If `lm`
is empty, a small LLaMA is trained from random weights. Codes are new tokens. Prompts
are instructions (`prompts.py`). The loss is the cross-entropy of the response over
words and codes together. If the log has item titles, training includes the paper's
tasks on titles: a share of each batch, on random items of the catalogue.

All semantic IDs have the same number of codes, so they need no end token.

Shapes: `B` requests, `L` levels (codes of an item), `D` width, `V` words of the
language model, `R` rows of a task, `M` tokens of the longest title, `n` tokens of the
longest response.
"""

from __future__ import annotations

import dataclasses
from dataclasses import field, replace
from typing import Any

import torch
from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional

from core.options import STRICT, Dropout, NamedConfig
from models.retrieval.data import Catalogue, RequestBatch
from models.retrieval.lc_rec.backbone import (
    LmBackbone,
    Segment,
    concat_segments,
    full_segment,
)
from models.retrieval.lc_rec.decoder import LmDecoder
from models.retrieval.lc_rec.prompts import (
    MAX_TITLE_TOKENS,
    TASKS,
    Pretrained,
    Task,
    Tokenizer,
    Words,
    encode_prompt,
    encode_titles,
    read_titles,
)
from models.retrieval.retriever import Retriever, SidTokens, real_positions
from models.text import language_model
from models.text.pretrained import EncoderPath
from models.training.distributed import global_mean

TASK_SHARE = 0.25
"""Number of rows of each task other than `next`, as a share of the batch's requests;
the paper mixes whole data sets."""


@dataclass(config=STRICT)
class LcRecConfig(NamedConfig):
    """Options of LC-Rec; default sizes are a small LLaMA with random weights.

    The paper fine-tunes a pretrained LLaMA of 7 billion parameters (`lm`).
    """

    lm: EncoderPath = ""
    """Pretrained causal language model, a Hugging Face name or a folder (LLaMA of 7
    billion parameters in the paper, LLaMA-2 in Appendix D.1 of SID-MLP), loaded when
    training starts. Empty: a LLaMA of the sizes below with random weights."""
    width: PositiveInt = 256
    """Width of the states, if `lm` is empty."""
    num_layers: PositiveInt = 8
    """Number of blocks, if `lm` is empty."""
    num_heads: PositiveInt = 4
    """Attention heads, if `lm` is empty."""
    ffn_width: PositiveInt = 704
    """Inner width of the feed-forward layers, if `lm` is empty; LLaMA has 8/3 of the
    width."""
    dropout: Dropout = 0.0
    """Dropout of attention, if `lm` is empty (LLaMA has none)."""
    max_words: NonNegativeInt = 8000
    """Most words of titles in the vocabulary, if `lm` is empty; other words are
    unknown."""
    lora_rank: NonNegativeInt = 0
    """Rank of LoRA on all linear layers of the language model; 0 trains the model in
    full, as in the paper."""
    tasks: list[Task] = field(default_factory=lambda: list(TASKS))
    """Training tasks: `next` (history -> codes), `next_title` (history -> title),
    `title_to_item`, `item_to_title`. All but `next` need titles, and are skipped if the
    log has none (Sec. 3.3 of LC-Rec)."""
    title: str = "title"
    """Text column of the items with their title, as named in the source file."""
    max_history: PositiveInt = 20
    """Number of latest items read (public settings of LC-Rec)."""
    beam: PositiveInt = 20
    """Number of beams when recommending (Sec. 4.1 of LC-Rec)."""
    lm_model: dict[str, Any] = field(default_factory=dict)
    """Config of the language model, filled in before training."""
    prompt: dict[str, list[int]] = field(default_factory=dict)
    """Tokens of the prompt of `next`, filled in before training."""

    def __post_init__(self) -> None:
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"width {self.width} does not give each of {self.num_heads} heads an "
                f"even width"
            )
        if "next" not in self.tasks:
            raise ValueError(f"tasks are {self.tasks}, without next")


def choose_tokenizer(config: LcRecConfig, titles: list[str] | None) -> Tokenizer:
    """Return the tokenizer of `config.lm`, or a word tokenizer built from titles.

    Args:
        config: Options of LC-Rec.
        titles: Titles of all items, read only if `config.lm` is empty.
    """
    if config.lm:
        return Pretrained(config.lm)
    return Words(titles or [], config.max_words)


class LcRec(Retriever):
    """A language model as backbone, with an output layer over codes as decoder."""

    name = "lc_rec"
    config_class = LcRecConfig
    config: LcRecConfig
    backbone: LmBackbone
    decoder: LmDecoder

    def __init__(self, config: LcRecConfig, catalogue: Catalogue) -> None:
        config = self.resolve_config(config, catalogue)
        tokens = SidTokens(catalogue, 1)
        prompt, levels = config.prompt, tokens.levels
        words = sum(len(part) for part in prompt.values())
        longest = words + config.max_history * (levels + len(prompt["between"]))
        # a title with the words of its task may be longer than the codes
        is_text_task = config.tasks != ["next"]
        longest += max(levels, is_text_task * (MAX_TITLE_TOKENS + words))
        lm = language_model.build_model(config.lm_model, longest)
        tied = language_model.has_tied_embeddings(lm)
        if config.lora_rank:
            language_model.add_lora(lm, config.lora_rank)
        backbone = LmBackbone(tokens, lm, config.prompt, config.max_history)
        super().__init__(config, catalogue, backbone, LmDecoder(backbone, tied))
        self._texts: Texts | None = None  # set for training

    @classmethod
    def resolve_config(cls, config: LcRecConfig, catalogue: Catalogue) -> LcRecConfig:
        """Return the config with `lm_model` and `prompt` filled in.

        If the items have no titles, `tasks` is reduced to `next`.
        """
        if config.lm_model:
            return config
        titles = read_titles(catalogue, config.title)
        tokenizer = choose_tokenizer(config, titles)
        if isinstance(tokenizer, Words):
            lm_model = language_model.llama_config(
                tokenizer.size,
                config.width,
                config.num_layers,
                config.num_heads,
                config.ffn_width,
                config.dropout,
            )
        else:
            lm_model = language_model.pretrained_config(config.lm)
        tasks: list[Task] = config.tasks if titles is not None else ["next"]
        return replace(
            config,
            lm_model=lm_model,
            prompt=encode_prompt(tokenizer, "next"),
            tasks=tasks,
        )

    def prepare_training(self, catalogue: Catalogue) -> list[str]:
        """Load the pretrained weights, and the titles that the tasks need."""
        config = self.config
        if config.lm:
            language_model.load_pretrained(self.backbone.lm, config.lm)
            self.draw_codes()
        tasks = [task for task in config.tasks if task != "next"]
        titles = read_titles(catalogue, config.title) if tasks else None
        if titles is None:
            return [
                f"tasks: next; other tasks need an entry in model.tasks, and a text "
                f"column '{config.title}' of the items"
            ]
        tokenizer = choose_tokenizer(config, titles)
        tokens, lengths = encode_titles(tokenizer, titles)
        prompts: dict[str, tuple[Tensor, Tensor]] = {}
        for task in tasks:
            words = encode_prompt(tokenizer, task)
            prompts[task] = torch.tensor(words["before"]), torch.tensor(words["after"])
        device = self.tokens.items.device
        self._texts = Texts(tokens.to(device), lengths.to(device), prompts)
        return [
            f"tasks: next, and {', '.join(tasks)} on the text column '{config.title}' "
            "of the items"
        ]

    @torch.no_grad()
    def draw_codes(self) -> None:
        """Draw the weights of codes from a normal distribution, fitted to the words'.

        Mean and standard deviation of each dimension are the words'. `transformers`
        also initialises new tokens around the words' mean.
        """
        lm: Any = self.backbone.lm
        layers: list[Any] = [(self.backbone.embedding, lm.get_input_embeddings())]
        if self.decoder.output is not None:
            layers.append((self.decoder.output, lm.get_output_embeddings()))
        for codes, words in layers:
            noise = torch.randn_like(codes.weight)
            mean, std = words.weight.mean(0), words.weight.std(0)
            codes.weight.copy_(mean + noise * std)

    def forward(self, batch: RequestBatch) -> dict[str, Tensor]:
        """Return the mean over rows of each row's `response_loss`.

        With several tasks, the loss of each task is returned, too.
        """
        num_requests = len(batch.target)
        prompts = self.backbone.prompts(batch)
        response = full_segment(self.backbone.item_tokens(batch.target))
        losses = {"next": self.response_loss(prompts, response)}
        rows = {"next": num_requests}
        for task in self.config.tasks:
            if self._texts is not None and task != "next":
                rows[task] = max(1, round(TASK_SHARE * num_requests))
                prompts, response = self._texts.make_examples(
                    self.backbone, task, batch, rows[task]
                )
                losses[task] = self.response_loss(prompts, response)
        total = torch.stack([rows[task] * losses[task] for task in losses]).sum()
        result = {"loss": global_mean(total / sum(rows.values()), num_requests)}
        if len(losses) > 1:
            result |= {f"{task}_loss": losses[task].detach() for task in losses}
        return result

    def response_loss(self, prompts: list[Segment], response: Segment) -> Tensor:
        """Return the mean over rows of the mean cross-entropy of a response's tokens.

        Args:
            prompts: Segments before the response.
            response: Segment (R, n); its real tokens come first.
        """
        target, mask = response
        tokens, lengths = concat_segments([*prompts, response])
        states, _ = self.backbone.run(self.backbone.embed(tokens))
        # position before the response's first token
        first = lengths - mask.sum(1) - 1
        offset = torch.arange(target.shape[1], device=target.device)
        position = (first.unsqueeze(1) + offset).clamp(max=tokens.shape[1] - 1)
        states = states.take_along_dim(position.unsqueeze(-1), 1)  # (R, n, D)
        lm: Any = self.backbone.lm
        word_logits = lm.get_output_embeddings()(states)  # (R, n, V)
        code_logits = functional.linear(states, self.decoder.output_weight())
        logits = torch.cat([word_logits, code_logits], -1).float()
        is_code = target >= self.backbone.vocabulary
        index = torch.where(is_code, target - self.tokens.first[0], target)
        losses = functional.cross_entropy(
            logits.flatten(0, 1), index.flatten(), reduction="none"
        ).view_as(target)
        return ((losses * mask).sum(1) / mask.sum(1)).mean()


@dataclasses.dataclass(frozen=True)
class Texts:
    """Tokens of all items' titles, and of the prompts of each task."""

    titles: Tensor
    """(N, M + 1) tokens with the end token of titles, padded with 0."""
    lengths: Tensor
    """(N,) number of tokens of each title, without the end token."""
    prompts: dict[str, tuple[Tensor, Tensor]]
    """Tokens before and after the input of each task."""

    def make_examples(
        self, backbone: LmBackbone, task: str, batch: RequestBatch, rows: int
    ) -> tuple[list[Segment], Segment]:
        """Return prompts and responses of examples of a task.

        Args:
            backbone: Backbone that encodes histories and items.
            task: A task other than `next`.
            batch: Requests; `next_title` uses the first ones. Other tasks draw items
                from the whole catalogue.
            rows: Number R of examples; for `next_title` at most the number of requests.

        Returns:
            Segments of the prompt, and the response, with a row per example.
        """
        device = batch.target.device
        before, after = (tokens.to(device) for tokens in self.prompts[task])
        if task == "next_title":
            requests = batch.select("B", slice(rows))
            items, task_input = requests.target, backbone.history_tokens(requests)
        else:
            items = torch.randint(0, len(self.titles), (rows,), device=device)
            task_input = full_segment(backbone.item_tokens(items))
        titles, lengths = self.titles[items], self.lengths[items]
        response = titles, real_positions(lengths + 1, titles.shape[1])
        if task == "title_to_item":
            response = task_input
            task_input = titles[:, :-1], real_positions(lengths, titles.shape[1] - 1)
        return backbone.surround(before, task_input, after), response
