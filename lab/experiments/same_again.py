"""Whether training comes out the same again: the first updates of one run, in several processes at once.

    python lab/experiments/same_again.py --config 30m --steps 60 --copies 3
    python lab/experiments/same_again.py --config 30m --steps 60 --copies 3 --deterministic

Each process compiles for itself, into a cache of its own, while the others keep the device busy. So kernels whose sums
depend on which thread comes first are seen, and so are others that the compiler picks by their time. Weights and losses
are compared bit by bit; one more process begins with other weights, which must be seen.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from sinkscope.pretrain.config import PretrainConfig
from sinkscope.pretrain.decoder import Decoder
from sinkscope.pretrain.parallel import Processes
from sinkscope.pretrain.presets import decoder_config, resolve
from sinkscope.pretrain.step import TrainingStep
from sinkscope.pretrain.tokens import ShardWriter, TokenStream, open_shards
from sinkscope.results.run_folder import run_folder


def main() -> None:
    options = parsed_options()
    if options.seed is not None:
        print(json.dumps(train(options, options.seed)))
        return
    seeds = [*[0] * options.copies, 1]
    found = side_by_side(options, seeds)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    mode = "in one order" if options.deterministic else "as it comes"
    print(f"- {device}; torch {torch.__version__}; {options.variant}, {options.steps} updates, sums {mode}")
    for seed, run in zip(seeds, found, strict=True):
        parted = first_difference(found[0]["losses"], run["losses"])
        same = run["weights"] == found[0]["weights"]
        print(
            f"- seed {seed}: {1e3 * run['step_s']:.1f} ms an update, last loss {run['losses'][-1]!r}, weights "
            f"{'the same' if same else 'other'}, losses {'the same' if parted is None else f'part at update {parted}'}"
        )
    copies = {run["weights"] for seed, run in zip(seeds, found, strict=True) if seed == 0}
    print(f"{'PASS' if len(copies) == 1 else 'FAIL'}: {options.copies} copies end with {len(copies)} set(s) of weights")
    if found[-1]["weights"] in copies:
        sys.exit("FAIL: another seed was not seen")


def parsed_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny", help="a preset or a YAML file, as sinkscope pretrain takes it")
    parser.add_argument("--variant", default="softmax")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--deterministic", action="store_true", help="as sinkscope pretrain --deterministic")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def side_by_side(options: argparse.Namespace, seeds: list[int]) -> list[dict[str, Any]]:
    """What each process found; all of them run at once."""
    with tempfile.TemporaryDirectory() as caches:
        started = []
        for number, seed in enumerate(seeds):
            cache = f"{caches}/{number}"
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
            command = [sys.executable, __file__, *sys.argv[1:], "--seed", str(seed)]
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in started]
    for process in started:
        if process.returncode:
            sys.exit(process.returncode)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def train(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The loss of every update, the hash of the weights after the last one, and seconds an update."""
    asked = {"seed": seed, "deterministic": options.deterministic}
    config = resolve(options.config, variant=options.variant, data=[], training=asked)
    model = Decoder(decoder_config(config.model | {"vocab_size": config.vocab_size}))
    group = Processes(mode="single", rank=0, num_processes=1, device=torch.device(options.device))
    step = TrainingStep(model, config.training, group, compile=options.device == "cuda")
    losses, ends_at = [], []
    with tempfile.TemporaryDirectory() as folder:
        stream = random_tokens(Path(folder) / "tokens", config)
        for number in range(options.steps):
            losses.append(float(step.update(number, stream)[0]))
            ends_at.append(time.perf_counter())
    digest = hashlib.sha256()
    for parameter in step.parameters.values():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    seconds = np.diff(ends_at[len(ends_at) // 2 :])
    return {"losses": losses, "weights": digest.hexdigest(), "step_s": statistics.median(seconds.tolist())}


def random_tokens(path: Path, config: PretrainConfig) -> TokenStream:
    """Tokens of unequal frequency, so that there is something to learn; the same in every process."""
    training, generator = config.training, np.random.default_rng(0)
    share = 1 / np.arange(1, config.vocab_size + 1)
    number = 64 * training.batch_size * training.sequence_length
    with run_folder(path) as folder:
        writer = ShardWriter(folder, config.vocab_size, 1 << 27)
        writer.add("train", generator.choice(config.vocab_size, size=number, p=share / share.sum()))
        writer.finish()
    shards = open_shards(path)
    return TokenStream(shards, "train", length=training.sequence_length, batch_size=training.batch_size, seed=0)


def first_difference(mine: list[float], theirs: list[float]) -> int | None:
    """The first update whose losses differ; None if there is none."""
    return next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)


if __name__ == "__main__":
    main()
