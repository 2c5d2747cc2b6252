"""Muon for the hidden matrices and AdamW for the rest, as one optimiser."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from lit_linformer.tasks.optim import MUON
from lit_linformer.utils.errors import SettingError

MOMENTUM = 0.95
QUINTIC = 3.4445, -4.7750, 2.0315  # Jordan et al. (2024): applied five times, it maps singular values 0.002 … 1 to 0.68 … 1.2


class MuonAndAdamW(Optimizer):
    """Muon (Jordan et al., 2024) for the parameter groups of that name, AdamW for the others.

    There is one list of groups and one state, of which the inner AdamW sees its part: to schedules, clipping, checkpoints, and
    Lightning, whose automatic optimisation takes only one optimiser, the two look like one AdamW.

    Muon orthogonalises a matrix's momentum (Nesterov's, 0.95). Its steps are scaled to the length of AdamW's, by
    0.2 √(larger side) (Liu et al., 2025, "Muon is scalable for LLM training"), so that one learning rate and one weight decay
    suit both. torch.optim.Muon computes the same, but in bfloat16 on every device and one matrix at a time: on a CPU without
    bfloat16 units a layer took 17 times as long (docs/LOG.md). Here matrices of one shape are orthogonalised together.

    Args:
        groups: from parameter_groups.
        betas, eps: AdamW's.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float):
        if not any(_is_muons(group) for group in groups):
            raise SettingError("model.optimizer", "muon", "adamw", more=", but no EncoderLayer of the model learns")
        self._adamw: AdamW | None = None
        super().__init__(groups, {})
        self._adamw = AdamW([group for group in groups if not _is_muons(group)], betas=betas, eps=eps, fused=True)
        self._divide()

    def _divide(self) -> None:
        self._adamw.param_groups = [group for group in self.param_groups if not _is_muons(group)]
        self._adamw.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # for load_state_dict, which replaces groups and state
        self._divide()

    def __getstate__(self) -> dict[str, Any]:  # for copies
        return super().__getstate__() | {"_adamw": self._adamw}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._adamw is not None:  # None while __init__ adds the first groups
            for name, value in ({} if _is_muons(param_group) else self._adamw.defaults).items():
                param_group.setdefault(name, value)
            self._divide()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if _is_muons(group):
                self._step_muon(group)
        self._adamw.step()
        return loss

    @torch.no_grad()
    def _step_muon(self, group: dict[str, Any]) -> None:
        alike = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                alike[parameter.shape, parameter.device].append(parameter)
        for parameters in alike.values():
            momenta = [self._momentum(parameter).lerp_(parameter.grad, 1 - MOMENTUM) for parameter in parameters]
            ahead = [p.grad.lerp(momentum, MOMENTUM) for p, momentum in zip(parameters, momenta, strict=True)]
            steps = orthogonalized(torch.stack(ahead))
            length = group["lr"] * 0.2 * max(parameters[0].shape) ** 0.5
            for parameter, step in zip(parameters, steps, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=-length)

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        return state["momentum_buffer"]


def orthogonalized(matrices: Tensor) -> Tensor:
    """(B, m, n) = U S Vᵀ → nearly U Vᵀ, by five Newton–Schulz steps; in bfloat16 on a GPU that has it, else in float32."""
    fast = matrices.is_cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    tall, (a, b, c) = matrices.shape[-2] > matrices.shape[-1], QUINTIC
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    x = x.to(torch.bfloat16 if fast else torch.promote_types(x.dtype, torch.float32))
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _is_muons(group: dict[str, Any]) -> bool:
    return group.get("name", "").startswith(MUON)
