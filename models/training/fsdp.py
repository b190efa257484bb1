"""FSDP2 training: workers shard weights, gradients and optimizer state.

Each block of a language model is gathered for its computation and freed afterwards. So
a worker holds one full block, and its shard of the 16 bytes per parameter that training
needs. A model is built in full before it is sharded. For validation, in which workers
decode different numbers of batches, the full weights are gathered: 4 bytes per
parameter on each device.

Checkpoints hold the full weights, written by rank 0, and the full optimizer state: each
rank writes the state of its share of the parameters. So a run can resume with another
number of workers, sharded or not. Importing PyTorch's FSDP takes a second, so functions
import it when they run.
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
    """Shard each block, and the other parameters of the model, over the workers.

    Args:
        model: The model, with equal weights on all workers.
        blocks: Submodules that are gathered and freed one at a time.
        device: Device of the model.
        world: Number of workers.
    """
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
    """Return the full optimizer state of this rank's share of the parameters.

    A collective call.

    Args:
        state: Sharded optimizer state by index of the parameter.
        rank: Rank of this worker; its share is every `world`-th parameter.
        world: Number of workers.
    """
    share = {}
    for i, (parameter, values) in enumerate(sorted(state.items())):
        full_values = gather(values)  # collective, also for the shares of other ranks
        if i % world == rank:
            share[parameter] = full_values
    return share


def gather_state_dict(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Return the full weights on the CPU by name; a collective call.

    Tied weights are returned once, under the first of their names, as `safetensors`
    saves them.

    Args:
        model: Model that `shard` has sharded.
        keep: Whether this rank needs the weights; if not, the result is empty.
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
    """Load this worker's shard of a full optimizer state."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]

    def shard_value(index: int, name: str, value: Any) -> Any:
        parameter = parameters[index]
        is_sharded = isinstance(parameter, DTensor) and isinstance(value, Tensor)
        if name == "step" or not is_sharded:
            return value
        return distribute_tensor(
            value.to(parameter.device), parameter.device_mesh, parameter.placements
        )

    sharded_state = {}
    for index, values in state["state"].items():
        sharded_state[index] = {
            name: shard_value(int(index), name, value) for name, value in values.items()
        }
    optimizer.load_state_dict({**state, "state": sharded_state})
