"""LC-Rec computes the pass of the library's language model without a cache.

It trains on the tokens of responses alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from core.schemas import Inputs
from models.retrieval.lc_rec.lc_rec import LcRec
from models.retrieval.lc_rec.prompts import (
    INSTRUCTIONS,
    TEMPLATE,
    Words,
    read_titles,
)
from models.text import language_model
from models.training.fit_config import FitConfig
from models.training_run import TrainingRun
from tests.fixtures import training_tables
from tests.fixtures.small_lc_rec import (
    KINDS,
    build_kind,
    build_lc_rec,
    run_library,
    select_history,
    write_out_prompt,
)
from tests.fixtures.small_retrieval import make_requests
from tests.fixtures.trainings import CASES, build_training, first_epoch


def embed_tokens(model: LcRec, tokens: list[int]) -> Tensor:
    """Return the embeddings (S, D) of words and codes, one by one."""
    backbone = model.backbone
    words, codes = backbone.words().weight, backbone.embedding.weight
    rows = []
    for token in tokens:
        is_word = token < backbone.vocabulary
        rows.append(words[token] if is_word else codes[token - backbone.vocabulary])
    return torch.stack(rows)


def compute_library_loss(model: LcRec, prompt: list[int], item: Tensor) -> Tensor:
    """Return the cross-entropy over words and codes of the tokens of an item.

    The library ignores the label -100, which the tokens of the prompt have.
    """
    tokens = model.backbone.item_tokens(item).tolist()
    states = run_library(model, embed_tokens(model, prompt + tokens))
    lm: Any = model.backbone.lm
    word_logits = lm.get_output_embeddings()(states)
    code_logits = states @ model.decoder.output_weight().T
    logits = torch.cat([word_logits, code_logits], -1)
    # the logits have no column for token 0 of the codes, which is padding
    labels = [-100] * len(prompt) + [token - 1 for token in tokens]
    return functional.cross_entropy(
        logits[:-1], torch.tensor(labels[1:]), ignore_index=-100
    )


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_equal_the_librarys_with_the_prompt_ignored(kind):
    model, batch = build_kind(kind), make_requests(5)
    parameters = list(model.parameters())
    losses = []
    for row in range(5):
        prompt = write_out_prompt(model, select_history(batch, row))
        losses.append(compute_library_loss(model, prompt, batch.target[row]))
    expected_loss = torch.stack(losses).mean()
    expected = torch.autograd.grad(expected_loss, parameters)

    loss = model(batch)["loss"]
    gradients = torch.autograd.grad(loss, parameters)

    torch.testing.assert_close(loss, expected_loss, rtol=1e-4, atol=1e-4)
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def titled_tables(tmp_path_factory) -> tuple[str, str]:
    """Tables and semantic IDs of items with titles."""
    return training_tables.write_tables(tmp_path_factory.mktemp("lc_rec"), titles=True)


def read_row(tokens: Tensor, is_real: Tensor, row: int, words: Words) -> str:
    """Return the tokens of a row as text; code c is written as `c` and its number."""
    names = {number: word for word, number in words.number.items()}
    names |= {0: "?", 1: "<", 2: ">"}
    text = []
    for token in tokens[row][is_real[row]].tolist():
        is_word = token < words.size
        text.append(names[token] if is_word else f"c{token - words.size - 1}")
    return " ".join(text)


@pytest.fixture(scope="module")
def titled_setup(titled_tables) -> TrainingRun:
    """A training on items with titles."""
    fit = FitConfig(batch_size=8)
    return build_training(CASES["lc_rec"], fit, Inputs(*titled_tables))


@pytest.mark.parametrize("task", ["next_title", "title_to_item", "item_to_title"])
def test_each_task_is_an_instruction_and_its_response(task, titled_setup):
    """Decode the tokens of instructions and responses to text."""
    model: Any = titled_setup.model
    titles = read_titles(titled_setup.catalogue, "title")
    assert titles is not None
    assert (titles[0], titles[5]) == ("", "Rubber hose, long green")
    words = Words(titles, 8000)
    batch = next(first_epoch(titled_setup))
    items = batch.target[:4]
    if task != "next_title":
        torch.manual_seed(3)
        items = torch.randint(0, 24, (4,))

    torch.manual_seed(3)
    prompts, response = model._texts.make_examples(model.backbone, task, batch, 4)

    for row, item in enumerate(items.tolist()):
        parts = [read_row(*prompt, row, words) for prompt in prompts]
        prompt_text = " ".join(part for part in parts if part)
        response_text = read_row(*response, row, words)
        title = " ".join(titles[item].lower().replace(",", " ,").split())
        codes = f"c{item % 4} c{4 + item // 4} c10"
        assert prompt_text.startswith("< # # # instruction : ")
        assert prompt_text.endswith("# # # response :")
        if task == "title_to_item":
            assert f"this title : {title} ?".replace("  ", " ") in prompt_text
            assert response_text == codes
        else:
            assert response_text == f"{title} >".strip()
        if task == "item_to_title":
            assert f"this item : {codes} ?" in prompt_text


def save_pretrained(folder: Path) -> Any:
    """Save a language model and a tokenizer in the layout of a model hub."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    text = " ".join([*INSTRUCTIONS.values(), TEMPLATE]).replace("{}", "").split()
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for word in text:
        vocabulary.setdefault(word, len(vocabulary))
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
    ).save_pretrained(folder)

    torch.manual_seed(5)
    config = language_model.llama_config(64, 24, 2, 2, 32, 0.0)
    lm: Any = language_model.build_model(config, 10)
    torch.nn.init.normal_(lm.get_input_embeddings().weight, mean=0.5, std=0.02)
    lm.save_pretrained(folder)
    return lm


def test_a_pretrained_model_gives_weights_and_words_and_codes_start_at_their_mean(
    titled_tables, tmp_path
):
    pretrained = save_pretrained(tmp_path / "lm")
    setup = build_training(
        {"name": "lc_rec", "lm": str(tmp_path / "lm")},
        FitConfig(batch_size=8),
        Inputs(*titled_tables),
    )
    model: Any = setup.model

    weights = model.backbone.lm.state_dict()
    for name, value in pretrained.state_dict().items():
        assert torch.equal(weights[name], value)
    words = pretrained.get_input_embeddings().weight
    codes = model.backbone.embedding.weight
    torch.testing.assert_close(codes.mean(0), words.mean(0), atol=0.02, rtol=0)
    assert model.config.lm_model["hidden_size"] == 24
    assert model.config.prompt["before"][0] == 1
    model(next(first_epoch(setup)))["loss"].backward()
    assert all(p.grad is not None for p in model.parameters())


def test_low_rank_training_changes_the_products_and_the_codes_alone():
    model, batch = build_lc_rec(lora_rank=2).eval(), make_requests(6)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    first_loss = model(batch)["loss"]
    first_loss.backward()
    optimizer.step()

    assert model(batch)["loss"] < first_loss
    changed = {
        name
        for name, value in model.named_parameters()
        if not torch.equal(value, before[name])
    }
    assert changed == trained
    assert "backbone.embedding.weight" in trained
    assert all("lora_" in name for name in trained if ".lm." in name)
