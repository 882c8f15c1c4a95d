"""A GPT that is not from Hugging Face, and the one thing that sinkscope must know of it: `sinkscope_anatomy`.

Run: python examples/own_gpt.py

What a model of your own must offer:
- a list of blocks, each with an attention, the attention's output projection and the feed-forward's down projection;
- attention that calls scaled_dot_product_attention(q, k, v, is_causal=True);
- forward(input_ids, **others), and get_input_embeddings() as Hugging Face has it.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import sinkscope
from sinkscope.models.anatomy import Anatomy, described
from sinkscope.models.families import Family

FAMILY = Family(
    name="own_gpt",
    model_types=(),
    blocks="blocks",
    attention="attention",
    output_projection="attention.project",
    down_projection="down",
    feed_forward=None,
    activations=(),
    attention_door="causal_sdpa",
)


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.queries_keys_values(x).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3).unbind(2)
        return self.project(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(gelu(self.up(self.feed_forward_norm(x))))


class OwnGPT(nn.Module):
    def __init__(self, vocabulary: int = 100, width: int = 32, num_heads: int = 4, num_layers: int = 3) -> None:
        super().__init__()
        self.num_heads, self.width, self.context = num_heads, width, 256
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(self.context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor, **others) -> Tensor:
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T

    def get_input_embeddings(self) -> nn.Embedding:
        return self.tokens

    @property
    def sinkscope_anatomy(self) -> Anatomy:
        return described(FAMILY, self, num_heads=self.num_heads, width=self.width, context=self.context)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = OwnGPT()
    ids = torch.randint(100, (8, 48))
    print(sinkscope.trace(model, ids))
    with sinkscope.mask_to_self(model, 10):
        print(sinkscope.trace(model, ids))
