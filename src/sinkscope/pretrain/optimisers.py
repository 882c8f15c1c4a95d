"""Optimisers and the learning rate: AdamW, or Muon for the matrices of the blocks with AdamW for the rest."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.attention.head_norm import HeadRMSNorm
from sinkscope.pretrain.config import TrainingConfig


def build_optimisers(
    model: nn.Module, blocks: nn.Module, config: TrainingConfig, *, capturable: bool = False
) -> list[torch.optim.Optimizer]:
    """The optimisers of a model's parameters; weight decay acts on matrices alone, not on gains and biases.

    Muon takes the matrices inside `blocks`, with an update scaled to the size of AdamW's, so that both share one
    learning rate; embeddings stay with AdamW, since their rows are looked up, not multiplied. Capturable ones
    read their learning rate on the device, so that a graph of their step can be launched with another one.
    """
    inside = {id(parameter) for parameter in blocks.parameters()}
    norms = [module for module in model.modules() if isinstance(module, HeadRMSNorm)]
    gains = {id(p) for norm in norms for p in norm.parameters()}  # a gain for each head is a table, but no matrix
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2 and id(p) not in gains]
    vectors = [p for p in model.parameters() if p.requires_grad and (p.ndim < 2 or id(p) in gains)]
    by_muon = [p for p in matrices if config.optimiser == "muon" and id(p) in inside and p.ndim == 2]
    taken = {id(p) for p in by_muon}
    by_adamw = [p for p in matrices if id(p) not in taken]
    groups = [
        {"params": by_adamw, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    rate = torch.tensor(config.learning_rate, device=matrices[0].device) if capturable else config.learning_rate
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            fused=True,
            capturable=capturable,
        )
    ]
    if by_muon:
        muon = CapturableMuon if capturable else torch.optim.Muon
        optimisers.append(
            muon(by_muon, lr=rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")  # type: ignore[arg-type]
        )
    return optimisers


class CapturableMuon(torch.optim.Muon):
    """Muon, scaled to AdamW's update, whose step a CUDA graph can record: its learning rate is a tensor on the device.

    Torch's own step reads the rate on the host and takes 15 small products for each matrix, which cost a small model
    more time than its gradients. Here matrices of one shape share a batch of products.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for weight in group["params"]:
                by_shape.setdefault(weight.shape, []).append(weight)
            for weights in by_shape.values():
                self._step_together(weights, group)

    def _step_together(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        gradients, momenta = [], []
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            gradients.append(weight.grad)
            momenta.append(state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"]))
        update = _orthogonalised(torch.stack(gradients).lerp(torch.stack(momenta), group["momentum"]), group)
        scale = 0.2 * math.sqrt(max(weights[0].shape))
        change = group["lr"] * (group["weight_decay"] * torch.stack(weights) + scale * update)
        for weight, difference in zip(weights, change, strict=True):
            weight.sub_(difference)


def _orthogonalised(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """Matrices whose singular values are near 1, by the Newton-Schulz iteration of torch's Muon, in bfloat16."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    found = (matrices.mT if is_tall else matrices).bfloat16()
    found = found / torch.linalg.matrix_norm(found, keepdim=True).clamp(min=group["eps"])
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return (found.mT if is_tall else found).to(matrices.dtype)


def learning_rate(step: int, config: TrainingConfig) -> float:
    """The learning rate of the update that follows `step` updates: a linear warm-up, then the schedule's fall.

    cosine: from the peak to the final rate over all steps left. constant: at the peak until the last `decay_share` of
    the steps, then a straight line to the final rate.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "cosine":
        first = config.warmup_steps
        progress = (step - first) / max(1, config.steps - first)
        remaining = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        first = max(config.warmup_steps, round(config.steps * (1 - config.decay_share)))
        remaining = 1 - max(0.0, min(1.0, (step - first) / max(1, config.steps - first)))
    final = config.final_learning_rate_share
    return config.learning_rate * (final + (1 - final) * remaining)


def set_learning_rate(optimisers: list[torch.optim.Optimizer], rate: float) -> None:
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
