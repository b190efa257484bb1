"""A training step, or a search, as CUDA graphs: one launch in place of a thousand, and nothing waits for the host.

    step = Graphs(step, device)  # step(batch) gives tensors
    found = step(batch)          # the first of a shape runs as it is, the second is captured, all others are replayed

A graph repeats its kernels on the same memory. So a batch is copied into tensors of the
graph's own, and what a call gives is overwritten by the next one: read it before.
Kernels, and random numbers of a seed, are those of a call without a graph, and so are
the results, bit by bit.

What is captured reads no value back from the device (`tests/models/test_gpu.py` holds
that for every model). Where something does all the same, or cannot be captured, a
warning names it and all goes on without graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch

from models.dataset.batch import Batch

Result = TypeVar("Result")

MOST = 64
"""Graphs at most: batches of other shapes run as they are."""


def compiled(function: Any) -> Any:
    """Compile a function with torch.compile."""
    torch._dynamo.config.recompile_limit = MOST
    return torch.compile(function, dynamic=False)


class Graphs(Generic[Result]):
    """`run(batch)`, a function of a batch on a GPU, by one graph per shape of the batch. Graphs share their memory. On
    a CPU, for tests, a replay is a call on the same tensors."""

    on: ClassVar[bool] = True
    """Whether graphs are made: after a capture that failed no more, in the whole
    process."""

    def __init__(self, run: Callable[[Any], Result], device: torch.device) -> None:
        self.run, self.device = run, device
        self._graphs: dict[Any, tuple[Callable[[], Result], Batch] | None] = {}
        self._made = 0
        if device.type == "cuda":
            self._side = torch.cuda.Stream(
                device
            )  # a default stream cannot be captured, so nothing may be bound to it
            self._pool = torch.cuda.graph_pool_handle()
        self._waits = False

    def __call__(self, batch: Batch) -> Result:
        """Return the result of `run` for a batch, which may be in pinned memory.

        The next call overwrites the result.
        """
        key = batch.signature
        if key not in self._graphs:
            self._graphs[key] = None
            return self._first(batch)
        if self._waits or not Graphs.on:
            return self._plain(batch)
        if self._graphs[key] is None and self._made < MOST:
            self._graphs[key] = self._capture(batch)
            self._made += 1
        if (made := self._graphs[key]) is None:
            return self._plain(batch)
        replay, inputs = made
        inputs.copy_from(batch)
        return replay()

    def _first(self, batch: Batch) -> Result:
        """Run without a graph, and detect waits for the device, which a graph cannot
        repeat.
        """
        if self.device.type != "cuda" or self._waits:
            return self._plain(batch)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = self._plain(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for warning in seen:
            if "synchronizing CUDA operation" in str(warning.message):
                self._waits = True
                place = f"{warning.filename}:{warning.lineno}"
                warnings.warn(
                    f"without CUDA graphs: {place} reads a value back from the device",
                    stacklevel=3,
                )
                break
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        return result

    def _plain(self, batch: Batch) -> Result:
        """Run without a graph on the capture stream, so that first-call allocations
        last.
        """
        if self.device.type != "cuda":
            return self.run(batch)
        main = torch.cuda.current_stream(self.device)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            result = self.run(batch.to(self.device))
        main.wait_stream(self._side)
        return result

    def _capture(self, batch: Batch) -> tuple[Callable[[], Result], Batch] | None:
        """Capture a graph for the batch's shape; None if the run cannot be captured."""
        inputs = batch.map(lambda value: value.to(self.device, copy=True))
        if self.device.type != "cuda":
            return lambda: self.run(inputs), inputs
        graph = torch.cuda.CUDAGraph()
        try:  # other threads, such as that which pins batches, go on meanwhile
            with torch.cuda.graph(
                graph, self._pool, self._side, capture_error_mode="thread_local"
            ):
                result = self.run(inputs)
        except (
            Exception
        ) as error:  # whatever an operation raises that cannot be captured
            Graphs.on = False
            torch.cuda.synchronize(self.device)
            _free_generator(self.device)
            first = (str(error.__context__ or error).splitlines() or [""])[0]
            warnings.warn(f"without CUDA graphs from here on: {first}", stacklevel=2)
            return None

        def replay() -> Result:
            graph.replay()
            return result

        return replay, inputs


def _free_generator(device: torch.device) -> None:
    """A capture that fails leaves the generator of random numbers bound to it: gives it a new state."""
    default = torch.cuda.default_generators[device.index or 0]
    default.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
