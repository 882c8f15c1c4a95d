"""Plausible folders of runs that no model made: for tests of what reads them. Every number follows from the seed."""

from pathlib import Path

import numpy as np

from sinkscope.results.run_folder import RunFolder, run_folder
from sinkscope.studies.claims import CLAIMS
from sinkscope.studies.schemas import STUDY_TABLES
from sinkscope.studies.tables import RULES
from sinkscope.tracing.schemas import TOKENS, TRACE_TABLES

NUM_LAYERS, NUM_HEADS, LENGTH, BIRTH = 8, 6, 48, 2
TARGETS, FACTORS = (10, 20), (1.5, 2.0, 4.0, 8.0)
CONTROLS = ("scale_norm", "shift_mean", "swap_deviation", "random_direction")
HOSTILE_TOKENS = (
    "<script>document.title='broken'</script>",
    "</script><img src=x onerror=alert(1)>",
    "\"'`&amp;",
    "\x00\x07\x1b[31m",
    "\u202eright-to-left\u202c",
    "\u05e9\u05dc\u05d5\u05dd",
    "%{x}<b>bold</b>",
    "\u2028\u2029\ufeff",
    " ",
)
MINIMAL_SET = [(2, None, 90, 0.9, 0.1, 0.05, 0.2, "needed"), (2, None, 7, 0.08, 0.97, 0.9, 1.0, "back-up")]
CAUSE = (
    "The cause is the high variance of its value: an ordinary token that is given this variance becomes a sink (+20.0 "
    "points; given its energy alone: +1.0 points), and a token that attends only to itself becomes none without it."
)
VERDICT = (
    f"Position 0 is a sink for 62.0% of heads. {CAUSE} Neurons 2:90, 2:7 write it: without them the sink is shifted to "
    "position 1 (12.0%)."
)
COUNTS = (
    "Besides the sink itself, 4 of 4 claims about the model as it is hold. 7 of 9 claims about cause and effect "
    "hold; these do not: opening_removes_sink; undecided: mediation_mask_super_neurons."
)


def write_trace_folder(path: Path, *, seed: int = 0, model: str = "planted", sink: bool = True, bos: bool = False):
    """A folder as `sinkscope trace` writes it; `bos` leaves position 0 without batch variance."""
    with run_folder(path) as folder:
        summary, tables = _trace(np.random.default_rng(seed), model, sink, bos)
        _write(folder, summary, TRACE_TABLES, tables, "trace")
    return path


def write_study_folder(
    path: Path,
    *,
    seed: int = 0,
    model: str = "planted",
    sink: bool = True,
    bos: bool = False,
    tokens: tuple[str, ...] | None = HOSTILE_TOKENS,
):
    """A folder as `sinkscope study` writes it: with a sink the chain holds but for one claim, without one nothing is
    left to explain. `tokens` are the texts of the first sequence, repeated; None leaves the table out."""
    random = np.random.default_rng(seed)
    with run_folder(path) as folder:
        summary, tables = _trace(random, model, sink, bos)
        study = _study(random, sink, bos)
        claims = study["claims"]
        keys = ("id", "verdict", "effect", "low", "high", "control", "n")
        summary |= {
            "claims": [dict(zip(keys, values, strict=True)) for values in zip(*(claims[k] for k in keys), strict=True)],
            "minimal_set": [{"layer": 2, "expert": None, "neuron": 90}, {"layer": 2, "expert": None, "neuron": 7}]
            if sink
            else [],
            "verdict": VERDICT if sink else "There is no sink to explain: position 0 is a sink for 1.0% of heads.",
            "counts": COUNTS if sink else "",
            "mechanism": "variance" if sink else "no_sink",
            "cause": CAUSE if sink else None,
        }
        _write(folder, summary, TRACE_TABLES, tables, "study")
        texts = [] if tokens is None else [tokens[position % len(tokens)] for position in range(LENGTH)]
        study["tokens"] = {
            "sequence": [0] * len(texts),
            "position": list(range(len(texts))),
            "id": list(range(len(texts))),
            "text": texts,
            "sink_rate": [0.1] * len(texts),
            "attention_received": [0.1] * len(texts),
        }
        for schema in (*STUDY_TABLES, *((TOKENS,) if tokens is not None else ())):
            if schema.name in study or not schema.can_lack:
                folder.write_table(schema, study[schema.name])
    return path


def _write(folder: RunFolder, summary: dict, schemas, tables: dict, command: str) -> None:
    typed = f"sinkscope {command} '{summary['model']}'"
    folder.write_yaml("config.yaml", {"model": summary["model"], "length": LENGTH, "seed": 0, "command": typed})
    environment = {"sinkscope": "0.1.0", "torch": "2.13.0", "device": "cpu", "dtype": "float32"}
    folder.write_json("environment.json", environment)
    folder.write_json("summary.json", summary)
    for schema in schemas:
        if schema.name in tables:
            folder.write_table(schema, tables[schema.name])


def _trace(random: np.random.Generator, model: str, sink: bool, bos: bool) -> tuple[dict, dict]:
    layer, position = (grid.ravel() for grid in np.meshgrid(range(NUM_LAYERS), range(LENGTH), indexing="ij"))
    strength = np.where(sink & (position == 0) & (layer > BIRTH), 1.0, 0.0)
    noise = np.exp(random.normal(size=layer.size) / 10)
    received = np.where(position < LENGTH - 16, 0.05 * noise + 0.6 * strength, 1 / (LENGTH - position) * noise)
    variance = np.where(bos & (position == 0), 0.0, 1 / (position + 1) ** 0.9) * noise
    dom_ratio = (4 + 60 * strength) * noise
    at_birth = sink & (layer == BIRTH) & (position == 0)
    positions = {
        "layer": layer,
        "position": position,
        "attention_received": received,
        "sink_rate": np.clip(received - 0.05, 0, 1) * 1.2,
        "entropy": np.log1p(position) * 0.8,
        "mixing": 1 / (position + 1) ** 0.7,
        "value_variance": variance,
        "value_variance_before_norm": [None] * position.size,
        "averaging_law": np.where(bos & (position == 0), 0.0, 1 / (position + 1) ** 0.9),
        "projected_variance": variance * 1.5,
        "second_moment": variance + 0.3,
        "cosine": np.clip(0.1 + 0.88 * strength, 0, 1),
        "dom_ratio": dom_ratio,
        "dom_ratio_normed": dom_ratio * 1.1,
        "dom_ratio_turned": np.full_like(dom_ratio, 3.1),
        "direction_share": np.clip(dom_ratio / 70, 0.1, 0.99),
        "participation_ratio": 64 / dom_ratio,
        "top_energy_share": 0.02 + 0.9 * strength,
        "kurtosis": 3 + 40 * strength,
        "largest_residual": dom_ratio,
        "largest_residual_dimension": np.full(layer.size, 17),
        "largest_write": np.where(at_birth, 900.0, 3.0) * noise,
        "largest_write_expert": [None] * layer.size,
        "largest_write_neuron": np.where(at_birth, 90, random.integers(0, 256, layer.size)),
    }
    heads_layer, head = (grid.ravel() for grid in np.meshgrid(range(NUM_LAYERS), range(NUM_HEADS), indexing="ij"))
    head_rate = np.clip(random.random(heads_layer.size) * np.where(sink & (heads_layer > BIRTH), 1.3, 0.04), 0, 1)
    heads = {
        "layer": heads_layer,
        "head": head,
        "position": np.zeros_like(head),
        "attention_received": head_rate * 0.8,
        "sink_rate": head_rate,
        **{name: [None] * head.size for name in ("positive_queries", "lock_share")},
        "entropy": random.random(head.size) * 3,
        "mixing": random.random(head.size),
    }
    at_sink = [float(dom_ratio[(layer == index) & (position == 0)][0]) for index in range(NUM_LAYERS)]
    elsewhere = [float(dom_ratio[(layer == index) & (position > 0)].mean()) for index in range(NUM_LAYERS)]
    ratios = [9.0 - index for index in range(NUM_LAYERS)]
    layers = {
        "layer": list(range(NUM_LAYERS)),
        "variance_ratio": [None if bos else ratio for ratio in ratios],
        **{f"{name}_before_norm": [None] * NUM_LAYERS for name in ("variance_ratio", "averaging_law_r_squared")},
        "averaging_law_r_squared": [None if bos else 0.95 - index / 20 for index in range(NUM_LAYERS)],
        **{name: [0.3] * NUM_LAYERS for name in ("kendall_positions", "kendall_channels", "median_magnitude")},
        "dom_ratio_sink": at_sink if sink else [None] * NUM_LAYERS,
        "dom_ratio_elsewhere": elsewhere,
        "dom_ratio_turned_sink": [3.1 if sink else None] * NUM_LAYERS,
        "direction_share_sink": [0.9 if sink else None] * NUM_LAYERS,
        "massive_activations_sink": [2 if sink and index > BIRTH else 0 for index in range(NUM_LAYERS)],
        "effective_rank": [40.0 - (25.0 if sink and index > BIRTH else 0) for index in range(NUM_LAYERS)],
        "effective_rank_without_sink": [38.0 - index if sink else None for index in range(NUM_LAYERS)],
        "born": [sink and index == BIRTH for index in range(NUM_LAYERS)],
        "erased": [False] * NUM_LAYERS,
    }
    listed = [(2, 90, 0.9, 0.82), (2, 7, 0.08, 0.4), (5, 33, 0.6, 0.3)] if sink else []
    neurons = {
        "position": [0] * len(listed),
        "layer": [row[0] for row in listed],
        "expert": [None] * len(listed),
        "neuron": [row[1] for row in listed],
        "dimension": [17] * len(listed),
        "role": ["writes"] * len(listed),
        "activation": [300.0 * row[2] for row in listed],
        "write": [900.0 * row[2] for row in listed],
        "write_share": [row[2] for row in listed],
        "contrast": [80.0] * len(listed),
        "max_over_median": [200.0] * len(listed),
        "top_share": [row[3] for row in listed],
        "participation_ratio": [1.5] * len(listed),
        "kurtosis": [50.0] * len(listed),
        "layer_top_share": [0.06] * len(listed),
    }
    dimensions = {
        "layer": [3] if sink else [],
        "position": [0] if sink else [],
        "dimension": [17] if sink else [],
        **{name: [60.0] if sink else [] for name in ("value", "magnitude", "ratio", "contrast")},
        "appears": [True] if sink else [],
    }
    sinks = {
        "position": [0],
        "rate": [0.62],
        "low": [0.58],
        "high": [0.66],
        "num_sequences": [32],
        "in_sequences": [32],
        "rate_there": [0.62],
        "certainty": ["sink"],
        "num_layers": [5],
        "first_layer": [3],
        "last_layer": [7],
        "mean_attention": [0.4],
    }
    distance = [0, 1, 2, 3, 4, 8, 16, 32]
    distances = {
        "layer": np.repeat(np.arange(NUM_LAYERS), len(distance)),
        "distance": np.tile(distance, NUM_LAYERS),
        "attention": random.random(NUM_LAYERS * len(distance)) / 5,
    }
    summary = {
        "model": model,
        "family": "llama",
        "num_layers": NUM_LAYERS,
        "tokens": {"kind": "random", "length": LENGTH, "count": 32, "seed": 0, "bos": bos},
        "sink_rate": 0.62 if sink else 0.01,
        "sinks": [{"position": 0, "rate": 0.62, "low": 0.58, "high": 0.66}] if sink else [],
        "birth_layers": [BIRTH] if sink else [],
        "erasure_layers": [],
        "massive_dimensions": [17] if sink else [],
        "super_neurons": [],
        "variance_ratio": None if bos else ratios,
        "dom_ratio": {"position": 0, "sink": at_sink if sink else None, "elsewhere": elsewhere},
        "story": "Position 0 is a sink for 62.0% of heads." if sink else "No sink: the strongest key is position 0.",
    }
    tables = {
        "sinks": sinks if sink else {name: [] for name in sinks},
        "positions": positions,
        "neurons": neurons,
        "dimensions": dimensions,
        "heads": heads,
        "layers": layers,
        "distances": distances,
    }
    return summary, tables


def _columns(schema_name: str, rows: list[tuple]) -> dict[str, list]:
    schema = next(schema for schema in STUDY_TABLES if schema.name == schema_name)
    return {column.name: [row[index] for row in rows] for index, column in enumerate(schema.columns)}


def _study(random: np.random.Generator, sink: bool, bos: bool) -> dict[str, dict]:
    return {
        "claims": _columns("claims", _claims(sink, bos)),
        "rates": _columns("rates", _rates(random, sink)),
        "effects": _columns("effects", _effects(random) if sink else []),
        "factorial": _columns("factorial", _factorial() if sink else []),
        "manipulation": _columns(
            "manipulation",
            [
                ("mask_to_self", TARGETS[0], None, "output projection", layer, 9.0, 1.2, 1.0, 0.3, "")
                for layer in range(BIRTH + 1 if sink else 0)
            ],
        ),
        "attention_rows": _columns(
            "attention_rows",
            [
                ("mask_to_self", TARGETS[0], None, "entropy", at, 2.0, 1.9, -0.2, 0.0)
                for at in range(LENGTH if sink else 0)
            ],
        ),
        "norms": _columns(
            "norms",
            [("mask_to_self", TARGETS[0], None, 0, place, 8.0, 9.0, 0.5, 1.5) for place in ("sink", "target") if sink],
        ),
        "mediation": _columns(
            "mediation",
            [
                (
                    intervention,
                    mediator,
                    0.4,
                    0.39,
                    0.39 - 0.4 * share,
                    0.4 * share,
                    share,
                    share - 0.08,
                    share + 0.05,
                    32,
                )
                for intervention, mediator, share in (
                    ("mask_to_self", "super_neurons", 0.9),
                    ("mask_to_self", "massive_dimensions", 0.95),
                    ("amplify_variance", "super_neurons", 0.8),
                    ("amplify_variance", "massive_dimensions", 0.55),
                )
            ]
            if sink
            else [],
        ),
        "random_sets": _columns(
            "random_sets",
            [(index, 2, 0.8, 0.6, 0.6 / 0.62 + random.normal() / 100) for index in range(20 if sink else 0)],
        ),
        "minimal_set": _columns(
            "minimal_set",
            [(2, None, 90, 0.9, 0.1, 0.05, 0.2, "needed"), (2, None, 7, 0.08, 0.97, 0.9, 1.0, "back-up")]
            if sink
            else [],
        ),
        "single_layers": _columns(
            "single_layers", [(layer, 10, 0.1 * layer, 0.1 * layer - 0.02, 0.1 * layer + 0.02, 32) for layer in (0, 1)]
        ),
        "histograms": _columns("histograms", _histograms(random) if sink else []),
        "output_energy": _columns("output_energy", _output_energy() if sink else []),
    }


def _factorial() -> list[tuple]:
    cells = [("see_self", None, None, 0.42, ""), ("see_self", "untouched", None, 0.1, "")]
    cells += [
        (
            "see_self",
            None,
            "untouched",
            0.4,
            "attending only to itself, energy of baseline: failed its manipulation check (energy 2.5 times what it "
            "should be in layer 1)",
        )
    ]
    targets = ", ".join(map(str, TARGETS))
    return [
        (
            mixing,
            variance,
            energy,
            "output projection",
            targets,
            rise,
            rise - 0.03,
            rise + 0.03,
            9.0,
            1.2,
            0.8,
            0.9,
            missed,
            32,
        )
        for mixing, variance, energy, rise, missed in cells
    ]


def _claims(sink: bool, bos: bool) -> list[tuple]:
    rows = []
    for name, claim in CLAIMS.items():
        link, statement = claim.link, claim.statement
        bar, control_name = claim.bars[0], claim.control_is
        threshold, rule = bar.threshold, RULES[bar.rule]
        effect = threshold / 4 if bar.rule == "below" else 1.5 * threshold + 0.1  # well on the side on which it holds
        control = None if control_name is None else effect / 20
        verdict, low, high, note = "holds", effect * 0.93, effect * 1.07, ""
        if not sink:
            verdict = "does not hold" if name == "sink" else "not applicable"
            effect, low, high = (0.01, 0.005, 0.02) if name == "sink" else (None, None, None)
            control, note = None, "" if name == "sink" else "there is no sink to explain"
        elif bos and link == "variance_discrepancy":
            verdict, effect, low, high, note = "not applicable", None, None, None, "no batch variance at the position"
        elif name == "opening_removes_sink":
            verdict, note = "does not hold", "the sink stays at position 0"
        elif name == "mediation_mask_super_neurons":
            verdict, low, high = "undecided", 0.35, 0.75
        if effect is None:
            threshold, rule = None, "no number to judge"
        confidence = None if effect is None else 0.95
        p_value = None if effect is None else 0.001
        numbers = (effect, low, high, confidence, threshold)
        rows.append((name, statement, link, verdict, *numbers, rule, control, control_name, 32, p_value, note))
    return rows


def _rates(random: np.random.Generator, sink: bool) -> list[tuple]:
    conditions = [("untouched", None, None, {})]
    for target in TARGETS:
        conditions.append(("mask_to_self", target, None, {target: 0.42}))
        conditions += [
            ("amplify_variance", target, factor, {target: 0.004 + 0.05 * (factor - 1)}) for factor in FACTORS
        ]
        conditions += [(name, target, FACTORS[-1], {target: 0.03}) for name in CONTROLS]
    conditions += [
        ("equalise_variance", TARGETS[0], None, {}),
        ("equalise_variance", 0, None, {0: 0.55}),
        ("ablate_minimal_set", 0, None, {0: 0.04, 1: 0.12}),
        ("densify_minimal_set", 0, None, {0: 0.06}),
    ]
    rows = []
    for condition, target, factor, changed in conditions:
        for position in range(LENGTH):
            # The last keys have few queries and look like sinks.
            base = 0.9 if position >= LENGTH - 16 else 0.62 if sink and position == 0 else 0.004
            rate = float(np.clip(changed.get(position, base) if sink else base, 0, 1))
            half = 0.01 + 0.03 * rate * random.random()
            rows.append((condition, target, factor, position, rate, max(rate - half, 0), rate + half, rate))
    return rows


def _effects(random: np.random.Generator) -> list[tuple]:
    rows = []

    def add(condition, target, factor, quantity, before, after):
        half = abs(after - before) * 0.1 + 0.005
        difference = after - before
        rows.append(
            (condition, target, factor, quantity, before, after, difference, difference - half, difference + half, 32)
        )

    made = [("mask_to_self", None, 0.42), ("transplant_super_neurons", None, 0.3), ("transplant_dimensions", None, 0.5)]
    made += [("amplify_variance", factor, 0.05 * (factor - 1)) for factor in FACTORS]
    made += [(name, FACTORS[-1], 0.028) for name in CONTROLS]
    add("equalise_variance", TARGETS[0], None, "sink_rate_at_sink", 0.62, 0.61)
    for condition, factor, rise in made:
        for target in TARGETS:
            add(condition, target, factor, "sink_rate_at_target", 0.004, 0.004 + rise)
            add(condition, target, factor, "sink_rate_at_sink", 0.62, 0.62 - rise / 3)
            add(condition, target, factor, "entropy_at_target", 2.1, 0.001 if condition == "mask_to_self" else 2.0)
            add(condition, target, factor, "entropy_elsewhere", 2.2, 2.2 - rise / 100)
            add(condition, target, factor, "aggregation_norm_at_target", 1.2, 1.2 + rise * 9)
            add(condition, target, factor, "super_neuron_activation_at_target", 0.8, 0.8 + 300 * rise)
            add(condition, target, factor, "loss", 3.2, 3.2 + rise / 4 + random.random() / 50)
    removed = {"equalise_variance": 0.55, "remove_mean": 0.1, "remove_deviation": 0.57, "remove_energy": 0.03}
    removed |= {"ablate_minimal_set": 0.04, "densify_minimal_set": 0.06}
    for condition, after in removed.items():
        add(condition, 0, None, "sink_rate_at_sink", 0.62, after)
        add(condition, 0, None, "loss", 3.2, 3.6)
    return rows


def _histograms(random: np.random.Generator) -> list[tuple]:
    rows, edges = [], np.linspace(-20, 320, 35)
    for condition, target in (("untouched", None), ("mask_to_self", 10), ("amplify_variance", 10)):
        centres = {"sink": 280, "elsewhere": 0} | ({} if target is None else {"target": 190})
        for neuron, scale in ((90, 1.0), (7, 0.3)):
            for place, centre in centres.items():
                size = 1500 if place == "elsewhere" else 32
                counts, _ = np.histogram(random.normal(centre * scale, 8, size), edges)
                for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
                    rows.append((condition, target, 2, None, neuron, place, float(low), float(high), int(count)))
    return rows


def _output_energy() -> list[tuple]:
    rows = []
    for neuron, kind, decay in ((90, "super", 2.5), (7, "super", 1.8), (41, "median", 0.4)):
        energy = 1 / np.arange(1, 65) ** decay
        for rank, share in enumerate(energy / energy.sum()):
            rows.append((2, None, neuron, kind, rank, (17 + rank * 5) % 64, float(share), float(np.sqrt(share))))
    return rows
