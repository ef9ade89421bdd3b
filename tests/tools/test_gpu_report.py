"""The page of the GPU check: speeds, verdicts, and the kernel model's predictions beside them."""

import json

import pytest

from tools.gpu import measure, predict, report
from tools.gpu.cases import Case
from tools.gpu.measure import Times
from tools.kernel_model import record


def test_median_and_spread_of_times():
    assert measure.summary([5.0, 1.0, 2.0, 100.0, 3.0]) == Times(3.0, 2.0, 5.0)


def _timed(**times_ms):
    case = Case("full", 32768)
    times = {name.replace("_", " "): Times(ms, ms, ms) for name, ms in times_ms.items()}
    return report.Timed(case, "forward", case.mask().area(), times)


def test_speed_is_operations_over_time_and_verdicts_name_who_is_ahead():
    operations = 4 * 32768**2 * 64 * 128
    timed = _timed(hopper=operations / 710e9)
    assert timed.tflops("hopper") == pytest.approx(710)
    assert timed.tflops("cudnn") is None
    assert timed.verdict() == "ok"
    assert _timed(hopper=operations / 650e9).verdict() == "behind bar 700"
    both = _timed(hopper=operations / 650e9, cudnn=operations / 715e9, fa2=operations / 400e9)
    assert both.verdict() == "behind bar 700, cudnn +10 %"
    assert _timed(cudnn=50.0).verdict() == "not run"


def test_page_and_values_say_the_same(tmp_path):
    result = report.Report("Title", {"gpu": "none"}, stopped="because of this")
    result.checks += [("a|b", "ok", "1e-3"), ("c", "FAILED", "row 3")]
    result.timed.append(_timed(hopper=50.0, cudnn=60.0))
    result.write(tmp_path / "out" / "check")
    page = (tmp_path / "out" / "check.md").read_text()
    assert "**Stopped early: because of this**" in page
    assert "2 checks, 1 failed." in page
    assert "| a/b | ok | 1e-3 |" in page
    kept = json.loads((tmp_path / "out" / "check.json").read_text())
    speed = kept["timed"][0]["tflops"]["hopper"]
    assert f"| full 32K D=128 | {speed:.0f} |" in page
    assert kept["timed"][0]["times"]["cudnn"]["median_ms"] == 60.0
    assert speed == pytest.approx(4 * 32768**2 * 64 * 128 / 50e9)


# ---------------------------------------------------------------------- the kernel model

FIGURES = {
    "fwd_128": {
        "default": 1.0,
        "tight": 0.8,
        "rows": 128,
        "fixed_cycles": {"accumulate": 9, "16 bits": 4096},
    },
    "bwd_128": {"default": 0.5, "tight": 0.5, "rows": 128, "fixed_cycles": {}},
}
H200 = predict.Gpu(num_sms=132, clock_mhz=1980.0)


def test_prediction_is_the_busy_share_of_the_peak_less_the_fixed_cycles():
    case = Case("full", 1024, num_heads=2, num_kv_heads=1)
    model = predict.Model(FIGURES)
    # By hand: an item of 128 queries x 1024 keys has 2 products of 2 * 128 * 1024 * 128 operations, in 16384 cycles of
    # 4096 operations at full share; 4096 more are fixed. So 16384 / 20480 of the peak, and 16384 / 24576.
    peak = 132 * 4096 * 1980e6 / 1e12
    low, high = predict.predicted_tflops(model, case, "forward", 1024**2, H200)
    assert (low, high) == pytest.approx((peak * 2 / 3, peak * 4 / 5))
    backward = predict.predicted_tflops(model, case, "backward", 1024**2, H200)
    assert backward == pytest.approx((peak / 2, peak / 2))


def test_head_dims_that_the_model_does_not_have_get_no_prediction():
    model = predict.Model(FIGURES)
    for dims in ((64, 64), (192, 128)):
        assert (
            predict.predicted_tflops(model, Case("full", 1024, *dims), "forward", 9, H200) is None
        )
    assert (
        predict.predicted_tflops(predict.Model({}), Case("full", 1024), "forward", 9, H200) is None
    )


def test_items_of_more_rows_have_fewer_fixed_cycles():
    case = Case("full", 1536, num_heads=1, num_kv_heads=1)
    costs = FIGURES["fwd_128"] | {"default": 1.0, "tight": 1.0}
    peak = 132 * 4096 * 1980e6 / 1e12
    for rows in (128, 192):
        model = predict.Model({"fwd_128": costs | {"rows": rows}})
        loop = 4 * 1536**2 * 128 / 4096
        expected = peak * loop / (loop + 1536 / rows * 4096)
        assert predict.predicted_tflops(model, case, "forward", 1536**2, H200)[0] == pytest.approx(
            expected
        )


def test_kernels_that_changed_since_the_model_saw_them_get_no_prediction(monkeypatch):
    known = dict(record.read())
    whole = predict.load_model()
    assert whole.reason == "" and whole.kernels == known
    known["fwd_128"] = known["fwd_128"] | {"source": "other"}
    monkeypatch.setattr(record, "read", lambda: known)
    model = predict.load_model()
    assert set(whole.kernels) - set(model.kernels) == {"fwd_128"}
    assert model.reason == "changed since the model saw them: fwd_128"


def test_prediction_stands_beside_the_time_and_is_called_what_it_is(tmp_path):
    result, timed = report.Report("Title", {}), _timed(hopper=50.0)
    result.timed.append(
        report.Timed(timed.case, "forward", timed.area, timed.times, (650.4, 702.6))
    )
    result.write(tmp_path / "x")
    assert "| hopper by the model, not measured |" in (tmp_path / "x.md").read_text()
    assert "| 650 to 703 |" in (tmp_path / "x.md").read_text()
    kept = json.loads((tmp_path / "x.json").read_text())["timed"][0]
    assert kept["modelled"] == [650.4, 702.6]
