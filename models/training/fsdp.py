"""FSDP2 training: workers shard weights, gradients and optimizer state.

    shards = fsdp.shard(model, device, rank, world)
    optimizer = ...                                    # of the sharded parameters
    shards.load(optimizer, state)                      # of a full state
    with shards.gather_weights():                      # for validation
        ...
    state = shards.gather_state(optimizer)

Each block of a language model is gathered for its computation and freed afterwards. So
a worker holds one full block, and its shard of the 16 bytes per parameter that training
needs. A model is built in full before it is sharded. For validation, in which workers
decode different numbers of batches, the full weights are gathered: 4 bytes per
parameter on each device.

Checkpoints hold the full weights and the full optimizer state, which rank 0 gathers in
its main memory: 12 bytes per trained parameter. So a run can resume with another number
of workers, sharded or not. Importing PyTorch's FSDP takes a second, so functions import
it when they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.errors import UserError
from models.training.checkpoint import State
from models.training.optimizers import optimizer_state


def shard(model: nn.Module, device: torch.device, rank: int, world: int) -> Shards:
    """Apply FSDP2 to each transformer block and to the rest of the model.

    Args:
        model: The model, with equal weights on all workers.
        device: Device of the model.
        rank: Rank of this worker.
        world: Number of workers.

    Raises:
        UserError: If no module is a `PreTrainedModel`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import PreTrainedModel

    language_models = [
        module for module in model.modules() if isinstance(module, PreTrainedModel)
    ]
    if not language_models:
        raise UserError(
            "only language models are trained in shards; leave out ray.shard"
        )
    mesh = init_device_mesh(device.type, (world,))
    block_types = {
        name for lm in language_models for name in lm._no_split_modules or ()
    }
    units: list[Any] = [
        fully_shard(module, mesh=mesh)
        for module in list(language_models[0].modules())  # contains the others
        if type(module).__name__ in block_types
    ]
    return Shards(model, [*units, fully_shard(model, mesh=mesh)], is_writer=rank == 0)


@dataclass(frozen=True)
class Shards:
    """A model that is sharded over the workers. All methods are collective calls."""

    model: nn.Module
    units: list[Any]
    """Modules that are gathered and freed one at a time, the model last."""
    is_writer: bool
    """Whether this worker writes checkpoints."""

    @contextmanager
    def gather_weights(self) -> Iterator[None]:
        """Gather the full weights within the context, for validation."""
        for unit in self.units:
            unit.set_reshard_after_forward(False)
            unit.unshard()
        try:
            yield
        finally:
            for unit in self.units:
                unit.set_reshard_after_forward(True)
                unit.reshard()

    def gather_state(self, optimizer: torch.optim.Optimizer) -> State:
        """Gather the full weights and optimizer state on the CPU; empty but on rank 0.

        Tied weights are returned once, under the first of their names, as `safetensors`
        saves them.
        """
        state = optimizer_state(optimizer)
        moments = state["state"]
        for parameter in sorted(moments):  # all ranks gather in the same order
            values = {
                name: _gather(value) for name, value in moments[parameter].items()
            }
            moments[parameter] = values if self.is_writer else {}
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        repeated = {name for tied in names.values() for name in sorted(tied)[1:]}
        weights = {}
        for name, value in self.model.state_dict().items():
            if name not in repeated:
                full = _gather(value)
                if self.is_writer:
                    weights[name] = full.cpu().contiguous()
        return {"optimizer": state, "weights": weights}

    def load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load this worker's shard of a full optimizer state."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        parameters: list[Any] = []
        for group in optimizer.param_groups:
            parameters += group["params"]
        sharded: dict[int, dict[str, Any]] = {}
        for index, values in state["state"].items():
            parameter = parameters[int(index)]
            sharded[index] = dict(values)
            if not isinstance(parameter, DTensor):
                continue
            for name, value in values.items():
                if name != "step" and isinstance(value, Tensor):
                    sharded[index][name] = distribute_tensor(
                        value.to(parameter.device),
                        parameter.device_mesh,
                        parameter.placements,
                    )
        optimizer.load_state_dict({**state, "state": sharded})

    def clip_gradient(self, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
        """Clip the gradient; return its full norm () before."""
        return _gather(nn.utils.clip_grad_norm_(parameters, max_norm))


def _gather(value: Any) -> Any:
    """Return a full tensor on the CPU for a sharded one; other values unchanged."""
    from torch.distributed.tensor import DTensor

    return value.full_tensor().cpu() if isinstance(value, DTensor) else value
