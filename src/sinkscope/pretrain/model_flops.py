"""How much of a device's arithmetic training uses: model FLOPs, and the rate that its matrix products reach."""

from __future__ import annotations

import time

import torch

from sinkscope.pretrain.decoder import Decoder


def flops_per_token(model: Decoder, length: int) -> float:
    """Floating-point operations of the model's own forward and backward pass a token: 6 N + 6 L T E.

    N are the parameters without the input embedding, which is looked up (tied, it is the output matrix and counts);
    causal attention adds L layers over T / 2 keys of width E on average. Recomputation would not count.
    """
    config = model.config
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if not config.tie_word_embeddings:
        num_parameters -= model.model.embed_tokens.weight.numel()
    shape = config.attention_shape()
    width = shape.num_heads * shape.head_size
    return 6 * num_parameters + 6 * config.num_hidden_layers * length * width


@torch.no_grad()
def matrix_rate(device: torch.device) -> float:
    """FLOP/s of a large matrix product in the dtype that training multiplies in, the best of a few."""
    on_cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_cuda else (768, torch.float32)
    # Random numbers: a GPU multiplies zeros faster.
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        _wait(device)
        started_at = time.perf_counter()
        for _ in range(5 if on_cuda else 1):
            torch.matmul(a, b)
        _wait(device)
        best = min(best, (time.perf_counter() - started_at) / (5 if on_cuda else 1))
    return 2 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
