"""Pictures by matplotlib show what the page shows of the same figure: names of thresholds, scales and ticks."""

from typing import Any

import pytest

from sinkscope.pages.drawn import drawing
from sinkscope.pages.figure import Figure, axis, level, levels, line, log_axis, sink_level


def drawn(values, **layout) -> Any:
    """The panel of a curve over 1, 2, 3, ... with a layout."""
    places = list(range(1, len(values) + 1))
    traces = [line(places, values, "curve", 0)]
    layout = {"xaxis": axis("x"), "yaxis": axis("y"), **layout}
    picture = drawing([Figure("id", "A title", "", ("rates",), traces, layout)])
    picture.draw_without_rendering()
    return picture.axes[0]


def ticks(along):
    return dict(zip(along.get_ticklocs(), [text.get_text() for text in along.get_ticklabels()], strict=True))


def test_thresholds_are_named():
    panel = drawn([0.0, 0.3, 0.1], **sink_level())
    (name,) = panel.texts
    assert name.get_text() == "a sink: 5 %"
    assert name.xy == (1, 0.05)
    assert name.xycoords == ("axes fraction", "data")
    assert (name.get_ha(), name.get_va()) == ("right", "bottom")
    assert list(panel.lines[-1].get_ydata()) == [0.05, 0.05]
    assert drawn([0.0, 0.3], **levels(level(0.1, ""))).texts[:] == [], "a line without a name"


def test_a_vertical_threshold_is_named_above_the_panel_and_below_its_title():
    panel = drawn([1.0, 2.0, 3.0], **levels(level(2, "a $quarter$", vertical=True)))
    (name,) = panel.texts
    assert name.xycoords == ("data", "axes fraction")
    assert (name.xy, name.get_ha(), name.get_va()) == ((2, 1), "center", "bottom")
    assert name.get_text() == r"a \$quarter\$"
    assert name.get_window_extent().y1 <= panel.title.get_window_extent().y0


def test_a_logarithmic_axis_keeps_its_ticks():
    factors = [1, 1.5, 2, 4, 8]
    named = axis("factor", type="log", tickvals=factors, ticktext=[f"{factor}x" for factor in factors])
    panel = drawn([0.1] * 8, xaxis=named)
    assert panel.get_xscale() == "log"
    assert ticks(panel.xaxis) == {1: "1x", 1.5: "1.5x", 2: "2x", 4: "4x", 8: "8x"}


def test_ticks_without_texts_are_numbers_and_do_not_stretch_the_axis():
    values = [0.03, 0.2, 0.9]
    plain, panel = (drawn(values, yaxis=made) for made in (axis("y", type="log"), log_axis("y", values)))
    assert panel.get_ylim() == pytest.approx(plain.get_ylim())
    assert ticks(panel.yaxis) == pytest.approx({0.05: "0.05", 0.1: "0.1", 0.2: "0.2", 0.5: "0.5", 1.0: "1"})
    assert not any(text.get_text() for text in panel.yaxis.get_minorticklabels())
    assert 0.02 in log_axis("y", values)["tickvals"], "the control: a tick outside of the picture"
