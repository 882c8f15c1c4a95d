"""The plain definition of what sinkscope measures, from a whole eager forward pass in float64.

It is slow and has no shortcut: every attention map, aggregation, neuron and residual is kept, and reduced as its
definition says. Nothing here comes from the package.
Axes: B sequences, T query position, S key position, H heads, C channels, E width, F neurons, L layers.
"""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from tiny_models import PARTS
from torch import Tensor, nn

SINK = 0.3
"""A head counts a key as a sink when the mean attention that the key receives exceeds this."""

MaskEdit = Callable[[Tensor], Tensor]


def plain_numbers(
    model: nn.Module,
    family: str,
    ids: Tensor,
    *,
    zeroed: Sequence[tuple[int, int]] = (),
    edit_mask: MaskEdit | None = None,
) -> dict[str, np.ndarray]:
    """Numbers by name: [L, T] of the chain, [L] effective_rank, and what the last position gives.

    `zeroed` are (layer, neuron) that are set to zero where they enter the down projection; `edit_mask` changes the mask
    that is added to the scores.
    """
    model = copy.deepcopy(model).double().eval()
    model.set_attn_implementation("eager")
    parts = PARTS[family]
    blocks = model.get_submodule(parts["blocks"])
    kept: list[dict[str, Tensor]] = [{} for _ in blocks]

    def keep(layer: int, name: str, x: Tensor) -> None:
        kept[layer][name] = x.detach().reshape(*ids.shape, -1).clone()

    def before(layer: int, name: str):
        return lambda _, args: keep(layer, name, args[0])

    def after(layer: int, name: str):
        return lambda _, args, out: keep(layer, name, out[0] if isinstance(out, tuple) else out)

    def zero(neuron: int):
        def hook(_, args):
            args[0][..., neuron] = 0
            return args

        return hook

    def masked(_, args, kwargs):
        assert kwargs["attention_mask"] is not None
        return args, {**kwargs, "attention_mask": edit_mask(kwargs["attention_mask"])}

    for layer, block in enumerate(blocks):
        down = block.get_submodule(parts["down"])
        for other, neuron in zeroed:
            if other == layer:
                down.register_forward_pre_hook(zero(neuron))
        block.register_forward_hook(after(layer, "leaving"))
        block.get_submodule(parts["output"]).register_forward_pre_hook(before(layer, "aggregation"))
        down.register_forward_pre_hook(before(layer, "neurons"))
        if hasattr(block, "post_feedforward_layernorm"):
            block.post_feedforward_layernorm.register_forward_pre_hook(before(layer, "before_norm"))
            block.post_feedforward_layernorm.register_forward_hook(after(layer, "behind_norm"))
        if edit_mask is not None:
            block.get_submodule(parts["attention"]).register_forward_pre_hook(masked, with_kwargs=True)
    with torch.no_grad():
        out = model(ids, use_cache=False, output_attentions=True, output_hidden_states=True)
        for layer, block in enumerate(blocks):
            kept[layer]["attention"] = out.attentions[layer]
            kept[layer]["output_FE"] = _matrix(block.get_submodule(parts["down"]), kept[layer]["neurons"].shape[-1])
    columns = [_of_layer(layer) for layer in kept]
    last = kept[-1]["leaving"]
    return {name: torch.stack([column[name] for column in columns]).numpy() for name in columns[0]} | {
        "final_state": out.hidden_states[-1][:, -1].numpy(),
        "inter_cosine": _mean_cosine(last[:, -1]).numpy(),
        "intra_cosine": torch.stack([_mean_cosine(sequence) for sequence in last]).nanmean().numpy(),
        "entropy": _entropy(out.logits[:, -1].argmax(-1)).numpy(),
    }


def _of_layer(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    a_BHTS, o_BTC, h_BTE = layer["attention"], layer["aggregation"], layer["leaving"]
    num_sequences, num_positions = h_BTE.shape[:2]
    alpha_BHS = torch.stack([a_BHTS[:, :, k:, k].mean(-1) for k in range(num_positions)], dim=-1)
    write_BTF = layer["neurons"].abs() * layer["output_FE"].norm(dim=-1)
    if "behind_norm" in layer:
        # What a neuron writes is what leaves the norm: each dimension is multiplied as the whole output is there.
        # A feed-forward that gives zeros writes nothing.
        factor_BTE = (layer["behind_norm"] / layer["before_norm"]).nan_to_num()
        write_BTF = layer["neurons"].abs() * (factor_BTE.square() @ layer["output_FE"].T.square()).sqrt()
    deviation = o_BTC - o_BTC.mean(0)
    return {
        "attention_received": alpha_BHS.mean((0, 1)),
        "sink_rate": (alpha_BHS > SINK).double().mean((0, 1)),
        "value_variance": (deviation.square().sum(0) / (num_sequences - 1)).mean(-1),
        # A state of zeros has no ratio: the mean is over the others, and empty where there are none.
        "dom_ratio": (h_BTE.abs().amax(-1) / h_BTE.abs().mean(-1)).nanmean(0),
        "largest_write": write_BTF.amax((0, 2)),
        "effective_rank": _effective_rank(h_BTE.flatten(0, 1)),
    }


def _matrix(linear: nn.Module, num_inputs: int) -> Tensor:
    """[F, E] what a linear module does, whatever it is made of: its answer to each unit vector less that to zero."""
    probes = torch.cat([torch.eye(num_inputs), torch.zeros(1, num_inputs)]).double()
    answers = linear.forward(probes)
    return answers[:-1] - answers[-1]


def _effective_rank(tokens: Tensor) -> Tensor:
    share = torch.linalg.svdvals(tokens)
    share = share / share.sum()
    return torch.special.entr(share).sum().exp()


def _mean_cosine(states: Tensor) -> Tensor:
    unit = states / states.norm(dim=-1, keepdim=True)
    pairs = [unit[i] @ unit[j] for i in range(len(unit)) for j in range(i)]
    return torch.stack(pairs).nanmean()


def _entropy(tokens: Tensor) -> Tensor:
    share = tokens.bincount().double() / len(tokens)
    return torch.special.entr(share).sum()


def see_everything(mask: Tensor) -> Tensor:
    """The control's mask: none at all."""
    return torch.zeros_like(mask)


def see_itself_only(position: int) -> MaskEdit:
    """The query at a position sees its own key alone."""

    def edit(mask: Tensor) -> Tensor:
        mask = mask.clone()
        mask[:, :, position, :] = torch.finfo(mask.dtype).min
        mask[:, :, position, position] = 0
        return mask

    return edit
