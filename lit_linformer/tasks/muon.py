"""Muon for the hidden matrices and AdamW for the rest, as one optimiser."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from lit_linformer.tasks.optim import MUON
from lit_linformer.utils.errors import SettingError


class MuonAndAdamW(Optimizer):
    """torch's Muon (Jordan et al., 2024) for the groups that are named so, AdamW for the others.

    One list of groups and one state, of which each of the two sees its own: schedules, clipping and checkpoints, and Lightning,
    which trains by itself with one optimiser only, find what they find of AdamW.

    Muon orthogonalises a matrix's momentum. Its steps are scaled to the length of AdamW's, by 0.2 √(larger side) (Liu et al.,
    2025, "Muon is scalable for LLM training"), so that one learning rate and one weight decay suit both.

    Args:
        groups: of parameter_groups.
        betas, eps: AdamW's.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float):
        if not any(_is_muons(group) for group in groups):
            raise SettingError("model.optimizer", "muon", "adamw", more=", but the model has no EncoderLayer for it")
        self._parts: tuple[Optimizer, ...] = ()
        super().__init__(groups, {})
        muon = torch.optim.Muon([group for group in groups if _is_muons(group)], adjust_lr_fn="match_rms_adamw")
        adamw = AdamW([group for group in groups if not _is_muons(group)], betas=betas, eps=eps, fused=True)
        self._parts = muon, adamw
        self._divide()

    def _divide(self) -> None:
        for part, own in zip(self._parts, (True, False), strict=True):
            part.param_groups = [group for group in self.param_groups if _is_muons(group) == own]
            part.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of load_state_dict, which makes groups and state anew
        self._divide()

    def __getstate__(self) -> dict[str, Any]:  # of copies
        return super().__getstate__() | {"_parts": self._parts}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._parts:  # not yet of the groups that it is made with
            muon, adamw = self._parts
            for name, value in (muon if _is_muons(param_group) else adamw).defaults.items():
                param_group.setdefault(name, value)
            self._divide()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def _is_muons(group: dict[str, Any]) -> bool:
    return group.get("name", "").startswith(MUON)
