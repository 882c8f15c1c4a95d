"""The live page's server: what it computes is what the library computes, and it answers nobody but its own page."""

import asyncio
import signal
import socket
import threading
import time

import httpx
import pyarrow.parquet
import pytest
from starlette.testclient import TestClient

import sinkscope
from sinkscope.cli_options import ModelOptions
from sinkscope.errors import InputError
from sinkscope.explore import text_result
from sinkscope.explore.cli import ExploreOptions, explore_command
from sinkscope.explore.server import (
    HEADERS,
    MOST_BYTES,
    MOST_WAITING,
    THIS_MACHINE,
    CallingThread,
    application,
    listening,
)
from sinkscope.explore.sources import FinishedTrace, LiveModel
from sinkscope.interventions.specs import read_specs

PROMPT = "The cat sat on the mat, and the dog lay on the rug, until it was dark."
OTHER = "Once upon a time there was a king, who had a daughter that was very beautiful and good."
ADDRESS = "http://127.0.0.1:8800"
STATE = {
    "source": 0,
    "prompt": PROMPT,
    "interventions": [],
    "position": None,
    "start": 0,
    "quantity": "attention_received",
}


@pytest.fixture(scope="module")
def model():
    return LiveModel(sinkscope.load("reference:softmax"), "sinkscope.load('reference:softmax')")


@pytest.fixture(scope="module")
def page(model):
    """Sends requests as the page would; `view` is what a state gives."""
    client = TestClient(app_of(model), base_url=ADDRESS, headers={"Origin": ADDRESS})
    client.view = lambda **changed: client.post("/secret/view", json=STATE | changed)
    return client


def app_of(*sources):
    return application(sources, prompts=[PROMPT], token="secret", port=8800)


@pytest.mark.parametrize(
    "interventions",
    [
        [],
        [["mask_to_self", "10"], ["zero_dimension", "5@10"], ["mask_to_self", "7"]],
        [["amplify", "4:4"], ["transplant_dimension", "5@0:4"]],
    ],
    ids=["baseline", "two masks and a dimension", "calibrated"],
)
def test_the_python_lines_run_as_typed_and_give_the_same_numbers(page, interventions):
    view = page.view(interventions=interventions).json()
    typed = {}
    exec(view["python"], typed)
    found = typed["result"].recording
    received_T = found["received"].double().mean((0, 1))
    assert view["received"]["now"] == pytest.approx(received_T.tolist(), rel=1e-4)
    assert view["heads"]["now"] == [
        pytest.approx(row, rel=1e-4) for row in found["received"][:, :, view["opened"]].tolist()
    ]
    assert view["story"] == typed["result"].story
    if interventions:
        baseline = sinkscope.trace("reference:softmax", PROMPT).recording["received"].double().mean((0, 1))
        assert view["received"]["before"] == pytest.approx(baseline.tolist(), rel=1e-4)
        assert view["received"]["now"] != pytest.approx(baseline.tolist(), rel=1e-3), "control: it acts"


def test_position_0_can_be_masked_to_itself_by_the_lines_too(page):
    view, typed = page.view(interventions=[["mask_to_self", "0"]]).json(), {}
    exec(view["python"], typed)
    assert view["received"]["now"] == pytest.approx(view["received"]["before"], rel=1e-3), (
        "it attends only to itself anyway"
    )
    assert view["story"] == typed["result"].story


def test_the_lines_say_whether_a_bos_token_comes_first(model):
    with_bos = LiveModel(model.loaded, "given", bos=True)
    typed = {"given": model.loaded}
    exec(with_bos.python(PROMPT, ()), typed)
    assert typed["result"].recording.batch.bos
    assert "bos=True" in with_bos.python(PROMPT, (("mask_to_self", "3"),))
    assert "bos" not in model.python(PROMPT, (("mask_to_self", "3"),))


def test_tabs_do_not_mix(page):
    masked = dict(interventions=[["mask_to_self", "10"]], position=3)
    first, other = page.view(**masked).json(), page.view(prompt=OTHER).json()
    assert page.view(**masked).json() == first
    assert page.view(prompt=OTHER).json() == other
    assert first["received"] != other["received"]


def test_what_is_silenced_stays_listed(page):
    neuron = page.view().json()["neurons"][0]
    assert (neuron["state"], neuron["before"]) == ("", neuron["activation"])
    now = page.view(interventions=[["ablate", f"{neuron['layer']}:{neuron['neuron']}"]]).json()["neurons"]
    assert now[0] == neuron | {"state": "silent now", "activation": 0, "write_share": None}


def test_rows_have_the_values_of_the_intervention_and_only_what_is_silent_says_so(page, model):
    dimensions = ["20@0", "78@0", "40@0"]  # without them nothing at position 0 is massive
    interventions = [*(["zero_dimension", each] for each in dimensions), ["ablate", "7:438"]]
    view = page.view(interventions=interventions).json()
    baseline = model._baseline(PROMPT)
    specs = read_specs({"zero_dimension": dimensions, "ablate": ["7:438"]})
    findings = baseline.under(baseline.make(specs)).findings
    states = {row["state"] for row in view["neurons"]}
    assert states >= {"silent now", "no longer listed"}
    for row in view["neurons"]:
        activation = findings.activation(row["position"], sinkscope.Neuron(row["layer"], row["expert"], row["neuron"]))
        assert row["activation"] == (None if activation is None else pytest.approx(activation))
        if row["state"] == "no longer listed" and activation is not None:
            assert abs(activation) > 0.01 * abs(row["before"])
    listed = {(row.position, row.dimension): row for row in findings.massive}
    moved = 0
    for row in view["dimensions"]:
        value, ratio = findings.dimension(row["position"], row["layer"], row["dimension"]) or (None, None)
        assert (row["value"], row["ratio"]) == (pytest.approx(value), pytest.approx(ratio))
        assert (row["state"] in ("", "new")) == ((row["position"], row["dimension"]) in listed)
        moved += row["before"] is not None and row["value"] != row["before"]
    assert moved > 2  # the control: values of the baseline would not differ


def test_a_list_that_is_cut_says_so(page, monkeypatch):
    whole = page.view().json()
    assert whole["counts"] == {name: len(whole[name]) for name in ("neurons", "dimensions")}
    monkeypatch.setattr(text_result, "MOST_LISTED", 2)
    cut = page.view().json()
    assert (cut["neurons"], cut["counts"]) == (whole["neurons"][:2], whole["counts"])


WRONG = {
    "no JSON": (b"{", "JSON"),
    "not a number": (b'{"source": NaN}', "`source` must be a whole number, not nan"),
    "deep": (b"[" * 100_000, "JSON"),
    "a list": (b"[]", "The request must be an object with names, not a list of 0"),
    "long": (b" " * (MOST_BYTES + 1), "bytes"),
    "another source": ({"source": 1}, "`source` must be below 1, not 1"),
    "a yes for a number": ({"source": True}, "`source` must be a whole number, not True"),
    "a number for a prompt": ({"prompt": 3}, "`prompt` must be text, not 3"),
    "a long prompt": ({"prompt": "a " * 20_000}, "`prompt` must be text of at most 20000 characters"),
    "more than the context": ({"prompt": "a b c d " * 1250}, "at most"),
    "an empty prompt": ({"prompt": ""}, "at least 2 tokens"),
    "interventions that are no pairs": (
        {"interventions": [["mask_to_self"]]},
        "`interventions[0]` has fewer than 2 items",
    ),
    "too many interventions": (
        {"interventions": [["mask_to_self", "1"]] * 17},
        "`interventions` must be a list of at most 16 items, not a list of 17",
    ),
    "an unknown kind": ({"interventions": [["format", "c:"]]}, "The kinds are mask_to_self"),
    "an unreadable intervention": ({"interventions": [["amplify", "ten"]]}, "POSITION:FACTOR"),
    "a position outside": ({"interventions": [["mask_to_self", "99"]]}, "no position 99. Choose from 0 to"),
    "one place twice": ({"interventions": [["mask_to_self", "3"]] * 2}, "set the mask at the same place"),
    "a negative start": ({"start": -1}, "`start` must be at least 0, not -1"),
    "half a character": (rb'{"source": 0, "prompt": "\ud800"}', "The request must be text in UTF-8"),
    "another quantity": ({"quantity": "__class__"}, "`quantity` cannot be '__class__'. Choose one of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_told_what_is_wrong(page, name):
    sent, message = WRONG[name]
    answer = page.post("/secret/view", content=sent) if isinstance(sent, bytes) else page.view(**sent)
    assert answer.status_code == 400
    assert answer.json().keys() == {"message"}
    assert message in answer.json()["message"]
    assert page.view().status_code == 200, "and the next one is answered"


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/secret/", {}, 200),
        ("/secret/page.js", {"Origin": ADDRESS}, 200),
        ("/secret/", {"Host": "localhost:8800"}, 200),
        ("/secret/server.py", {}, 404),
        ("/secret/view", {}, 404),
        ("/", {}, 403),
        ("/secrex/", {}, 403),
        ("/secret/", {"Origin": "http://evil.example"}, 403),
        ("/secret/", {"Origin": "null"}, 403),
        ("/secret/", {"Host": "evil.example:8800"}, 403),
        ("/secret/", {"Host": "127.0.0.1:8801"}, 403),
    ],
)
def test_only_this_page_is_answered(path, headers, status):
    answer = TestClient(app_of(Slow()), base_url=ADDRESS).get(path, headers=headers)
    assert answer.status_code == status
    assert set(answer.headers.items()) >= {(name.lower(), value) for name, value in HEADERS.items()}


def test_a_page_told_to_listen_elsewhere_answers_under_that_name_too():
    app = application([Slow()], prompts=[PROMPT], token="secret", port=8800, host="gpu.example")
    client = TestClient(app, base_url=ADDRESS)
    for host, status in (("gpu.example:8800", 200), ("127.0.0.1:8800", 200), ("evil.example:8800", 403)):
        assert client.get("/secret/", headers={"Host": host}).status_code == status


@pytest.mark.parametrize("origin", [None, "http://evil.example", "http://127.0.0.1:8801", "null"])
def test_another_page_cannot_make_the_model_read(origin):
    client = TestClient(app_of(Slow()), base_url=ADDRESS)
    answer = client.post("/secret/view", json=STATE, headers={"Origin": origin} if origin else {})
    assert answer.status_code == 403


class Slow:
    name, is_live = "slow", True

    def view(self, asked):
        time.sleep(0.01)
        return {}


def test_who_would_wait_long_is_told_so():
    async def all_at_once(num):
        transport = httpx.ASGITransport(app_of(Slow()))
        async with httpx.AsyncClient(transport=transport, base_url=ADDRESS, headers={"Origin": ADDRESS}) as client:
            answers = [client.post("/secret/view", json=STATE) for _ in range(num)]
            return sorted(answer.status_code for answer in await asyncio.gather(*answers))

    assert asyncio.run(all_at_once(MOST_WAITING)) == [200] * MOST_WAITING
    assert asyncio.run(all_at_once(MOST_WAITING + 2)) == [200] * MOST_WAITING + [503] * 2


def test_a_finished_trace_is_shown_as_the_live_one_in_windows(model, tmp_path, monkeypatch):
    sinkscope.trace(model.loaded, PROMPT).save(tmp_path / "run")
    sources = (model, FinishedTrace(tmp_path / "run"))
    live, finished = (TestClient(app_of(each), base_url=ADDRESS, headers={"Origin": ADDRESS}) for each in sources)
    state = STATE | {"quantity": "dom_ratio"}
    shown, whole = (client.post("/secret/view", json=state).json() for client in (finished, live))
    assert shown == whole | {"python": None}
    monkeypatch.setattr(text_result, "WINDOW", 8)
    part = finished.post("/secret/view", json=state | {"start": 9}).json()
    assert (part["start"], part["length"]) == (8, whole["length"])
    assert part["tokens"] == whole["tokens"][8:16]
    assert part["received"]["now"] == whole["received"]["now"][8:16]
    assert part["map"]["now"] == [row[8:16] for row in whole["map"]["now"]]
    refused = finished.post("/secret/view", json=state | {"interventions": [["mask_to_self", "3"]]})
    assert refused.status_code == 400
    with pytest.raises(InputError, match=r"A finished trace has its own text.*Leave `prompt` out"):
        explore_command(ExploreOptions(prompt=["a b"]), ModelOptions(model=str(tmp_path / "run")))


@pytest.mark.parametrize("name", ["tokens", "heads"])
def test_a_finished_trace_with_rows_missing_or_swapped_is_refused(model, tmp_path, name):
    sinkscope.trace(model.loaded, PROMPT).save(tmp_path / "run")
    FinishedTrace(tmp_path / "run")  # control: as it was written
    path = tmp_path / "run" / f"{name}.parquet"
    whole = pyarrow.parquet.read_table(path)
    rows = list(range(whole.num_rows))
    for kept in (rows[:-1], [*rows[:-2], rows[-1], rows[-2]]):
        pyarrow.parquet.write_table(whole.take(kept), path)
        with pytest.raises(InputError, match=f"Cannot use .*{name}.parquet: .*rows"):
            FinishedTrace(tmp_path / "run")


def test_it_listens_on_the_loopback_alone_and_refuses_a_port_in_use():
    with listening(THIS_MACHINE, 0) as taken:
        host, port = taken.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(InputError, match="Give another `host` or `port`"):
            listening(THIS_MACHINE, port)
    with socket.create_server(("127.0.0.1", port)):
        pass  # control: it was free again


def test_a_signal_that_another_thread_receives_ends_the_page():
    """While the main thread waits for calls, a signal that is not delivered to it does not wake it."""
    worker = CallingThread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    other = threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT))
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.run()
    finally:
        signal.signal(signal.SIGINT, before)
