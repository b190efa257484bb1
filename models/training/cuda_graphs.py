"""Training steps and searches as CUDA graphs: one kernel launch instead of a thousand.

    step = CudaGraphs(step, device)   # step(batch) returns tensors
    outputs = step(batch)

The first call with a shape of batches runs without a graph, the second call captures a
graph, and later calls replay the graph. A graph repeats its kernels on the same memory.
So a batch is copied into input tensors that belong to the graph, and the result of a
call is overwritten by the next call: read it before. A replay runs the same kernels
with the same random numbers as a call without a graph, so results are equal bit by bit.

A captured function must not read a value back from the device, which
`tests/models/test_gpu.py` tests for every model. If a function does so, or cannot be
captured, a warning says why, and calls run without graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch

from models.dataset.batch import Batch

Result = TypeVar("Result")

MAX_GRAPHS = 64
"""Most graphs of one function; batches of further shapes run without a graph."""


class CudaGraphs(Generic[Result]):
    """A function of a batch on a GPU, with one CUDA graph per shape of the batch.

    All graphs share one memory pool. On a CPU, for tests, a replay calls the function
    on the input tensors of the graph.
    """

    enabled: ClassVar[bool] = True
    """Whether graphs are captured and replayed; False in the whole process once a
    capture has failed."""

    def __init__(self, run: Callable[[Any], Result], device: torch.device) -> None:
        """Wrap a function.

        Args:
            run: Function to capture, whose only argument is a batch.
            device: Device on which the function runs.
        """
        self.run, self.device = run, device
        self._graphs: dict[Any, tuple[Callable[[], Result], Batch] | None] = {}
        self._num_captured = 0
        if device.type == "cuda":
            # A default stream cannot be captured, so no state may be bound to it.
            self._side_stream = torch.cuda.Stream(device)
            self._pool = torch.cuda.graph_pool_handle()
        self._synchronizes = False

    def __call__(self, batch: Batch) -> Result:
        """Return the result of the function for a batch, which may be in pinned memory.

        The next call overwrites the result.
        """
        key = batch.signature
        if key not in self._graphs:
            self._graphs[key] = None
            return self._run_first(batch)
        if self._synchronizes or not CudaGraphs.enabled:
            return self._run_plain(batch)
        if self._graphs[key] is None and self._num_captured < MAX_GRAPHS:
            self._graphs[key] = self._capture(batch)
            self._num_captured += 1
        graph = self._graphs[key]
        if graph is None:
            return self._run_plain(batch)
        replay, inputs = graph
        inputs.copy_from(batch)
        return replay()

    def _run_first(self, batch: Batch) -> Result:
        """Run without a graph, and detect synchronizations, which prevent a graph."""
        if self.device.type != "cuda" or self._synchronizes:
            return self._run_plain(batch)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = self._run_plain(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for warning in caught:
            if "synchronizing CUDA operation" in str(warning.message):
                self._synchronizes = True
                source = f"{warning.filename}:{warning.lineno}"
                warnings.warn(
                    f"without CUDA graphs: {source} reads a value back from the device",
                    stacklevel=3,
                )
                break
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        return result

    def _run_plain(self, batch: Batch) -> Result:
        """Run without a graph, on the stream that graphs are captured on."""
        if self.device.type != "cuda":
            return self.run(batch)
        main_stream = torch.cuda.current_stream(self.device)
        self._side_stream.wait_stream(main_stream)
        with torch.cuda.stream(self._side_stream):
            result = self.run(batch.to(self.device))
        main_stream.wait_stream(self._side_stream)
        return result

    def _capture(self, batch: Batch) -> tuple[Callable[[], Result], Batch] | None:
        """Capture a graph for the shape of a batch."""
        inputs = batch.map(lambda value: value.to(self.device, copy=True))
        if self.device.type != "cuda":
            return lambda: self.run(inputs), inputs
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as the one that pins batches, may use CUDA meanwhile.
            with torch.cuda.graph(
                graph, self._pool, self._side_stream, capture_error_mode="thread_local"
            ):
                result = self.run(inputs)
        except Exception as error:  # operations raise many types when captured
            CudaGraphs.enabled = False
            torch.cuda.synchronize(self.device)
            _reset_generator(self.device)
            lines = str(error.__context__ or error).splitlines()
            reason = lines[0] if lines else ""
            warnings.warn(f"without CUDA graphs from here on: {reason}", stacklevel=2)
            return None

        def replay() -> Result:
            graph.replay()
            return result

        return replay, inputs


def _reset_generator(device: torch.device) -> None:
    """Give the random number generator a new state after a failed capture."""
    default = torch.cuda.default_generators[device.index or 0]
    default.graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
