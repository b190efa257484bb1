"""Models on a device other than the CPU, simulated: a tensor that a step leaves on the CPU
is an error.

A tensor of the simulated device reports the device `meta`, whose kernels are never
called, while its values are on the CPU. An operation on tensors of both devices fails, as
it does on a GPU. Operations for which a GPU's step would wait are recorded.
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

from core.schemas import Inputs
from models import registry
from models.evaluation import measure_examples
from models.metrics.ranking_metrics import Histogram
from models.retrieval.distillation.teacher import TeacherConfig
from models.training import checkpoint
from models.training.fit_config import FitConfig
from models.training.loop import autocast
from models.training_run import TrainingRun
from tests.fixtures import actions_tables, search_tables, training_tables
from tests.fixtures.trainings import CASES, build_training, first_epoch

aten = torch.ops.aten
SIMULATED = torch.device("meta")

CROSS_DEVICE_COPIES = {aten._to_copy.default, aten.copy_.default}
WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations that read a value, or whose shape depends on values."""
waits: list[Any] = []
"""Operations on the simulated device whose results the host waits for."""
SEARCHES_THAT_WAIT = {
    "atspeed_s": "the number of accepted draft tokens is read after each draft",
    "atspeed_r": "as atspeed_s",
}
"""Models whose search reads values back, with the reason."""


class SimulatedTensor(Tensor):
    """A tensor of the simulated device; `cpu_values` is a tensor of the same shape on the
    CPU.
    """

    cpu_values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> SimulatedTensor:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            values.stride(),
            values.storage_offset(),
            dtype=values.dtype,
            device=SIMULATED,
        )
        tensor.cpu_values = values
        return tensor

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run_operation(func, args, kwargs or {})


def to_cpu(value: Any) -> Any:
    """Return the values of a tensor of the simulated device, else `value`."""
    if isinstance(value, SimulatedTensor):
        return value.cpu_values
    # transformers' cache begins with an empty tensor, which needs no values
    if isinstance(value, Tensor) and value.is_meta and not value.numel():
        return torch.empty(value.shape, dtype=value.dtype)
    return value


def has_to_wait(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the host waits for the result of an operation on a GPU."""
    if func is aten._to_copy.default:
        return "device" in kwargs and torch.device(kwargs["device"]).type == "cpu"
    if func is aten.index.Tensor:
        return any(x is not None and x.dtype == torch.bool for x in args[1])
    return bool(WAITING & {*func.tags}) and kwargs.get("output_size") is None


def run_operation(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU and return its results on the device of its inputs.

    Raises:
        AssertionError: If the inputs are on both devices.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    simulated = [x for x in tensors if isinstance(x, SimulatedTensor)]
    plain = [x for x in tensors if not isinstance(x, SimulatedTensor)]
    on_cpu = [x for x in plain if x.dim() and not x.is_meta]
    assert not (simulated and on_cpu) or func in CROSS_DEVICE_COPIES, (
        f"{func} mixes devices: {[tuple(x.shape) for x in on_cpu]} on the CPU"
    )
    if simulated and has_to_wait(func, args, kwargs):
        waits.append(func)
    device = kwargs.get("device")
    to_simulated = bool(simulated)
    if func is aten.copy_.default:
        to_simulated = isinstance(args[0], SimulatedTensor)
    elif device is not None:
        to_simulated = torch.device(device) == SIMULATED
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(to_cpu, (args, kwargs))
    results = func(*args, **kwargs)
    if not to_simulated:
        return results

    # a tensor that is changed in place stays the same object
    wrappers = {id(x.cpu_values): x for x in simulated}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return wrappers.get(id(value), SimulatedTensor(value))

    return tree_map(wrap, results)


class SimulatedDevice(TorchDispatchMode):
    """A mode in which `meta` is a device with values."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run_operation(func, args, kwargs or {})


@pytest.fixture
def simulated_device(monkeypatch) -> Iterator[SimulatedDevice]:
    """Enable the simulated device, without the autocast that PyTorch rejects on `meta`."""
    autocast = torch.autocast

    def autocast_unless_simulated(kind: str, *args: Any, **options: Any) -> Any:
        if kind == "meta":
            return nullcontext()
        return autocast(kind, *args, **options)

    monkeypatch.setattr(torch, "autocast", autocast_unless_simulated)
    with SimulatedDevice() as mode:
        yield mode


NAMES = [*registry.MODELS, "hllm item_tower"]
FIT = FitConfig(batch_size=8, eval_batch_size=8)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Any]:
    """Inputs by kind, and checkpoints of teachers and encoders by name."""
    folder = tmp_path_factory.mktemp("devices")
    tables, text = search_tables.write_search(folder / "search", users=10, requests=6)
    retrieval = training_tables.write_tables(
        folder / "retrieval", users=12, titles=True
    )
    inputs = {
        "retrieval": Inputs(*retrieval),
        "search": Inputs(tables, text=text),
        "actions": Inputs(actions_tables.write_actions(folder / "actions", users=12)),
    }
    models: dict[str, dict[str, Any]] = {
        "tiger": CASES["tiger"],
        "lc_rec": CASES["lc_rec"],
        "sid_mlp_pp_encoder": {"teacher": str(folder / "tiger")},
    }
    checkpoints = {}
    for name, options in models.items():
        run = build_training({**options, "name": name}, FIT, inputs["retrieval"])
        checkpoints[name] = str(folder / name)
        checkpoint.save(checkpoints[name], run.model, run.checkpoint())
    return {**inputs, **checkpoints}


def build_small_training(
    name: str, data: dict[str, Any], fit: FitConfig, device: Any
) -> TrainingRun:
    """Build a training of a small model, with its teacher and encoder where it has one."""
    options = {"name": name, **CASES.get(name, {})}
    model_class = registry.find(options["name"])
    if issubclass(model_class.config_class, TeacherConfig):
        options["teacher"] = data[model_class.config_class.default_teacher]
        options.pop("teacher_model", None)
    if name == "blend":
        options |= {"first": data["tiger"], "second": data["lc_rec"]}
    if name == "sid_mlp_pp":
        options |= {"encoder": data["sid_mlp_pp_encoder"], "end_to_end": False}
    return build_training(options, fit, data[model_class.kind.name], device=device)


def get_gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients of all trained parameters, each of which
    DistributedDataParallel needs in every step.
    """
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert [name for name, gradient in gradients.items() if gradient is None] == []
    return [gradient for gradient in gradients.values() if gradient is not None]


def check_steps(run: TrainingRun) -> None:
    """Check that training steps, and searches or scores, leave the host nothing to wait for.

    Batches of actions are planned with and without ties.
    """
    model: Any = run.model
    batch = next(run.train.epoch(8, seed=1, epoch=0, pad_to_buckets=True))
    batches = [batch.to(SIMULATED)]
    if model.kind.name == "actions":
        batches = [replace(batches[0], has_ties=ties) for ties in (False, True)]
    for inputs in batches:
        waits.clear()
        model.train()(inputs)["loss"].backward()
        for gradient in get_gradients(model):
            assert isinstance(gradient, SimulatedTensor)
        model.eval()
        with torch.no_grad():
            if model.kind.name == "actions":
                model.logits(inputs, history=False)
            elif model.ranks == "catalogue" and model.name not in SEARCHES_THAT_WAIT:
                no_items = torch.zeros(24, dtype=torch.bool, device=SIMULATED)
                allowed = model.encode_allowed(no_items)
                search = type(model).recommend.__wrapped__.__wrapped__
                for searched in (inputs, replace(inputs, allowed=allowed)):
                    search(model, searched, 3)
        # a tower encodes the distinct documents
        assert waits == [] or getattr(model, "item_tower", None)


# the simulated device copies from `meta` on purpose
@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
@pytest.mark.parametrize("name", NAMES)
def test_a_step_waits_for_no_value_and_leaves_no_tensor_on_the_cpu_nor_does_a_validation(
    name, data, simulated_device
):
    run = build_small_training(name, data, FIT, SIMULATED)

    if run.model.trains_by_gradient:
        check_steps(run)
    else:
        run.fit_in_one_pass()
    measured = measure_examples(run.model, run.val, batch_size=8, device=run.device)

    assert measured.num_examples
    for value in measured.sums.values():
        assert not isinstance(value, SimulatedTensor)


class GradientAdditions(TorchDispatchMode):
    """A mode that records additions at indices in an order that differs between runs.

    The backward pass of `x[index]` makes them on the CPU, from several threads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in (aten.index_put, aten._index_put_impl_) and args[3]:
            self.shapes.append(args[0].shape)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name",
    [n for n in NAMES if registry.find(n.split()[0]).trains_by_gradient],
)
def test_a_step_and_a_validation_in_bfloat16_are_finite_and_can_be_repeated(name, data):
    """GPUs use bfloat16 by default; here it is the autocast of the CPU."""
    run = build_small_training(name, data, replace(FIT, precision="bf16"), "cpu")

    with GradientAdditions() as additions:
        with autocast("bf16", run.device):
            loss = run.model.train()(next(first_epoch(run)))["loss"]
        loss.backward()
    measured = measure_examples(run.model, run.val, batch_size=8, device=run.device)

    assert additions.shapes == []
    assert bool(loss.isfinite())
    assert all(bool(gradient.isfinite().all()) for gradient in get_gradients(run.model))
    for value in measured.sums.values():
        if not isinstance(value, Histogram):
            assert bool(torch.as_tensor(value).isfinite().all())
