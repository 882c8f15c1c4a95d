"""Head-wise RMSNorm and the probe in a training loop of your own, in three lines.

Run: python examples/head_norm_in_your_model.py

    norms = sinkscope.insert_head_norm(model, initial_lambda=0.25)  # before the optimiser is made
    groups = with_norms_apart(model, norms)                         # lambdas are no matrices: AdamW, without decay
    wandb.log(sinkscope.probe(model, batch).whole, step=step)       # on every rank, if FSDP2 shards the model

A model of transformers needs no more. Of any other, say where its parts are, as `sinkscope_anatomy`. That is a row of
names, which leaves the code of the model as it is. Norms alone need nothing else of it. A probe also needs what
examples/own_gpt.py lists.
"""

from collections.abc import Iterable
from typing import Any

import torch
from own_gpt import OwnGPT
from torch import nn

import sinkscope
from sinkscope.models.anatomy import described
from sinkscope.models.families import Family

NANOCHAT = Family(
    name="nanochat", model_types=(), blocks="transformer.h", attention="attn", output_projection="attn.c_proj",
    down_projection="mlp.c_proj", feed_forward="mlp", activations=(), attention_door="causal_sdpa",
)  # fmt: skip
TORCHTITAN = Family(
    name="torchtitan", model_types=(), blocks="layers", attention="attention", output_projection="attention.wo",
    down_projection="feed_forward.w2", feed_forward="feed_forward", activations=(), attention_door="causal_sdpa",
)  # fmt: skip


def put_norms(model: Any, family: Family, *, num_heads: int, width: int) -> list[sinkscope.HeadRMSNorm]:
    """The norms of a model that is not of transformers; `described` finds its parts by the names in the row.

    nanochat:   put_norms(model, NANOCHAT, num_heads=config.n_head, width=config.n_embd), after init_weights()
    torchtitan: put_norms(model, TORCHTITAN, num_heads=16, width=256), after init_weights() and before fully_shard
    """
    model.sinkscope_anatomy = described(family, model, num_heads=num_heads, width=width)
    return sinkscope.insert_head_norm(model, initial_lambda=0.25)


def with_norms_apart(model: nn.Module, norms: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Groups of parameters for AdamW, the second without weight decay."""
    apart = [parameter for norm in norms for parameter in norm.parameters()]
    own = set(map(id, apart))
    rest = [parameter for parameter in model.parameters() if id(parameter) not in own]
    return [{"params": rest}, {"params": apart, "weight_decay": 0.0}]


def take_out_of_muon(optimiser: Any, norms: Iterable[nn.Module], **options: Any) -> None:
    """Moves lambdas and offsets into a group of their own.

    nanochat gives Muon all parameters of its blocks, which would turn the lambdas of a layer as if they were a matrix:
    take_out_of_muon(optimizer, norms, kind="adamw", lr=0.01, initial_lr=0.01, betas=(0.8, 0.95), eps=1e-10)
    """
    apart = [parameter for norm in norms for parameter in norm.parameters()]
    own = set(map(id, apart))
    for group in optimiser.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
    optimiser.param_groups[:] = [group for group in optimiser.param_groups if group["params"]]
    optimiser.add_param_group({"params": apart, "weight_decay": 0.0, **options})


if __name__ == "__main__":
    torch.manual_seed(0)
    model, batch = OwnGPT(), torch.randint(100, (8, 48))
    norms = sinkscope.insert_head_norm(model, initial_lambda=0.25)
    optimiser = torch.optim.AdamW(with_norms_apart(model, norms), lr=1e-3)
    for step in range(5):
        logits = model(batch)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        print(step, f"loss {loss:.3f}", sinkscope.probe(model, batch).whole)
