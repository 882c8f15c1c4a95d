"""Optimisers and the learning rate: AdamW, or Muon for the matrices of the blocks with AdamW for the rest."""

from __future__ import annotations

import math

import torch
from torch import nn

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
    """Muon with its learning rate on the device: a tensor, which torch's own step would read on the host.

    A step is a straight line in the rate, w - rate * (weight_decay * w + update): it is taken at a rate of 1 and cut to
    the rate.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        before = [[weight.clone() for weight in group["params"]] for group in self.param_groups]
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = 1.0
        super().step()
        for group, rate, kept in zip(self.param_groups, rates, before, strict=True):
            group["lr"] = rate
            for weight, old in zip(group["params"], kept, strict=True):
                weight.copy_(old.lerp(weight, rate))


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
