"""Training a model in shards (FSDP2): weights, gradients and the optimizer's state are cut over the workers.

Each block of a language model is gathered when it is computed and let go after it, so that a worker holds its share of
the training's 16 bytes per parameter and one block. A model is built whole before it is cut, and is whole again while
it validates, as workers decode different numbers of batches: 4 bytes per parameter on each device.

Checkpoints hold whole weights, which rank 0 writes, and whole states of the optimizer, of which each worker writes its
share of the parameters; so a run goes on with another number of workers, sharded or not. PyTorch's part of this takes a
second to import, so only what uses it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def shard(
    model: nn.Module, blocks: Sequence[nn.Module], device: torch.device, world: int
) -> None:
    """Cuts the blocks, each by itself, and what else the model has over `world` workers; all have the same weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """The model with whole weights, for what is no training step; as it is where it is not sharded."""
    from torch.distributed.fsdp import FSDPModule

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(True)
            unit.reshard()


def whole(value: Any) -> Any:
    """Sharded tensors in a state as whole ones, which workers gather together; all else as it is."""
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    return [whole(part) for part in value] if isinstance(value, list) else value


def share(state: dict[int, Any], rank: int, world: int) -> dict[int, Any]:
    """Of the optimizer's state of each parameter, whole, that of every `world`-th one, which this rank writes; workers
    gather together."""
    parts = ((number, whole(values)) for number, values in sorted(state.items()))
    return {
        number: values
        for place, (number, values) in enumerate(parts)
        if place % world == rank
    }


def weights(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Whole weights by name on the CPU, which workers gather together and those with `keep` get; of tied ones the first
    name alone, as `safetensors` keeps them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    again = {name for tied in names.values() for name in sorted(tied)[1:]}
    found = (
        (name, whole(value))
        for name, value in model.state_dict().items()
        if name not in again
    )
    return {name: value.cpu().contiguous() for name, value in found if keep}


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads a whole state; of sharded parameters each worker keeps its part."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]

    def part(number: int, name: str, value: Any) -> Any:
        parameter = parameters[number]
        if (
            name == "step"
            or not isinstance(parameter, DTensor)
            or not isinstance(value, Tensor)
        ):
            return value
        return distribute_tensor(
            value.to(parameter.device), parameter.device_mesh, parameter.placements
        )

    kept = {
        n: {k: part(int(n), k, v) for k, v in values.items()}
        for n, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": kept})
