"""Models on another device than the CPU, with none at hand: every tensor that a step
leaves behind is an error.

A tensor of the pretended device says that it is on `meta`, whose kernels nothing here
may reach, while its numbers lie on the CPU. An operation over tensors of both devices
fails as it does on a GPU. What makes a GPU wait is another test's affair
(`test_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from models import registry
from models.metrics.ranking_metrics import Histogram
from models.retrieval.distillation.teacher import TeacherConfig
from models.storage import checkpoint
from models.storage.inputs import Inputs
from models.training.fit import FitConfig, autocast
from models.training_run import TrainingRun
from tests.fixtures import actions_tables, search_tables, training_tables
from tests.fixtures.trainings import build_training

aten = torch.ops.aten
THERE = torch.device("meta")

MOVES = {aten._to_copy.default, aten.copy_.default}


class Elsewhere(Tensor):
    """A tensor of the pretended device; `held` (the same shape, on the CPU) are its
    numbers.
    """

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            held.stride(),
            held.storage_offset(),
            dtype=held.dtype,
            device=THERE,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return carried_out(func, args, kwargs or {})


def carried_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the CPU, its results where a GPU's would be; AssertionError
    where it mixes devices.
    """
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    there = [x for x in inputs if isinstance(x, Elsewhere)]
    here = [x for x in inputs if not isinstance(x, Elsewhere) and x.dim() > 0]
    assert not (there and here) or func in MOVES, (
        f"{func} mixes devices: {[tuple(x.shape) for x in here]} on the CPU"
    )
    wanted = kwargs.get("device")
    goes_there = bool(there) if wanted is None else torch.device(wanted) == THERE
    if func is aten.copy_.default:
        goes_there = isinstance(args[0], Elsewhere)
    if wanted is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(
        lambda x: x.held if isinstance(x, Elsewhere) else x, (args, kwargs)
    )
    found = func(*args, **kwargs)
    if not goes_there:
        return found
    own = {
        id(x.held): x for x in there
    }  # what is changed in place stays the same tensor
    return tree_map(
        lambda x: own.get(id(x), Elsewhere(x)) if isinstance(x, Tensor) else x, found
    )


class Pretended(TorchDispatchMode):
    """While it is on, `meta` is a device with numbers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return carried_out(func, args, kwargs or {})


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretended]:
    """The device, with the autocast that torch does not let `meta` have."""
    own = torch.autocast
    monkeypatch.setattr(
        torch,
        "autocast",
        lambda kind, *args, **kw: (
            nullcontext() if kind == "meta" else own(kind, *args, **kw)
        ),
    )
    with Pretended() as mode:
        yield mode


TIGER = {
    "d_model": 16,
    "d_ff": 32,
    "num_heads": 2,
    "d_kv": 8,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
}
LC_REC = {"width": 16, "num_layers": 2, "num_heads": 2, "ffn_width": 24, "beam": 8}
SIZES: dict[str, dict[str, Any]] = {
    "tiger": {**TIGER, "beam": 8},
    "sasrec": {"dim": 16, "num_layers": 1, "max_history": 12},
    **{name: {"beam": 8} for name in ("earn", "nezha")},
    **{
        name: {
            "beam": 8,
            "attention_heads": 2,
            "attention_width": 24,
            "ffn_width": 32,
            "head_width": 20,
        }
        for name in ("sid_mlp", "sid_mlp_pp")
    },
    "lc_rec": LC_REC,
    "lc_rec_sid_mlp": {
        "beam": 8,
        "attention_heads": 2,
        "width": 24,
        "ffn_width": 32,
        "head_width": 20,
    },
    "lc_rec_nezha": {"beam": 8},
    "gdn": {"beam": 8, "num_layers": 1, "heads": 2, "head_width": 8, "ffn_width": 16},
    "mamba2": {"beam": 8, "num_layers": 1, "width": 16, "head_width": 8, "state": 8},
    **{
        name: {"width": 16, "num_layers": 1, "num_heads": 2} for name in ("hstu", "qgs")
    },
    "hllm": {
        "width": 16,
        "num_layers": 1,
        "num_heads": 2,
        "item_model": search_tables.ITEM_MODEL,
    },
    **{
        name: {
            "width": 16,
            "num_layers": 2,
            "num_heads": 2,
            "ffn": 32,
            "experts": 2,
            "expert_width": 16,
        }
        for name in registry.MODELS
        if registry.find(name).family == "actions"
        and registry.find(name).trains_by_gradient
    },
}
FIT = FitConfig(batch_size=8, eval_batch_size=8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Tables by family, and checkpoints that students are made from."""
    folder = tmp_path_factory.mktemp("devices")
    tables, text = search_tables.write_search(folder / "search", users=10, requests=6)
    inputs = {
        "retrieval": Inputs(
            *training_tables.write_tables(folder / "retrieval", users=12, titles=True)
        ),
        "search": Inputs(tables, text=text),
        "actions": Inputs(actions_tables.write_actions(folder / "actions", users=12)),
    }
    made: dict[str, Any] = {
        name: str(folder / name) for name in ("tiger", "lc_rec", "sid_mlp_pp_encoder")
    }
    teacher = {"teacher": made["tiger"]}
    for name, model in {
        "tiger": SIZES["tiger"],
        "lc_rec": LC_REC,
        "sid_mlp_pp_encoder": teacher,
    }.items():
        setup = build_training({"name": name, **model}, FIT, inputs["retrieval"])
        checkpoint.save(made[name], setup.model, setup.checkpoint())
    return {**inputs, **made}


def set_up_small(
    name: str, data: dict[str, Any], fit: FitConfig, device: Any
) -> TrainingRun:
    config, model = (
        registry.find(name).config_class,
        {"name": name, **SIZES.get(name, {})},
    )
    if issubclass(config, TeacherConfig):
        model["teacher"] = data[config.default_teacher]
    if name == "sid_mlp_pp":
        model["encoder"] = data["sid_mlp_pp_encoder"]
    return build_training(model, fit, data[registry.find(name).family], device=device)


def gradients(model: nn.Module) -> list[Tensor]:
    """Of all trained parameters: DDP waits for every one of them in every step."""
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert [name for name, grad in trained.items() if grad is None] == []
    return [grad for grad in trained.values() if grad is not None]


@pytest.mark.filterwarnings(
    "ignore:for .* copying from a non-meta parameter"
)  # which is what is wanted here
@pytest.mark.parametrize("name", registry.MODELS)
def test_a_step_and_a_validation_leave_no_tensor_on_the_cpu(
    name: str, data: dict[str, Any], pretended: Pretended
) -> None:
    setup = set_up_small(name, data, FIT, THERE)
    if setup.model.trains_by_gradient:
        batch = next(setup.train(0, 0)).to(THERE)
        setup.model.train()
        setup.model(batch)["loss"].backward()
        assert all(isinstance(grad, Elsewhere) for grad in gradients(setup.model))
    else:
        setup.fit_counts()
    sums, count = setup.validate(setup.model)
    assert count
    assert not any(isinstance(value, Elsewhere) for value in sums.values())


@pytest.mark.parametrize(
    "name", [name for name in registry.MODELS if registry.find(name).trains_by_gradient]
)
def test_a_step_and_a_validation_in_bfloat16(name: str, data: dict[str, Any]) -> None:
    """As a GPU does them by default; here by the autocast of the CPU."""
    setup = set_up_small(name, data, replace(FIT, precision="bf16"), "cpu")
    with autocast("bf16", setup.device):
        loss = setup.model.train()(next(setup.train(0, 0)))["loss"]
    loss.backward()
    assert all(
        bool(value.isfinite().all()) for value in [loss, *gradients(setup.model)]
    )
    sums, count = setup.validate(setup.model)
    assert count
    numbers = [value for value in sums.values() if not isinstance(value, Histogram)]
    assert all(bool(torch.as_tensor(value).isfinite().all()) for value in numbers)


def test_the_pretended_device_finds_what_is_left_on_the_cpu(
    pretended: Pretended,
) -> None:
    x = torch.arange(6.0).to(THERE)
    assert type(x + 1) is Elsewhere
    assert (x.view(2, 3).add_(1).sum(0) * 2).cpu().tolist() == [10.0, 14.0, 18.0]
    with pytest.raises(AssertionError, match="mixes devices"):
        x + torch.ones(6)
    with pytest.raises(AssertionError, match="mixes devices"):
        x[torch.tensor([0, 1])]
