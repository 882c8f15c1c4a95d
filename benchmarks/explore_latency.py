"""How long the live page of `sinkscope explore` waits for a redraw.

    python benchmarks/explore_latency.py

A redraw is what one click costs: the request, the pass under the interventions, the findings, and the JSON that the
page draws. Each is a state that was not asked for before, since what is kept costs nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from starlette.testclient import TestClient

import sinkscope
from sinkscope.explore.server import application
from sinkscope.explore.sources import LiveModel

ADDRESS = "http://127.0.0.1:8800"


def clicks(neuron: str, dimension: int) -> dict[str, Callable[[int], list[list[str]]]]:
    """States that a person makes by clicking, by what they clicked; each number gives another."""
    return {
        "a token masked to itself": lambda number: [["mask_to_self", str(1 + number)]],
        "an amplification slid": lambda number: [["amplify", f"10:{2 + number / 10}"]],
        "a variance matched": lambda number: [["match_variance", str(1 + number)]],
        "a neuron transplanted": lambda number: [["transplant", f"{neuron}@0:{1 + number}"]],
        "a dimension taken out": lambda number: [["zero_dimension", f"{dimension}@{number}"]],
        "a mask and an amplification": lambda number: [["mask_to_self", "20"], ["amplify", f"10:{2 + number / 10}"]],
    }


def redraws(client: TestClient, state: dict, edits: Callable[[int], list[list[str]]], repeats: int) -> Iterator[float]:
    """Seconds of each."""
    for number in range(repeats):
        started_at = time.perf_counter()
        client.post("/token/view", json=state | {"edits": edits(number)}).raise_for_status()
        yield time.perf_counter() - started_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="reference:softmax")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    loaded = sinkscope.load(asked.model)
    assert loaded.tokenizer is not None
    words = loaded.tokenizer("The cat sat on the mat, and the dog lay on the rug. " * asked.length)["input_ids"]
    prompt = str(loaded.tokenizer.decode(words[: asked.length], skip_special_tokens=True))
    app = application([LiveModel(loaded, "")], prompts=[], token="token", port=8800)
    client = TestClient(app, base_url=ADDRESS, headers={"Origin": ADDRESS})
    state = {"source": 0, "prompt": prompt, "edits": [], "position": None, "start": 0, "quantity": "dom_ratio"}
    found = client.post("/token/view", json=state).raise_for_status().json()
    neuron, dimension = (next(iter(found[name]), None) for name in ("neurons", "dimensions"))
    name = "0:0" if neuron is None else ":".join(str(neuron[key]) for key in ("layer", "neuron"))
    print(f"{asked.model}, {found['length']} tokens, {asked.threads} threads, {asked.repeats} redraws each\n")
    print("| what was clicked | median ms | fastest | slowest |\n| --- | --- | --- | --- |")
    everything = []
    for label, edits in clicks(name, 0 if dimension is None else dimension["dimension"]).items():
        taken = [1e3 * seconds for seconds in redraws(client, state, edits, asked.repeats)]
        everything += taken
        print(f"| {label} | {statistics.median(taken):.0f} | {min(taken):.0f} | {max(taken):.0f} |", flush=True)
    print(f"| all | {statistics.median(everything):.0f} | {min(everything):.0f} | {max(everything):.0f} |")


if __name__ == "__main__":
    main()
