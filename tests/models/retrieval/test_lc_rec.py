"""LC-Rec computes the pass of the library's language model without a cache.

It trains on the tokens of responses alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from models.build import load_model
from models.retrieval.data import Catalogue
from models.retrieval.language.lc_rec import LcRec, LcRecConfig
from models.retrieval.language.prompts import (
    INSTRUCTIONS,
    TASKS,
    TEMPLATE,
    Words,
    read_titles,
)
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.text import language_model
from models.training.fit import FitConfig, fit
from models.training_run import TrainingRun
from tests.fixtures import training_tables
from tests.fixtures.small_lc_rec import (
    KINDS,
    SIZES,
    TRAINED_SIZES,
    build_kind,
    build_lc_rec,
    run_library,
    select_history,
    write_out_prompt,
)
from tests.fixtures.small_retrieval import ITEMS, build_catalogue, make_requests
from tests.fixtures.trainings import build_training


def embed_tokens(model: LcRec, tokens: list[int]) -> Tensor:
    """Return the embeddings (S, D) of words and codes, one by one."""
    backbone = model.backbone
    words, codes = backbone.words().weight, backbone.embedding.weight
    rows = []
    for token in tokens:
        is_word = token < backbone.vocabulary
        rows.append(words[token] if is_word else codes[token - backbone.vocabulary])
    return torch.stack(rows)


def compute_states(model: LcRec, tokens: list[int]) -> Tensor:
    """Return the states (S, D) of the library's pass over one row of tokens."""
    return run_library(model, embed_tokens(model, tokens))


def codes_to_tokens(model: LcRec, codes: Tensor) -> list[int]:
    """Return the tokens of an item with `codes` (L,)."""
    return (model.backbone.vocabulary + codes + model.tokens.offset).tolist()


def compute_code_states(model: LcRec, prompt: list[int], codes: Tensor) -> Tensor:
    """Return the states (L, D) from which the codes (L,) after a prompt are read."""
    tokens = codes_to_tokens(model, codes)
    return compute_states(model, prompt + tokens)[-len(tokens) - 1 : -1]


def score_items(model: LcRec, history: list[int]) -> Tensor:
    """Return the log-probability (N,) of each item by a pass over prompt and codes."""
    prompt = write_out_prompt(model, history)
    scores = []
    for codes in build_catalogue().sids:
        total = 0.0
        code_states = compute_code_states(model, prompt, codes)
        for level, code in enumerate(codes.tolist()):
            logits = model.decoder.level_logits(level, code_states[level])
            total += logits.log_softmax(-1)[code].item()
        scores.append(total)
    return torch.tensor(scores)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_search_scores_equal_passes_over_prompt_and_codes_of_each_item(
    kind: str,
) -> None:
    model, batch = build_kind(kind), make_requests(4)

    items, scores = model.recommend(batch, ITEMS, beam=ITEMS)
    narrow_items, narrow_scores = model.recommend(batch, 5, beam=8)

    for row in range(4):
        expected = score_items(model, select_history(batch, row))
        assert sorted(items[row].tolist()) == list(range(ITEMS))
        torch.testing.assert_close(
            scores[row], expected[items[row]], rtol=1e-4, atol=1e-4
        )
        assert (scores[row].diff() <= 1e-5).all()
        torch.testing.assert_close(
            narrow_scores[row], expected[narrow_items[row]], rtol=1e-4, atol=1e-4
        )


@torch.no_grad()
def test_items_with_a_single_code_are_ranked() -> None:
    codes = torch.randperm(24, generator=torch.Generator().manual_seed(0))[:ITEMS, None]
    torch.manual_seed(0)
    model = LcRec(LcRecConfig(**SIZES), Catalogue.from_codes(codes, (24,))).eval()
    batch = make_requests(3, items=len(codes))
    assert model(batch)["loss"].isfinite()

    items, scores = model.recommend(batch, len(codes))

    assert torch.equal(items.sort(1).values, torch.arange(len(codes)).expand(3, -1))
    history = model.backbone.encode(batch)
    no_codes = torch.zeros(3, 1, dtype=torch.long)
    (logits,) = model.decoder.teacher_forced(history, no_codes)
    expected = logits.log_softmax(-1).gather(1, codes[items, 0])
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_teacher_forcing_equals_one_pass_over_prompt_and_codes(kind: str) -> None:
    model, batch = build_kind(kind), make_requests(6)
    codes = model.tokens.codes(batch.target)

    logits = model.decoder.teacher_forced(model.encode(batch), codes)

    for row in range(6):
        prompt = write_out_prompt(model, select_history(batch, row))
        code_states = compute_code_states(model, prompt, codes[row])
        for level, state in enumerate(code_states):
            expected = model.decoder.level_logits(level, state)
            torch.testing.assert_close(
                logits[level][row], expected, rtol=1e-4, atol=1e-4
            )


@torch.no_grad()
def test_search_stores_the_keys_of_the_prompt_once_per_request() -> None:
    model, batch = build_lc_rec(), make_requests(3)
    history = model.encode(batch)
    prompt_length = history.states.shape[1]
    scorer: Any = model.decoder.scorer(history)
    scorer.start()
    no_parents = torch.zeros(3, 7, dtype=torch.long)
    for level in range(3):
        scorer.step(no_parents, no_parents)
        length = prompt_length + 7 * (level + 1)
        for keys, values in scorer.memory:
            assert keys.shape == values.shape == (3, 2, length, 8)
    # a second search with the same history starts from the prompt
    assert history.memory is not None
    assert {keys.shape[2] for keys, _ in history.memory} == {prompt_length}


@torch.no_grad()
def test_the_input_is_the_prompt_around_the_codes_of_the_history() -> None:
    model, batch = build_lc_rec(), make_requests(5)

    tokens, lengths = model.backbone.inputs(batch)
    columns, is_code = model.backbone.locate_history(model.encode(batch))

    width = tokens.shape[1]
    for row in range(5):
        expected = write_out_prompt(model, select_history(batch, row))
        padding = [0] * (width - len(expected))
        assert tokens[row].tolist() == expected + padding
        assert int(lengths[row]) == len(expected)
        codes = [token for token in expected if token >= model.backbone.vocabulary]
        assert tokens[row, columns][is_code[row]].tolist() == codes
        assert len(codes) == 4 * int(batch.history_length[row])


def test_the_logits_of_words_do_not_change_recommendations() -> None:
    model, batch = build_lc_rec(), make_requests(4)
    expected_items, expected_scores = model.recommend(batch, 10)
    lm: Any = model.backbone.lm
    with torch.no_grad():
        lm.get_output_embeddings().weight.normal_(std=50.0)

    items, scores = model.recommend(batch, 10)

    assert items.tolist() == expected_items.tolist()
    assert torch.equal(scores, expected_scores)


def compute_library_loss(model: LcRec, prompt: list[int], item: Tensor) -> Tensor:
    """Return the cross-entropy over words and codes of the tokens of an item.

    The library ignores the label -100, which the tokens of the prompt have.
    """
    tokens = model.backbone.item_tokens(item).tolist()
    states = compute_states(model, prompt + tokens)
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
def test_loss_and_gradients_equal_the_librarys_with_the_prompt_ignored(
    kind: str,
) -> None:
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
def titled_tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Tables and semantic IDs of items with titles."""
    return training_tables.write_tables(tmp_path_factory.mktemp("lc_rec"), titles=True)


def split_words(text: str) -> list[str]:
    """Return the words and commas of a text."""
    return text.lower().replace(",", " ,").split()


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
def titled_setup(titled_tables: tuple[str, str]) -> TrainingRun:
    """A training on items with titles, of which a model reads 3 words."""
    model = {**TRAINED_SIZES, "title_tokens": 3, "task_share": 0.5}
    return build_training(model, FitConfig(batch_size=8), Inputs(*titled_tables))


@pytest.mark.parametrize("task", ["next_title", "title_to_item", "item_to_title"])
def test_each_task_is_an_instruction_and_its_response(
    task: str, titled_setup: TrainingRun
) -> None:
    """Decode the tokens of instructions and responses to text."""
    model: Any = titled_setup.model
    titles = read_titles(titled_setup.catalogue, "title")
    assert titles is not None
    assert (titles[0], titles[5]) == ("", "Rubber hose, long green")
    words = Words(titles, 8000)
    batch = next(titled_setup.train(0, 0))
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
        title = " ".join(split_words(titles[item])[:3])
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


def test_training_with_titles_has_the_loss_of_each_task(
    titled_setup: TrainingRun,
) -> None:
    losses = titled_setup.model.train()(next(titled_setup.train(0, 0)))
    assert titled_setup.config.tasks == list(TASKS)
    assert set(losses) == {"loss", *(f"{task}_loss" for task in TASKS)}


def test_training_without_titles_has_the_next_item_task_alone(
    small: tuple[str, str],
) -> None:
    setup = build_training(TRAINED_SIZES, FitConfig(batch_size=8), Inputs(*small))
    assert setup.config.tasks == ["next"]
    assert setup.messages[0].startswith("tasks: next; other")
    assert set(setup.model(next(setup.train(0, 0)))) == {"loss"}


def test_the_vocabulary_has_frequent_title_words_and_all_instruction_words() -> None:
    titles = ["Blue hose", "blue BOLT", "hose-clamp", "hose"]
    words = Words(titles, 2)
    number = words.number
    assert words.encode("Hose, blue") == [number["hose"], number[","], number["blue"]]
    assert words.encode("bolt") == [0]
    assert Words(reversed(titles), 2).number == number
    for text in (TEMPLATE, *INSTRUCTIONS.values()):
        for word in text.lower().replace("{}", "").split():
            assert 0 not in words.encode(word)


@pytest.mark.long
def test_a_short_training_lowers_every_loss_and_raises_ndcg(
    titled_tables: tuple[str, str], tmp_path: Path
) -> None:
    config = FitConfig(
        lr=5e-3,
        weight_decay=0.01,
        batch_size=32,
        max_epochs=8,
        patience=0,
        log_every_steps=5,
        seed=1,
    )
    setup = build_training(
        {**TRAINED_SIZES, "beam": 10}, config, Inputs(*titled_tables)
    )
    with torch.no_grad():
        before = setup.means(setup.validate(setup.model)[0])

    events = list(
        fit(setup.model, setup.train, setup.validate, config, means=setup.means)
    )

    losses = [getattr(event, "parts", {}) for event in events]
    losses = [parts for parts in losses if "next_loss" in parts]
    for task in TASKS:
        assert losses[-1][f"{task}_loss"] < losses[0][f"{task}_loss"]
    assert events[-1].metrics["ndcg@10"] > 1.5 * before["ndcg@10"]

    # a checkpoint gives the same recommendations, also without the items' texts
    checkpoint.save(tmp_path / "lc_rec", setup.model, setup.checkpoint(epoch=4))
    batch = setup.val.collate(np.arange(20))
    model: Any = setup.model
    items, scores = model.eval().recommend(batch, 10)
    loaded: Any = load_model(tmp_path / "lc_rec", setup.catalogue)[0]
    loaded_items, loaded_scores = loaded.recommend(batch, 10)
    assert loaded_items.tolist() == items.tolist()
    assert torch.equal(loaded_scores, scores)
    without_texts = replace(setup.catalogue, tables="")
    served: Any = load_model(tmp_path / "lc_rec", without_texts)[0]
    assert served.recommend(batch, 10)[0].tolist() == items.tolist()


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
    titled_tables: tuple[str, str], tmp_path: Path
) -> None:
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
    model(next(setup.train(0, 0)))["loss"].backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_checkpoint_does_not_need_the_pretrained_model(
    titled_tables: tuple[str, str], tmp_path: Path
) -> None:
    save_pretrained(tmp_path / "lm")
    setup = build_training(
        {"name": "lc_rec", "lm": str(tmp_path / "lm")},
        FitConfig(batch_size=8),
        Inputs(*titled_tables),
    )
    checkpoint.save(tmp_path / "saved", setup.model, setup.checkpoint(epoch=1))
    for file in (tmp_path / "lm").iterdir():
        file.unlink()

    loaded: Any = load_model(tmp_path / "saved", setup.catalogue)[0]

    batch = setup.val.collate(np.arange(4))
    model: Any = setup.model.eval()
    items, _ = model.recommend(batch, 5)
    assert loaded.recommend(batch, 5)[0].tolist() == items.tolist()


def iterate_base_weights(model: LcRec) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a low-rank model's language model by their usual names."""
    for name, value in model.backbone.lm.named_parameters():
        if "lora_" not in name:
            yield name.replace(".base_layer", ""), value


def copy_weights(source: LcRec, target: LcRec) -> None:
    """Copy the weights of an LC-Rec to a low-rank model with products of zero."""
    target.backbone.embedding.load_state_dict(source.backbone.embedding.state_dict())
    target.decoder.load_state_dict(source.decoder.state_dict())
    weights = dict(source.backbone.lm.named_parameters())
    base_weights = dict(iterate_base_weights(target))
    assert base_weights.keys() == weights.keys()
    with torch.no_grad():
        for name, value in weights.items():
            base_weights[name].copy_(value)
        for name, value in target.backbone.lm.named_parameters():
            if "lora_B" in name:
                value.zero_()  # the initial value in peft


def test_low_rank_training_changes_the_products_and_the_codes_alone(
    tmp_path: Path,
) -> None:
    model = build_lc_rec(lora_rank=2, lora_dropout=0.0)
    batch = make_requests(6)
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    in_language_model = {name for name in trained if ".lm." in name}
    assert all("lora_" in name for name in in_language_model)
    assert "backbone.embedding.weight" in trained - in_language_model

    full = build_lc_rec()
    copy_weights(full, model)
    torch.testing.assert_close(model(batch)["loss"], full(batch)["loss"])

    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    parameters = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))

    assert losses[-1] < 0.7 * losses[0]
    changed = {
        name
        for name, value in model.named_parameters()
        if not torch.equal(value, before[name])
    }
    assert changed == trained

    about = checkpoint.Checkpoint({"name": "lc_rec"})
    checkpoint.save(tmp_path / "saved", model, about)
    loaded = build_lc_rec(lora_rank=2, lora_dropout=0.0)
    checkpoint.load_weights(loaded, tmp_path / "saved")
    torch.testing.assert_close(
        loaded.recommend(batch, 5), model.eval().recommend(batch, 5)
    )
