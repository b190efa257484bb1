"""What a student of semantic IDs learns from its teacher: equation 3 of SID-MLP, and a memory of the teacher's answers.

A frozen teacher says the same of a request in every epoch. Asked anew it is most of a training step; remembered,
without padding and at half precision, it is asked once.

Shapes: `B` requests, `S` tokens of a history, `D` width, `C` codes or tokens predicted, `O` logits of a request.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

Answer = tuple[Tensor, Tensor | None, Tensor]
"""Encoder states (B, S, D), padding (B, 1, 1, S) of 0 and -inf or None, teacher's logits (B, O)."""


def distillation_loss(student: Tensor, teacher: Tensor | None, target: Tensor, alpha: float, tau: float) -> Tensor:
    """Equation 3 for one digit, the mean over the batch.

    alpha tau^2 KL(softmax(teacher / tau) || softmax(student / tau)) + (1 - alpha) CE(student, target), for
    logits (B, C) and target (B,); `teacher` may be None where alpha is 0.
    """
    student = student.float()
    loss = (1 - alpha) * functional.cross_entropy(student, target)
    if teacher is None:
        return loss
    soft = (teacher.float() / tau).log_softmax(-1)
    divergence = functional.kl_div((student / tau).log_softmax(-1), soft, reduction="batchmean", log_target=True)
    return loss + alpha * tau**2 * divergence


class TeacherMemory:
    """Answers by request, up to a limit of memory; requests beyond it are asked anew each time.

    Every answer is rounded to half precision, also when it is new, so that all epochs learn from the same.
    """

    def __init__(self, megabytes: int) -> None:
        self.limit = megabytes * 2**20
        self.bytes = 0
        """Held so far."""
        self._answers: dict[int, tuple[Tensor, Tensor]] = {}  # by number of the request: (S, D) without padding, (O,)

    def __call__(self, batch: dict[str, Tensor], ask: Callable[[dict[str, Tensor]], Answer]) -> Answer:
        """The answer to the batch: what is known of it, and `ask` for the rest."""
        numbers = batch["request"].tolist()
        new = [row for row, number in enumerate(numbers) if number not in self._answers]
        asked = dict(zip((numbers[row] for row in new), self._ask(batch, new, ask), strict=True)) if new else {}
        for number, answer in asked.items():
            size = sum(part.numel() * part.element_size() for part in answer)
            if self.bytes + size <= self.limit:
                self._answers[number] = answer
                self.bytes += size
        answers = [asked[number] if number in asked else self._answers[number] for number in numbers]
        states = pad_sequence([states.float() for states, _ in answers], batch_first=True)
        lengths = [len(states) for states, _ in answers]
        padding = None
        if min(lengths) < states.shape[1]:
            place = torch.arange(states.shape[1], device=states.device)
            padded = place >= torch.tensor(lengths, device=states.device).unsqueeze(1)
            padding = states.new_zeros(padded.shape).masked_fill(padded, -torch.inf)[:, None, None]
        return states, padding, torch.stack([logits.float() for _, logits in answers])

    @staticmethod
    def _ask(
        batch: dict[str, Tensor], rows: list[int], ask: Callable[[dict[str, Tensor]], Answer]
    ) -> list[tuple[Tensor, Tensor]]:
        states, padding, logits = ask({name: value[rows] for name, value in batch.items()})
        if states.requires_grad:
            raise ValueError("an encoder that is trained cannot be remembered; set teacher_memory_mb 0")
        length = [states.shape[1]] * len(rows) if padding is None else (padding[:, 0, 0] == 0).sum(1).tolist()
        halves = zip(states.half(), logits.half(), length, strict=True)
        return [(own[:real].clone(), soft.clone()) for own, soft, real in halves]
