"""LC-Rec computes what the language model of `transformers` does without a cache, and
trains on responses alone.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from models.build import load_model
from models.retrieval.data import Catalogue, HistoryBatch
from models.retrieval.language.lc_rec import LcRec, LcRecConfig
from models.retrieval.language.prompts import (
    INSTRUCTIONS,
    TASKS,
    TEMPLATE,
    Words,
    encode_prompt,
    read_titles,
)
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.storage.tables import UserError
from models.text import language_model
from models.training.fit import FitConfig, fit
from tests.fixtures import training_tables
from tests.fixtures.small_retrieval import ITEMS, build_catalogue, make_requests
from tests.fixtures.trainings import build_training

SMALL: dict[str, Any] = {
    "width": 16,
    "num_layers": 3,
    "num_heads": 2,
    "ffn_width": 24,
    "max_history": 6,
}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 40,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 160,
    },
    "qwen2": {
        "model_type": "qwen2",
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
"""Language models of other kinds: learned positions, shared keys, tied output
layers."""


def make(**options: Any) -> LcRec:
    """A model whose log-probabilities are far from uniform."""
    torch.manual_seed(0)
    model = LcRec(LcRecConfig(**SMALL | options), build_catalogue())
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter.data, std=0.3)
    return model.eval()


def of_kind(kind: str) -> LcRec:
    if kind == "llama":
        return make()
    words = Words([], 0)
    assert words.size <= 40
    return make(lm_model=OTHERS[kind], prompt=encode_prompt(words, "next"))


KINDS = ["llama", *OTHERS]


def plain_tokens(model: LcRec, history: list[int]) -> list[int]:
    """The prompt written out."""
    given, first = model.config.prompt, model.backbone.vocabulary
    codes = [(first + model.tokens.items[item]).tolist() for item in history]
    between = [token for code in codes for token in (*code, *given["between"])]
    return [
        *given["before"],
        *between[: len(between) - len(given["between"])],
        *given["after"],
    ]


def states(model: LcRec, tokens: list[int]) -> Tensor:
    """(S, D): the library's pass over one row of tokens, without padding and without a
    cache.
    """
    embedded = torch.stack(
        [
            model.backbone.words().weight[t]
            if t < model.backbone.vocabulary
            else model.backbone.embedding.weight[t - model.backbone.vocabulary]
            for t in tokens
        ]
    )
    lm: Any = model.backbone.lm
    return lm.base_model(
        inputs_embeds=embedded[None], use_cache=False
    ).last_hidden_state[0]


def history_of(batch: HistoryBatch, row: int) -> list[int]:
    return batch.history[row, : int(batch.history_length[row])].tolist()


def brute_force(model: LcRec, history: list[int]) -> Tensor:
    """(N,): of each item the log-probability of its codes, by a whole pass over prompt
    and codes.
    """
    before, sids = plain_tokens(model, history), build_catalogue().sids
    found = []
    for code in sids:
        tokens = (model.backbone.vocabulary + code + model.tokens.offset).tolist()
        given = states(model, before + tokens)[-len(tokens) - 1 : -1]
        total = 0.0
        for level, (state, chosen) in enumerate(zip(given, code.tolist(), strict=True)):
            total += (
                model.decoder.level_logits(level, state).log_softmax(-1)[chosen].item()
            )
        found.append(total)
    return torch.tensor(found)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_search_finds_what_whole_passes_over_every_item_find(kind: str) -> None:
    model, batch = of_kind(kind), make_requests(4)
    items, scores = model.recommend(batch, ITEMS, beam=ITEMS)
    narrow, narrow_scores = model.recommend(batch, 5, beam=8)
    for row in range(4):
        expected = brute_force(model, history_of(batch, row))
        assert sorted(items[row].tolist()) == list(range(ITEMS))
        torch.testing.assert_close(
            scores[row], expected[items[row]], rtol=1e-4, atol=1e-4
        )
        assert (scores[row].diff() <= 1e-5).all()
        torch.testing.assert_close(
            narrow_scores[row], expected[narrow[row]], rtol=1e-4, atol=1e-4
        )


@torch.no_grad()
def test_items_of_one_code_are_ranked() -> None:
    codes = torch.randperm(24, generator=torch.Generator().manual_seed(0))[:ITEMS, None]
    torch.manual_seed(0)
    model = LcRec(LcRecConfig(**SMALL), Catalogue.from_codes(codes, (24,))).eval()
    batch = make_requests(3)
    last = len(codes) - 1
    batch = replace(
        batch,
        history=batch.history.clamp(max=last),
        target=batch.target.clamp(max=last),
    )
    assert model(batch)["loss"].isfinite()
    items, scores = model.recommend(batch, len(codes))
    assert torch.equal(items.sort(1).values, torch.arange(len(codes)).expand(3, -1))
    history = model.backbone.encode(batch)
    forced = model.decoder.teacher_forced(history, torch.zeros(3, 1, dtype=torch.long))[
        0
    ].log_softmax(-1)
    torch.testing.assert_close(
        scores, forced.gather(1, codes[items, 0]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
def test_teacher_forcing_is_a_whole_pass_over_prompt_and_codes(kind: str) -> None:
    model, batch = of_kind(kind), make_requests(6)
    codes = model.tokens.codes(batch.target)
    logits = model.decoder.teacher_forced(model.encode(batch), codes)
    for row in range(6):
        tokens = (model.backbone.vocabulary + codes[row] + model.tokens.offset).tolist()
        whole = states(model, plain_tokens(model, history_of(batch, row)) + tokens)[
            -5:-1
        ]
        for level, state in enumerate(whole):
            expected = model.decoder.level_logits(level, state)
            torch.testing.assert_close(
                logits[level][row], expected, rtol=1e-4, atol=1e-4
            )


@torch.no_grad()
def test_the_prompt_is_held_once_per_user() -> None:
    model, batch = make(), make_requests(3)
    history = model.encode(batch)
    scorer: Any = model.decoder.scorer(history)
    scorer.start()
    for level in range(3):
        scorer.step(
            torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)
        )
        for keys, values in scorer.memory:
            assert (
                keys.shape
                == values.shape
                == (3, 2, history.states.shape[1] + 7 * (level + 1), 8)
            )
    assert history.memory is not None
    assert {keys.shape[2] for keys, _ in history.memory} == {
        history.states.shape[1]
    }  # for another search, as it was


@torch.no_grad()
def test_the_input_is_the_prompt_around_the_codes() -> None:
    model, batch = make(), make_requests(5)
    tokens, lengths = model.backbone.inputs(batch)
    place, real = model.backbone.locate_history(model.encode(batch))
    for row in range(5):
        expected = plain_tokens(model, history_of(batch, row))
        assert tokens[row].tolist() == expected + [0] * (
            tokens.shape[1] - len(expected)
        )
        assert int(lengths[row]) == len(expected)
        codes = [t for t in expected if t >= model.backbone.vocabulary]
        assert tokens[row, place][real[row]].tolist() == codes
        assert len(codes) == 4 * int(batch.history_length[row])


def test_words_take_no_part_in_decoding() -> None:
    model, batch = make(), make_requests(4)
    items, scores = model.recommend(batch, 10)
    lm: Any = model.backbone.lm
    with torch.no_grad():
        lm.get_output_embeddings().weight.normal_(std=50.0)
    again, scores_again = model.recommend(batch, 10)
    assert again.tolist() == items.tolist()
    assert torch.equal(scores_again, scores)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_librarys_with_the_prompt_ignored(kind: str) -> None:
    """Over words and codes together, of the response's tokens alone: whatever is said
    of the prompt's is ignored.
    """
    model, batch = of_kind(kind), make_requests(5)
    rows = []
    for row in range(5):
        code = model.backbone.item_tokens(batch.target[row]).tolist()
        before = plain_tokens(model, history_of(batch, row))
        given = states(model, before + code)
        lm: Any = model.backbone.lm
        logits = torch.cat(
            [lm.get_output_embeddings()(given), given @ model.decoder.rows().T], -1
        )
        labels = torch.tensor(
            [-100] * len(before) + [t - 1 for t in code]
        )  # token 0 of the codes' is padding
        rows.append(
            functional.cross_entropy(logits[:-1], labels[1:], ignore_index=-100)
        )
    ours = model(batch)["loss"]
    torch.testing.assert_close(ours, torch.stack(rows).mean(), rtol=1e-4, atol=1e-4)
    parameters = [p for name, p in model.named_parameters()]
    expected = torch.autograd.grad(torch.stack(rows).mean(), parameters)
    for mine, theirs in zip(
        torch.autograd.grad(ours, parameters), expected, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def titled(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Tables whose items have titles."""
    return training_tables.write_tables(tmp_path_factory.mktemp("lc_rec"), titles=True)


TINY: dict[str, Any] = {
    "name": "lc_rec",
    "width": 32,
    "num_layers": 2,
    "num_heads": 2,
    "ffn_width": 48,
}


def test_the_tasks_are_instructions_and_what_answers_them(
    titled: tuple[str, str],
) -> None:
    """Whole rows read back as text, and the loss of each task is the library's on its
    response.
    """
    setup = build_training(
        {**TINY, "title_tokens": 3, "task_share": 0.5},
        FitConfig(batch_size=8),
        Inputs(*titled),
    )
    model: Any = setup.model
    titles = read_titles(setup.catalogue, "title")
    assert titles is not None
    assert (titles[0], titles[5]) == ("", "Rubber hose, long green")
    words = Words(titles, 8000)
    name_of = {number: word for word, number in words.number.items()} | {
        0: "?",
        1: "<",
        2: ">",
    }
    batch = next(setup.train(0, 0))
    torch.manual_seed(3)
    drawn = {"next_title": batch.target[:4]}
    for task in ("title_to_item", "item_to_title"):
        torch.manual_seed(3)
        drawn[task] = torch.randint(0, 24, (4,))
    for task, items in drawn.items():
        torch.manual_seed(3)
        prompts, (response, there) = model._texts.make_examples(
            model.backbone, task, batch, 4
        )
        for row, item in enumerate(items.tolist()):
            read = [
                t for tokens, real in prompts for t in tokens[row][real[row]].tolist()
            ]
            title = " ".join(words_of(titles[item])[:3])
            codes = f"c{item % 4} c{4 + item // 4} c10"
            said = " ".join(
                name_of[t] if t < words.size else f"c{t - words.size - 1}" for t in read
            )
            answer = response[row][there[row]].tolist()
            answer_said = " ".join(
                name_of[t] if t < words.size else f"c{t - words.size - 1}"
                for t in answer
            )
            assert said.startswith("< # # # instruction : ")
            assert said.endswith("# # # response :")
            if task == "title_to_item":
                assert f"this title : {title} ?".replace("  ", " ") in said
                assert answer_said == codes
            else:
                assert answer_said == f"{title} >".strip()
                assert f"this item : {codes} ?" in said or task == "next_title"
    assert setup.config.tasks == list(TASKS)
    assert set(model.train()(batch)) == {"loss", *(f"{task}_loss" for task in TASKS)}


def words_of(text: str) -> list[str]:
    return text.lower().replace(",", " ,").split()


def test_without_titles_the_log_gives_one_task(small: tuple[str, str]) -> None:
    setup = build_training(TINY, FitConfig(batch_size=8), Inputs(*small))
    assert setup.config.tasks == ["next"]
    assert setup.messages[0].startswith("tasks: next; other")
    assert set(setup.model(next(setup.train(0, 0)))) == {"loss"}


def test_the_vocabulary_is_that_of_the_tables() -> None:
    titles = ["Blue hose", "blue BOLT", "hose-clamp", "hose"]
    words = Words(titles, 2)
    assert words.encode("Hose, blue") == [
        words.number["hose"],
        words.number[","],
        words.number["blue"],
    ]
    assert words.encode("bolt") == [0]
    assert Words(reversed(titles), 2).number == words.number
    fixed = {
        word
        for text in (TEMPLATE, *INSTRUCTIONS.values())
        for word in text.lower().replace("{}", "").split()
    }
    assert all(0 not in words.encode(word) for word in fixed)


@pytest.mark.long
def test_a_short_training_lowers_the_loss_and_finds_items(
    titled: tuple[str, str], tmp_path: Path
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
    setup = build_training({**TINY, "beam": 10}, config, Inputs(*titled))
    with torch.no_grad():
        before = setup.means(setup.validate(setup.model)[0])
    events = list(
        fit(setup.model, setup.train, setup.validate, config, means=setup.means)
    )
    parts = [
        event.parts for event in events if "next_loss" in getattr(event, "parts", {})
    ]
    for task in TASKS:
        assert parts[-1][f"{task}_loss"] < parts[0][f"{task}_loss"]
    assert events[-1].metrics["ndcg@10"] > 1.5 * before["ndcg@10"]

    checkpoint.save(tmp_path / "lc_rec", setup.model, setup.checkpoint(epoch=4))
    loaded: Any = load_model(tmp_path / "lc_rec", setup.catalogue)[0]
    batch = setup.val.collate(np.arange(20))
    model: Any = setup.model
    items, scores = model.eval().recommend(batch, 10)
    again, scores_again = loaded.recommend(batch, 10)
    assert again.tolist() == items.tolist()
    assert torch.equal(scores_again, scores)
    without_text = replace(setup.catalogue, tables="")  # as where a model is served
    bare: Any = load_model(tmp_path / "lc_rec", without_text)[0]
    assert bare.recommend(batch, 10)[0].tolist() == items.tolist()


def test_a_pretrained_model_gives_weights_words_and_codes_around_their_mean(
    titled: tuple[str, str], tmp_path: Path
) -> None:
    pretrained = save_pretrained(tmp_path / "lm")
    setup = build_training(
        {"name": "lc_rec", "lm": str(tmp_path / "lm")},
        FitConfig(batch_size=8),
        Inputs(*titled),
    )
    model: Any = setup.model
    for name, value in pretrained.state_dict().items():
        assert torch.equal(model.backbone.lm.state_dict()[name], value)
    words = pretrained.get_input_embeddings().weight
    torch.testing.assert_close(
        model.backbone.embedding.weight.mean(0), words.mean(0), atol=0.02, rtol=0
    )
    assert model.config.lm_model["hidden_size"] == 24
    assert model.config.prompt["before"][0] == 1
    loss = model(next(setup.train(0, 0)))["loss"]
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    checkpoint.save(tmp_path / "made", model, setup.checkpoint(epoch=1))
    for file in (
        tmp_path / "lm"
    ).iterdir():  # a checkpoint needs the pretrained model no more
        file.unlink()
    loaded: Any = load_model(tmp_path / "made", setup.catalogue)[0]
    batch = setup.val.collate(np.arange(4))
    assert (
        loaded.recommend(batch, 5)[0].tolist()
        == model.eval().recommend(batch, 5)[0].tolist()
    )


def save_pretrained(folder: Path) -> Any:
    """A language model with a tokenizer, as a hub has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    text = " ".join([*INSTRUCTIONS.values(), TEMPLATE]).replace("{}", "").split()
    vocabulary = {word: 3 + i for i, word in enumerate(dict.fromkeys(text))} | {
        "<unk>": 0,
        "<s>": 1,
        "</s>": 2,
    }
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    torch.manual_seed(5)
    lm: Any = language_model.build_model(
        language_model.llama_config(64, 24, 2, 2, 32, 0.0), 10
    )
    torch.nn.init.normal_(lm.get_input_embeddings().weight, mean=0.5, std=0.02)
    lm.save_pretrained(folder)
    return lm


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(**lm_model: Any) -> None:
        LcRec(
            LcRecConfig(lm_model=lm_model, prompt=encode_prompt(Words([], 0), "next")),
            build_catalogue(),
        )

    with pytest.raises(UserError, match="the language model has n_positions 30"):
        built(**{**OTHERS["gpt2"], "n_positions": 30})
    for kind in ("bloom", "gemma", "gpt_neo", "mamba"):
        with pytest.raises(
            UserError,
            match=f"type '{kind}', which is not supported; give a model.lm",
        ):
            built(model_type=kind)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        UserError,
        match="lora_rank 4 needs the optional package peft; run pip install peft",
    ):
        make(lora_rank=4)


def test_low_rank_training_leaves_the_language_model_and_trains_the_codes(
    tmp_path: Path,
) -> None:
    plain, model = make(), make(lora_rank=2, lora_dropout=0.0)
    model.backbone.embedding.load_state_dict(plain.backbone.embedding.state_dict())
    own = {
        name.replace(".base_layer", ""): value
        for name, value in model.backbone.lm.named_parameters()
    }
    frozen = {name: value for name, value in own.items() if "lora_" not in name}
    assert frozen.keys() == dict(plain.backbone.lm.named_parameters()).keys()
    with torch.no_grad():
        for name, value in plain.backbone.lm.named_parameters():
            frozen[name].copy_(value)
        for name, value in own.items():
            if "lora_B" in name:
                value.zero_()  # as peft starts them: the products say nothing yet
        for ours, theirs in zip(
            model.decoder.parameters(), plain.decoder.parameters(), strict=True
        ):
            ours.copy_(theirs)
    batch = make_requests(6)
    torch.testing.assert_close(model(batch)["loss"], plain(batch)["loss"])
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert all("lora_" in name for name in trained if ".lm." in name)
    assert {"backbone.embedding.weight"} <= {
        name for name in trained if ".lm." not in name
    }

    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.Adam(
        [value for value in model.parameters() if value.requires_grad], lr=0.02
    )
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
    checkpoint.save(
        tmp_path / "saved", model, checkpoint.Checkpoint({"name": "lc_rec"})
    )
    again = make(lora_rank=2, lora_dropout=0.0)
    checkpoint.load_weights(again, tmp_path / "saved")
    torch.testing.assert_close(
        again.recommend(batch, 5), model.eval().recommend(batch, 5)
    )
