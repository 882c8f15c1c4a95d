"""How far the sinks that neurons tell agree with those of attention, on books that the neurons were not found on.

python lab/experiments/sink_token_agreement.py --model MODEL --text valid.txt [--by-hash 31 60] [--bos] [--length 256]

The text is books, one after the other with the separator of `sinkscope tokenize`. Neurons are found on every other book
and judged on the rest, then the other way round: a row of the table each. Judged are tokens with enough later queries
to be a sink by attention at all. Below the table stands every token on which the two disagree.

--by-hash takes some books of a large text by a rule that nobody's wishes can bend: of those with at least 50,000
characters, in the order of their SHA-256, the FIRST to the LAST.
"""

import argparse
import hashlib
from pathlib import Path

import torch

import sinkscope
from sinkscope.audits.sink_neurons import find_sink_neurons
from sinkscope.audits.sink_tokens import attention_sinks, neuron_sinks
from sinkscope.measures.sink_score import eligible_positions
from sinkscope.models.prompts import as_batch
from sinkscope.models.token_batches import tokenizer_of
from sinkscope.pretrain.text_sources import SEPARATOR

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True)
parser.add_argument("--text", type=Path, required=True)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--windows", type=int, default=4, help="of each book")
parser.add_argument("--by-hash", type=int, nargs=2, metavar=("FIRST", "LAST"), help="these books alone, counted from 1")
parser.add_argument("--bos", action="store_true", help="begin each window with BOS")
asked = parser.parse_args()
loaded = sinkscope.load(asked.model)
tokenizer = tokenizer_of(loaded)
first = [tokenizer.bos_token_id] if asked.bos else []


def windows(book: str) -> list[list[int]]:
    """Spread over the book; each begins with a paragraph."""
    found = []
    for number in range(asked.windows):
        start = book.find("\n", len(book) * (number + 1) // (asked.windows + 2)) + 1
        text = book[start : start + 8 * asked.length]
        ids = first + tokenizer(text, add_special_tokens=False)["input_ids"]
        found += [ids[: asked.length]] if len(ids) >= asked.length else []
    return found


books = [book for book in asked.text.read_text(encoding="utf-8").split(SEPARATOR) if book.strip()]
if asked.by_hash:
    first_book, last_book = asked.by_hash
    books = sorted((book for book in books if len(book) >= 50_000), key=lambda it: hashlib.sha256(it.encode()).digest())
    books = books[first_book - 1 : last_book]
parts = [torch.tensor([ids for book in books[half::2] for ids in windows(book)]) for half in (0, 1)]
masks, rates, _ = zip(*(attention_sinks(loaded, as_batch(loaded, ids)) for ids in parts), strict=True)
early = eligible_positions(asked.length)
print("| model | found on | judged on | sinks by attention | sinks by neurons | precision | recall |")
print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
disagreements = []
for found_on, judged_on in ((0, 1), (1, 0)):
    neurons = find_sink_neurons(loaded, as_batch(loaded, parts[found_on]), masks[found_on])
    ids, mask, rate = parts[judged_on], masks[judged_on], rates[judged_on]
    told, fired = (each & early for each in neuron_sinks(loaded, ids, neurons))
    hits, by_attention, by_neurons = (int(each.sum()) for each in (told & mask, mask, told))
    shares = f"{hits / max(by_neurons, 1):.2f} | {hits / max(by_attention, 1):.2f}"
    texts = f"{len(parts[found_on])} texts | {len(ids)} texts"
    print(f"| {loaded.name} | {texts} | {by_attention} | {by_neurons} | {shares} |", flush=True)
    disagreements.append(f"\n{neurons}")
    for text, place in (told != mask).nonzero().tolist():
        what = "missed" if mask[text, place] else "false alarm"
        token = repr(tokenizer.decode([int(ids[text, place])]))
        disagreements.append(
            f"{what}: text {text}, token {place} {token}, counted by {float(rate[text, place]):.1%} of heads; in this "
            f"text neurons fire at {int(fired[text].sum())} tokens, and {int(mask[text].sum())} are sinks by attention"
        )
print("\n".join(disagreements))
