"""The benchmark's host side, which runs without a GPU: what it counts, records, fetches, judges."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from m1serve.kernels.bench import main, parse, summary
from m1serve.kernels.benchmark.bars import bars
from m1serve.kernels.benchmark.cases import (
    FIRST,
    MIDDLE,
    SCALE,
    Case,
    K,
    decode_bytes,
    prefill_bytes,
    prefill_name,
    share_name,
    training_bytes,
    varlen_name,
)
from m1serve.kernels.benchmark.checks import CheckCase, Setting, forward_checks, peer_checks
from m1serve.kernels.benchmark.inputs import (
    Answer,
    Sequences,
    largest_difference,
    random_sequences,
    worst_error,
)
from m1serve.kernels.benchmark.layer_cases import FOUR_GEMMS, LOGPROBS_NAME, NORM_NAME
from m1serve.kernels.benchmark.ours import M1serve
from m1serve.kernels.benchmark.pass_cases import EVERY_LAYER, OP, SILU, slice_ms
from m1serve.kernels.benchmark.peers_fetch import Wheel, download_command, extract, fetch
from m1serve.kernels.benchmark.report import Check, Report, Row, read_report, table
from m1serve.kernels.benchmark.run import AGAIN, PARTS, Plan, all_checks, take
from m1serve.kernels.benchmark.timing import Ceilings

H200 = Ceilings(4.3, 790.0)
SMALL = Setting(
    device="cpu", heads=slice(0, 64, 32), lengths=(1, 65, 127), num_steps=100, is_large=False
)


def report(*rows: Row, checks: tuple[Check, ...] = ()) -> Report:
    return Report(
        command="python -m m1serve.kernels.bench",
        device="H200",
        date="2026-11-30T12:00:00+00:00",
        versions={"torch": "2.11.0"},
        ceilings=[H200],
        rows=list(rows),
        checks=list(checks),
    )


def prefill_row(ms: float, case: str = "", impl: str = "m1serve") -> Row:
    case = case or prefill_name(64 * K, MIDDLE)
    return Row(op="prefill", case=case, impl=impl, ms=ms, num_bytes=prefill_bytes(64 * K, 64))


def check(error: float, *, impl: str = "m1serve") -> Check:
    return Check(
        op="prefill", case="T=1", dtype="bfloat16", impl=impl, worst_head_error=error, bar=3e-3
    )


def plan(out: Path) -> Plan:
    return Plan(
        command="",
        out=out,
        peers=None,
        only=PARTS,
        is_quick=False,
        notes=None,
        budget_s=1,
        case_timeout_s=60,
    )


def test_the_parts_are_named_and_others_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--only", "prefill,decode"]).only == ("prefill", "decode")
    with pytest.raises(SystemExit):
        parse(["--only", "prefil"])
    assert "prefil is not one of" in capsys.readouterr().err


def test_a_missing_peers_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["--peers", str(tmp_path / "none")])
    assert "--fetch-peers" in capsys.readouterr().err


def test_the_command_is_what_one_would_type(tmp_path: Path) -> None:
    command = parse(["--peers", str(tmp_path), "--child"]).command
    assert command == f"python -m m1serve.kernels.bench --peers {tmp_path}"


def test_bytes_are_counted_in_units_of_one_tensor() -> None:
    unit = 64 * K * 64 * 128 * 2
    assert prefill_bytes(64 * K, 64) == 4 * unit
    assert training_bytes(64 * K, 64) == 11 * unit
    assert decode_bytes(64) == 2 * 64 * (4 << 20)


def test_a_floor_is_the_later_of_bytes_and_operations() -> None:
    row = prefill_row(2.0)
    assert row.floor_ms(H200) == pytest.approx(0.9988, rel=1e-3)
    assert row.share(H200) == pytest.approx(0.4994, rel=1e-3)
    assert replace(row, num_flops=7.9e12).floor_ms(H200) == pytest.approx(10.0)
    assert replace(row, ms=None).share(H200) is None


def test_floors_count_against_the_higher_ceiling() -> None:
    measured = report()
    measured.ceilings.append(Ceilings(4.1, 800.0))
    assert measured.best == Ceilings(4.3, 800.0)


def test_a_report_comes_back_from_its_file(tmp_path: Path) -> None:
    rows = (
        replace(prefill_row(1.5), extra={"peak_gib_beyond": 0.5}),
        Row(op="decode", case="B=1", impl="fla", error="OutOfMemoryError: no"),
    )
    written = report(*rows, checks=(check(1e-3), check(math.nan)))
    written.write(tmp_path / "r.json")
    back = read_report(tmp_path / "r.json")
    assert back.rows == written.rows
    assert back.checks[0] == written.checks[0]
    assert math.isnan(back.checks[1].worst_head_error)
    assert (back.command, back.ceilings) == (written.command, written.ceilings)


def test_the_file_has_the_fields_that_readers_expect(tmp_path: Path) -> None:
    written = report(prefill_row(1.5), checks=(check(1e-3), check(math.nan)))
    written.write(tmp_path / "r.json", [bar.to_json() for bar in bars(written)])
    document = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert document["copy_tb_s"] == 4.3
    assert document["gemm_tflop_s"] == 790
    assert document["device"] == "H200"
    row = document["rows"][0]
    assert {"op", "case", "impl", "ms", "floor_ms", "share"} <= row.keys()
    assert row["share"] == pytest.approx(0.6659, abs=1e-3)
    assert [entry["ok"] for entry in document["checks"]] == [True, False]
    assert {"bar", "value", "is_met"} == document["bars"][0].keys()


def test_a_file_that_is_no_result_is_said_in_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    for path in (other, tmp_path / "absent.json"):
        assert main(["--table", str(path)]) == 2
        assert f"{path}: not a result of this benchmark" in capfd.readouterr().err


def test_the_table_has_a_column_an_implementation() -> None:
    rows = (prefill_row(1.25), prefill_row(3.2, impl="fla"), prefill_row(0.9, case="H=8"))
    lines = table(report(*rows)).splitlines()
    assert lines[0] == "| prefill, ms | floor | m1serve | fla |"
    assert lines[2].startswith("| H=8 |")
    assert lines[2].endswith("| 0.9000 (111%) | - |")
    assert lines[3] == "| H=64 T=64K layer 39 | 0.9988 | 1.250 (80%) | 3.200 (31%) |"


def test_the_bars_are_read_off_the_rows() -> None:
    case = share_name(64 * K, FIRST)
    op = "linear_logprobs"
    rows = (
        prefill_row(1.1),
        replace(prefill_row(1.0, case), num_bytes=prefill_bytes(64 * K, 8)),
        prefill_row(1.24, varlen_name((8 * K,) * 8, MIDDLE)),
        Row(op="decode", case="B=1", impl="m1serve", ms=0.005),
        Row(op="decode", case="B=1", impl=SCALE, ms=0.0045),
        Row(op=op, case=LOGPROBS_NAME, impl="m1serve", ms=130, extra={"peak_gib_beyond": 0.7}),
        Row(op=op, case=LOGPROBS_NAME, impl=FOUR_GEMMS, ms=100),
    )
    found = {bar.name: bar for bar in bars(report(*rows, checks=(check(1.0, impl="vllm"),)))}
    met = {name: bar.is_met for name, bar in found.items() if bar.value is not None}
    assert met == {
        f"share, prefill {prefill_name(64 * K, MIDDLE)}": True,
        f"share, prefill {varlen_name((8 * K,) * 8, MIDDLE)}": True,
        f"share, prefill {case}": False,
        f"decode B=1 over {SCALE}": True,
        "linear_logprobs over four GEMMs": False,
        "GiB, linear_logprobs beyond results": True,
        "failed checks": True,
    }
    assert not found["share, decode B=64"].is_met


def test_the_passes_of_the_slice_are_added_once_all_are_measured() -> None:
    names = (*EVERY_LAYER, SILU)
    rows = [Row(op=OP, case=name, impl="m1serve", ms=1.0) for name in names]
    assert slice_ms(report(*rows)) is None
    rows.append(Row(op="gated_rms_norm", case=NORM_NAME, impl="m1serve", ms=0.5))
    # five passes in each of 8 layers, two more in each of 7
    assert slice_ms(report(*rows)) == pytest.approx(8 * 5 + 7 * 1.5)
    found = {bar.name: bar for bar in bars(report(*rows))}
    assert found["ms, passes of 8 layers at 64K tokens"].is_met


def test_the_summary_names_what_failed() -> None:
    broken = Row(op="decode", case="B=1", impl="m1serve", error="RuntimeError: boom")
    said = summary(report(prefill_row(2.0), broken, checks=(check(0.1), check(0.2, impl="vllm"))))
    assert "failed decode | B=1 | m1serve: RuntimeError: boom" in said
    assert "check failed: prefill | T=1 | bfloat16 | m1serve: 0.1 > 0.003" in said
    assert "finding: prefill | T=1 | bfloat16 | vllm: 0.2 > 0.003" in said


def test_a_case_that_fails_is_a_row_and_the_next_one_runs(tmp_path: Path) -> None:
    def fail() -> Row:
        raise RuntimeError("boom")

    found, out = report(), plan(tmp_path / "r.json")
    bad = Case(op="prefill", case="bad", impl="m1serve", run=fail)
    good = Case(op="prefill", case="good", impl="m1serve", run=lambda: prefill_row(1.0, "good"))
    assert take(bad, found, out)
    assert take(good, found, out)
    assert [(row.case, row.error, row.ms) for row in read_report(out.out).rows] == [
        ("bad", "RuntimeError: boom", None),
        ("good", "", 1.0),
    ]


def test_a_case_is_in_the_file_before_it_runs_and_is_not_run_again(tmp_path: Path) -> None:
    out = plan(tmp_path / "r.json")
    seen: list[str] = []

    def run() -> float:
        seen.append(read_report(out.out).checks[0].error)
        return 0.0

    case = CheckCase(op="prefill", case="T=1", dtype=torch.bfloat16, bar=0.0, run=run)
    assert take(case, report(), out)
    # a process that ended inside the case left this behind
    left = read_report(out.out)
    assert take(case, left, out)
    assert seen == ["did not finish: its process ended"]
    assert left.checks[0].ok


def fake_wheel(directory: Path) -> Path:
    file = directory / "fake_peer-1.0-py3-none-any.whl"
    info = "fake_peer-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr("fake_peer/kernel.py", "VALUE = 1\n")
        wheel.writestr("fake_peer/binary.so", "large")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: fake-peer\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return file


def test_only_the_wanted_files_are_kept(tmp_path: Path) -> None:
    wheel = fake_wheel(tmp_path)
    names = extract(wheel, ("fake_peer/*.py",), tmp_path / "peers")
    assert names == ["fake_peer/kernel.py"]
    assert [f.name for f in (tmp_path / "peers").rglob("*") if f.is_file()] == ["kernel.py"]
    with pytest.raises(ValueError, match=r"holds no fake_peer/gone\.py"):
        extract(wheel, ("fake_peer/gone.py",), tmp_path / "peers")


def test_pip_downloads_the_wheel_and_nothing_it_needs(tmp_path: Path) -> None:
    command = download_command("vllm==0.32.0", tmp_path)
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert command[-1] == "vllm==0.32.0"


def test_peers_are_fetched_into_their_folder(tmp_path: Path) -> None:
    wheel = Wheel(str(fake_wheel(tmp_path)), ("fake_peer/*.py",), "site")
    fetch(tmp_path / "peers", (wheel,))
    assert (tmp_path / "peers/site/fake_peer/kernel.py").read_text() == "VALUE = 1\n"
    assert not list((tmp_path / "peers").rglob("*.whl"))


def test_one_wrong_head_is_the_error() -> None:
    wanted = torch.randn(10, 4, 32)
    got = wanted.clone()
    got[:, 2] *= 1.5
    assert worst_error(got, wanted, head_dim=1) == pytest.approx(0.5, rel=1e-5)
    got[3, 0, 1] = math.nan
    assert math.isnan(worst_error(got, wanted, head_dim=1))


def test_bits_differ_where_values_or_nans_do() -> None:
    a = torch.tensor([1.0, math.nan, 0.0])
    assert largest_difference(a, a.clone()) == 0
    assert largest_difference(a, torch.tensor([1.0, 2.0, 0.0])) == math.inf
    assert largest_difference(torch.tensor([0.0]), torch.tensor([-0.0])) > 0
    assert largest_difference(torch.tensor([1.0]), torch.tensor([1.5])) == 0.5


def test_sequences_are_views_of_one_packed_projection() -> None:
    given = random_sequences([3, 5], SMALL.slopes(0), head_dim=32)
    assert given.q_THD.stride() == (2 * 96, 96, 1)
    assert given.only(1).q_THD.shape == (5, 2, 32)
    again = random_sequences([3, 5], SMALL.slopes(0), head_dim=32)
    assert torch.equal(given.v_THD, again.v_THD)


def test_what_runs_on_the_cpu_passes_every_check() -> None:
    failed = [(c.op, c.case, c.dtype_name) for c in all_checks(SMALL) if not c.run() <= c.bar]
    assert failed == []


class Forgetful(M1serve):
    """Decays a tenth too fast."""

    def prefill(self, sequences: Sequences) -> Callable[[], Answer]:
        return super().prefill(replace(sequences, slope_H=sequences.slope_H * 1.1))


def test_a_wrong_decay_fails_the_checks() -> None:
    setting = replace(SMALL, layers=(0,))
    wrong = {
        case.case: case.run() > case.bar
        for case in peer_checks(Forgetful(), setting)
        if case.op == "prefill"
    }
    assert len(wrong) == 4
    assert all(wrong.values())
    right = [case.run() for case in peer_checks(M1serve(), setting)]
    assert len(right) == 6
    assert max(right) < 3e-3
    assert len(list(forward_checks(setting))) == 3 * (3 * 2 + 1)


def test_without_a_gpu_the_benchmark_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["--out", str(tmp_path / "r.json")]) == 1
    assert "no CUDA device" in capfd.readouterr().err


HANGING = """
import sys, time
from pathlib import Path
from m1serve.kernels.benchmark.run import Plan, take
from m1serve.kernels.benchmark.cases import Case
from m1serve.kernels.benchmark.report import Report, Row, read_report
file = Path(sys.argv[1])
plan = Plan(command="", out=file, peers=None, only=(), is_quick=False, notes=None,
            budget_s=1, case_timeout_s=0.2)
report = read_report(file) if file.exists() else Report(command="", device="", date="", versions={})
row = Row(op="decode", case="B=2", impl="m1serve", ms=1.0)
for case, run in (("B=1", lambda: time.sleep(60)), ("B=2", lambda: row)):
    take(Case(op="decode", case=case, impl="m1serve", run=run), report, plan)
"""


def test_a_case_that_hangs_ends_its_process_and_the_next_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGING, str(tmp_path / "r.json")]
    codes = [subprocess.run(command, check=False, timeout=60).returncode for _ in range(2)]
    assert codes == [AGAIN, 0]
    rows = read_report(tmp_path / "r.json").rows
    assert [(row.case, row.ms) for row in rows] == [("B=1", None), ("B=2", 1.0)]
    assert rows[0].error == "did not finish: its process ended"
