"""Optimisers and the learning rate: AdamW, or Muon for the matrices of the blocks with AdamW for the rest."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinkscope.attention.head_norm import HeadRMSNorm

if TYPE_CHECKING:
    from sinkscope.pretrain.config import TrainingConfig


def build_optimisers(
    model: nn.Module, blocks: nn.Module, config: TrainingConfig, *, capturable: bool = False
) -> list[torch.optim.Optimizer]:
    """The optimisers of a model's parameters; weight decay acts on matrices alone, not on gains and biases.

    Muon takes the matrices inside `blocks`. Its update is scaled to the size of AdamW's, so both share one learning
    rate. Embeddings stay with AdamW, since their rows are looked up, not multiplied. `capturable` optimisers read their
    learning rate from the device, so that the rate can change while a recorded CUDA graph stays the same.
    """
    in_blocks = {id(parameter) for parameter in blocks.parameters()}
    gains = set()  # of head-wise norms: [H, D], so two axes, but not a matrix that multiplies
    for module in model.modules():
        if isinstance(module, HeadRMSNorm):
            gains |= {id(parameter) for parameter in module.parameters()}
    muon_matrices, other_matrices, vectors = [], [], []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2 or id(parameter) in gains:
            vectors.append(parameter)
        elif config.optimiser == "muon" and id(parameter) in in_blocks and parameter.ndim == 2:
            muon_matrices.append(parameter)
        else:
            other_matrices.append(parameter)
    groups = [
        {"params": other_matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    device = next(model.parameters()).device
    rate = torch.tensor(config.learning_rate, device=device) if capturable else config.learning_rate
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
    if muon_matrices:
        muon = CapturableMuon if capturable else torch.optim.Muon
        optimisers.append(
            muon(muon_matrices, lr=rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")  # type: ignore[arg-type]
        )
    return optimisers


class CapturableMuon(torch.optim.Muon):
    """Muon, scaled to AdamW's update, with a step that a CUDA graph can record: the learning rate is on the device.

    Torch's own step reads the rate on the host. It also does 15 small products for each matrix, and in a small model
    these take longer than the gradients. Here all matrices of one shape are stacked and multiplied together.
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
        """The same update as torch's Muon (Nesterov momentum, decoupled weight decay), for weights of one shape."""
        gradients, momenta = [], []
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            gradients.append(weight.grad)
            momenta.append(state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"]))
        update = _orthogonalised(torch.stack(gradients).lerp(torch.stack(momenta), group["momentum"]), group)
        # An orthogonalised matrix has entries of about 1 / sqrt(longer side). 0.2 is the root mean square of AdamW's
        # update (Liu et al. 2025, "Muon is scalable").
        scale = 0.2 * math.sqrt(max(weights[0].shape))
        change = group["lr"] * (group["weight_decay"] * torch.stack(weights) + scale * update)
        for weight, difference in zip(weights, change, strict=True):
            weight.sub_(difference)


def _orthogonalised(matrices: Tensor, group: dict[str, Any]) -> Tensor:
    """The matrices with all singular values moved near 1, by the Newton-Schulz iteration of torch's Muon, in bfloat16.

    One step is X <- a X + (b G + c G G) X with G = X X^T. The coefficients move singular values towards 1 fast, and
    leave them near it rather than at it.
    """
    # Wide, so that G has the shorter side.
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if is_tall else matrices).bfloat16()
    # Singular values must begin between 0 and 1.
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=group["eps"])
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices.dtype)


def learning_rate(step: int, config: TrainingConfig) -> float:
    """The learning rate of update number `step`, from 0: a linear warm-up to the peak, then the schedule.

    cosine: from the peak to the final rate over all remaining steps. constant: at the peak until the last `decay_share`
    of the steps, then a straight line to the final rate.
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
            if isinstance(group["lr"], torch.Tensor):  # capturable: written in place, where the CUDA graph reads it
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
