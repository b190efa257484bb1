"""Sharded training (FSDP2): weights, gradients and optimizer state are sharded over the workers.

Each block of a language model is gathered for its computation and freed after it, so a
worker holds its shard of the training's 16 bytes per parameter, and one block. A model
is built in full before it is sharded, and gathered for validation, as workers decode
different numbers of batches: 4 bytes per parameter on each device.

Checkpoints hold full weights, which rank 0 writes, and full optimizer states, of which
each worker writes a share of the parameters. So a run continues with another number of
workers, sharded or not. PyTorch's FSDP takes a second to import, so functions import
it.
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
    """Shard each block, and the rest of the model, over `world` workers with equal weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@contextmanager
def gather_weights(model: nn.Module) -> Iterator[None]:
    """Gather the full weights of a sharded model within the context, for validation."""
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


def gather(value: Any) -> Any:
    """Return a state with sharded tensors gathered on the CPU; a collective call."""
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return {key: gather(part) for key, part in value.items()}
    return [gather(part) for part in value] if isinstance(value, list) else value


def take_share(state: dict[int, Any], rank: int, world: int) -> dict[int, Any]:
    """Return the gathered optimizer state of every `world`-th parameter, for this rank to write.

    A collective call.
    """
    share = {}
    for i, (parameter, values) in enumerate(sorted(state.items())):
        full = gather(values)
        if i % world == rank:
            share[parameter] = full
    return share


def gather_state_dict(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Return the full weights on the CPU if `keep`, otherwise nothing; a collective call.

    Of tied weights only the first name is returned, as `safetensors` saves them.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    repeated = {name for tied in names.values() for name in sorted(tied)[1:]}
    weights = {}
    for name, value in model.state_dict().items():
        if name in repeated:
            continue
        full = gather(value)
        if keep:
            weights[name] = full.cpu().contiguous()
    return weights


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a full optimizer state; of sharded parameters each worker loads its shard."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]

    def shard_value(number: int, name: str, value: Any) -> Any:
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

    sharded = {
        n: {k: shard_value(int(n), k, v) for k, v in values.items()}
        for n, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": sharded})
