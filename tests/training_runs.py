"""A training run of a few steps, for the tests that need a folder of one."""

from pathlib import Path

import torch

from sinkscope.pretrain.parallel import Processes
from sinkscope.pretrain.presets import resolve
from sinkscope.pretrain.train import pretrain

ALONE = Processes(mode="single", rank=0, num_processes=1, device=torch.device("cpu"))


def short_run(folder: Path, *, variant: str = "softmax", **training) -> Path:
    """The run folder: 4 steps of the tiny preset, the weights of steps 0 and 2 kept."""
    text = folder / "text.txt"
    lines = (f"the head {i} attends to layer {i * 7 % 13} again\n" * 20 for i in range(60))
    text.write_text("<|endoftext|>".join(lines))
    few = dict(steps=4, batch_size=4, sequence_length=32, warmup_steps=1, evaluate_every=4, probe_every=0)
    few |= dict(checkpoint_every=4, snapshots=(0, 2), seed=11, learning_rate=1e-3)
    config = resolve("tiny", variant=variant, data=[str(text)], training=few | training)
    with torch.random.fork_rng():
        pretrain(config, folder / "run", ALONE, say=lambda text: None)
    return folder / "run"
