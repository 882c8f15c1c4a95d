"""Whether a fingerprint recognises an initialisation, and no other's: tiny decoders, seed crossed with text.

    python lab/experiments/fingerprint_proof.py --data text.txt                       # minutes on two cores
    python lab/experiments/fingerprint_proof.py --data text.txt --device cuda --width 96 --layers 4 --steps 600
    python lab/experiments/fingerprint_proof.py --signatures proof.safetensors  # the tables again, without training

Every seed is trained on the first and on the second half of the text, all seeds on the same batches in the same order,
so models of one half differ only in their initialisation. The first is then fine-tuned on the other half with another
learning rate, quantised, pruned and merged with its neighbour. Signatures are kept in one file. Nothing here is fitted:
the rule was fixed on seeds from 1,000 on, and these seeds begin at 0.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from sinkscope.fingerprints.alignment import alignment, alignment_table
from sinkscope.fingerprints.seedprint import LEVEL, seedprint
from sinkscope.fingerprints.signature import Inputs
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.decoder_config import DecoderConfig

VOCABULARY, LENGTH, BATCH = 512, 32, 16
Weights = dict[str, Tensor]
"""The parameters of all seeds, stacked along the first axis."""
RELATIONS = {
    "first text": ("initial", "text A"),
    "other text": ("initial", "text B"),
    "one seed, two texts": ("text A", "text B"),
    "half-way and end": ("half-way", "text A"),
    "fine-tuned, other text and rate": ("text A", "fine-tuned"),
    "fine-tuned, against the start": ("initial", "fine-tuned"),
    "other seed, same text and order": ("text A", "text A"),
}
SURVIVAL = (
    "8 bits",
    "4 bits",
    "pruned to 20 %",
    "averaged with another",
    "upper half of another",
    "lower half of another",
    "fine-tuned",
)


def main() -> None:
    options = parsed_options()
    torch.set_num_threads(options.threads)
    if options.signatures is not None and options.signatures.is_file():
        states = load_file(options.signatures)
    else:
        states = trained_states(options)
        if options.signatures is not None:
            save_file(states, options.signatures)
    print("\n".join(report(states)))


def parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a text file of a few MB")
    parser.add_argument("--signatures", type=Path, help="file to keep the signatures in, or to read them from")
    parser.add_argument("--num-seeds", type=int, default=46)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--num-sequences", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.data is None and not (options.signatures and options.signatures.is_file()):
        parser.error("give --data a text to train on, or --signatures a file that is there")
    return options


def trained_states(options: argparse.Namespace) -> dict[str, Tensor]:
    """The states [seeds, N, E] of every kind of model."""
    started_at = time.perf_counter()
    first, second = (half.to(options.device) for half in token_halves(options.data))
    seeds = range(options.first_seed, options.first_seed + options.num_seeds)
    decoder = Decoder(configuration(options, 0)).to(options.device).eval()
    models = {"initial": stacked([Decoder(configuration(options, seed)) for seed in seeds], options.device)}
    rate, steps = options.learning_rate, options.steps
    models["text A"], models["half-way"] = trained(decoder, models["initial"], first, steps, rate, seed=1)
    say(f"text A: {time.perf_counter() - started_at:.0f} s, loss {mean_loss(decoder, models['text A'], first):.3f}")
    models["text B"], _ = trained(decoder, models["initial"], second, steps, rate, seed=2)
    say(f"text B: {time.perf_counter() - started_at:.0f} s, loss {mean_loss(decoder, models['text B'], second):.3f}")
    models["fine-tuned"], _ = trained(decoder, models["text A"], second, steps // 2, rate / 3, seed=3)
    models |= changed(models["text A"], options.layers)
    ids = Inputs(vocabulary=VOCABULARY, length=LENGTH, num_sequences=options.num_sequences).ids.to(options.device)
    states = {kind: last_states(decoder, weights, ids).cpu() for kind, weights in models.items()}
    for kind, weights in models.items():
        states[f"{kind}, embeddings"] = weights["model.embed_tokens.weight"][:, ids[:, -1]].cpu()
    say(f"signatures: {time.perf_counter() - started_at:.0f} s")
    return states


def configuration(options: argparse.Namespace, seed: int) -> DecoderConfig:
    # Eager attention: a stack of models runs through vmap, which knows no fused attention on a CPU.
    return DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        intermediate_size=3 * options.width,
        max_position_embeddings=LENGTH,
        seed=seed,
        attn_implementation="eager",
    )


def token_halves(path: Path) -> tuple[Tensor, Tensor]:
    """Tokens of the first and of the second half of a text, under a byte-level BPE of its first megabyte."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    text = path.read_text(encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text[: 1 << 20]], trainer)
    middle = len(text) // 2
    halves = (text[: min(middle, 1 << 20)], text[middle : middle + (1 << 20)])
    return tuple(torch.tensor(tokenizer.encode(half).ids) for half in halves)  # type: ignore[return-value]


def stacked(decoders: list[Decoder], device: str) -> Weights:
    weights = [dict(decoder.named_parameters()) for decoder in decoders]
    return {name: torch.stack([each[name].detach() for each in weights]).to(device) for name in weights[0]}


def loss_of(decoder: Decoder) -> Callable[[Weights, Tensor], Tensor]:
    def loss(weights: Weights, ids_BT: Tensor) -> Tensor:
        tied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
        logits = functional_call(decoder, tied, (ids_BT[:, :-1],), {"use_cache": False}, tie_weights=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten())

    return loss


def trained(
    decoder: Decoder, weights: Weights, tokens: Tensor, steps: int, rate: float, seed: int
) -> tuple[Weights, Weights]:
    """The weights at the end and half-way of AdamW with warm-up and decay; every seed sees the same batches."""
    weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    optimiser = torch.optim.AdamW(weights.values(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    gradients = vmap(grad_and_value(loss_of(decoder)), in_dims=(0, None))
    half_way: Weights = {}
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
        found, _ = gradients(weights, windows(tokens, seed, step))
        for name, weight in weights.items():
            weight.grad = found[name].detach()
        optimiser.step()
        if step + 1 == steps // 2:
            half_way = {name: weight.detach().clone() for name, weight in weights.items()}
    return {name: weight.detach() for name, weight in weights.items()}, half_way


def windows(tokens: Tensor, seed: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_000 + step)
    starts = torch.randint(len(tokens) - LENGTH - 1, (BATCH, 1), generator=generator)
    return tokens[(starts + torch.arange(LENGTH + 1)).to(tokens.device)]


@torch.no_grad()
def mean_loss(decoder: Decoder, weights: Weights, tokens: Tensor) -> float:
    return float(vmap(loss_of(decoder), in_dims=(0, None))(weights, windows(tokens, 9, 0)).mean())


@torch.no_grad()
def last_states(decoder: Decoder, weights: Weights, ids_NT: Tensor) -> Tensor:
    """[seeds, N, E] what `sign` reads of each model."""
    body = {name.removeprefix("model."): weight for name, weight in weights.items()}
    run = vmap(
        lambda each, ids: functional_call(decoder.model, each, (ids,)).last_hidden_state[:, -1], in_dims=(0, None)
    )
    return torch.cat([run(body, ids) for ids in ids_NT.split(64)], dim=1)


def changed(weights: Weights, num_layers: int) -> dict[str, Weights]:
    """What is done to trained weights without training."""
    matrices = {name for name, weight in weights.items() if weight.ndim == 3}

    def is_upper(name: str) -> bool:
        return name.startswith(tuple(f"model.layers.{layer}." for layer in range(num_layers // 2, num_layers)))

    pruned = {}
    for name, weight in weights.items():
        if name in matrices:
            size = weight.abs().flatten(1)
            smallest_kept = size.kthvalue(int(0.8 * size.shape[1]), dim=1).values[:, None, None]
            pruned[name] = torch.where(weight.abs() > smallest_kept, weight, 0.0)
        else:
            pruned[name] = weight
    others = {name: weight.roll(-1, 0) for name, weight in weights.items()}
    return {
        **{
            f"{bits} bits": {
                name: rounded(weight, bits) if name in matrices else weight for name, weight in weights.items()
            }
            for bits in (8, 4)
        },
        "pruned to 20 %": pruned,
        "averaged with another": {name: (weight + others[name]) / 2 for name, weight in weights.items()},
        "upper half of another": {name: others[name] if is_upper(name) else w for name, w in weights.items()},
        "lower half of another": {name: w if is_upper(name) else others[name] for name, w in weights.items()},
    }


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Each row rounded to 2^bits - 1 levels between its extremes."""
    scale = weight.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (weight / scale).round() * scale


def report(states: dict[str, Tensor]) -> list[str]:
    num_seeds, num_sequences, width = states["initial"].shape
    kinds = [kind for kind in states if not kind.endswith("embeddings")]
    tables = {
        kind: [alignment_table(*each) for each in zip(states[kind], states[f"{kind}, embeddings"], strict=True)]
        for kind in kinds
    }
    lines = [
        f"{num_seeds} seeds, width {width}, {num_sequences} sequences",
        "",
        "| a seed with itself, against pairs of two seeds | alignment | recognised at 1 % | AUC | 95 % interval "
        "| false positives at 1 % | seedprint: recognised | AUC | false positives | of those it decides | decides |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    wrong: dict[str, list[bool]] = {"alignment": [], "seedprint": []}
    for relation, (first, second) in RELATIONS.items():
        ours = [[alignment(a, b) for b in tables[second]] for a in tables[first]]
        theirs = [[seedprint(a, b) for b in states[second]] for a in states[first]]
        z, p, their_z, their_p = (
            np.array([[getattr(each, key) for each in row] for row in rows])
            for rows, key in itertools.product([ours, theirs], ["z", "p"])
        )
        # Pairs of one kind are seen twice; of two kinds, (a, b) and (b, a) are different pairs.
        off = np.triu(np.ones_like(z), 1) > 0 if first == second else ~np.eye(num_seeds, dtype=bool)
        wrong["alignment"] += (p[off] < LEVEL).tolist()
        wrong["seedprint"] += (their_p[off] < LEVEL).tolist()
        decided = ~np.isnan(their_p[off])
        related = ["", "", "", ""], ["", ""]
        if first != second:
            area, low, high = area_under_curve(z)
            effect = np.mean([ours[seed][seed].effect for seed in range(num_seeds)])
            related = (
                [f"{effect:.3f}", f"{np.mean(np.diag(p) < LEVEL):.0%}", f"{area:.4f}", f"{low:.4f} to {high:.4f}"],
                [
                    f"{np.mean(np.diag(their_p) < LEVEL):.0%}",
                    f"{area_under_curve(np.nan_to_num(their_z, nan=-np.inf))[0]:.3f}",
                ],
            )
        cells = [
            *related[0],
            f"{np.mean(p[off] < LEVEL):.2%} of {off.sum():,}",
            *related[1],
            f"{np.mean(their_p[off] < LEVEL):.2%}",
            f"{np.mean(their_p[off][decided] < LEVEL):.0%}" if decided.any() else "",
            f"{decided.mean():.0%}",
        ]
        lines.append(f"| {relation} | {' | '.join(cells)} |")
    rates = ", ".join(f"{name} {np.mean(found):.2%} of {len(found):,}" for name, found in wrong.items())
    lines += ["", f"False positives at the 1 % level over all unrelated pairs: {rates}"]
    lines += ["", "| of the trained model | alignment with it | recognised | against its initialisation | recognised |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    for kind in SURVIVAL:
        cells = []
        for first in ("text A", "initial"):
            found = [alignment(a, b) for a, b in zip(tables[first], tables[kind], strict=True)]
            cells += [f"{np.mean([each.effect for each in found]):.3f}"]
            cells += [f"{np.mean([each.p < LEVEL for each in found]):.0%}"]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def area_under_curve(z_SS: np.ndarray, num_resamples: int = 1000) -> tuple[float, float, float]:
    """(area, low, high): how often a seed's own z is above that of a pair of two seeds; resampled by seed."""
    num_seeds = len(z_SS)
    a, b = np.nonzero(~np.eye(num_seeds, dtype=bool))
    own, other = np.diag(z_SS)[:, None], z_SS[a, b][None]
    wins = (own > other) + 0.5 * (own == other)
    random = np.random.default_rng(0)
    areas = []
    for index in range(num_resamples + 1):
        drawn = random.integers(num_seeds, size=num_seeds) if index else np.arange(num_seeds)
        counts = np.bincount(drawn, minlength=num_seeds).astype(float)
        weights = counts[a] * counts[b]
        areas.append(float(counts @ wins @ weights / (counts.sum() * weights.sum())))
    return areas[0], float(np.quantile(areas[1:], 0.025)), float(np.quantile(areas[1:], 0.975))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
