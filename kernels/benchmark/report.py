"""The benchmark's result: times against floors, errors against bars, as JSON and as tables."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from m1serve.kernels.benchmark.timing import Ceilings

OURS = "m1serve"
JsonRow = dict[str, object]
# H200, as measured once: what floors are counted against until a run has measured its own
UNMEASURED = Ceilings(4.26, 730.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured time and the work that bounds it from below."""

    op: str
    case: str
    impl: str
    ms: float | None = None
    num_bytes: float = 0.0
    num_flops: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def key(self) -> str:
        return f"{self.op} | {self.case} | {self.impl}"

    def floor_ms(self, ceilings: Ceilings) -> float:
        """The later of two: all bytes at copy bandwidth, all operations at the product's rate."""
        return max(
            self.num_bytes / ceilings.copy_tb_s / 1e9, self.num_flops / ceilings.gemm_tflop_s / 1e9
        )

    def share(self, ceilings: Ceilings) -> float | None:
        floor_ms = self.floor_ms(ceilings)
        return floor_ms / self.ms if self.ms and floor_ms else None

    def to_json(self, ceilings: Ceilings) -> JsonRow:
        share, floor_ms = self.share(ceilings), self.floor_ms(ceilings)
        row: JsonRow = {
            "op": self.op,
            "case": self.case,
            "impl": self.impl,
            "ms": None if self.ms is None else round(self.ms, 5),
            "floor_ms": round(floor_ms, 5) if floor_ms else None,
            "share": None if share is None else round(share, 4),
            "num_bytes": self.num_bytes,
            "num_flops": self.num_flops,
        }
        if self.extra:
            row["extra"] = {name: round(value, 4) for name, value in self.extra.items()}
        return row | ({"error": self.error} if self.error else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison: an error of the worst head, or a difference that must be 0."""

    op: str
    case: str
    dtype: str
    impl: str
    worst_head_error: float
    bar: float
    error: str = ""

    @property
    def key(self) -> str:
        return f"{self.op} | {self.case} | {self.dtype} | {self.impl}"

    @property
    def ok(self) -> bool:
        """False for NaN."""
        return self.worst_head_error <= self.bar

    def to_json(self) -> JsonRow:
        row: JsonRow = asdict(self) | {"ok": self.ok}
        # JSON knows neither NaN nor infinity
        if not math.isfinite(self.worst_head_error):
            row["worst_head_error"] = None
        if not self.error:
            del row["error"]
        return row


@dataclass(slots=True, kw_only=True)
class Report:
    """What one run found; written after every row, so that a run cut short still says something."""

    command: str
    device: str
    date: str
    versions: dict[str, str]
    notes: list[str] = field(default_factory=list)
    ceilings: list[Ceilings] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def best(self) -> Ceilings:
        """The higher of the samples: a floor never flatters."""
        if not self.ceilings:
            return UNMEASURED
        return Ceilings(
            max(c.copy_tb_s for c in self.ceilings), max(c.gemm_tflop_s for c in self.ceilings)
        )

    @property
    def failed_checks(self) -> list[Check]:
        """Ours alone: a peer's error is a finding."""
        return [check for check in self.checks if check.impl == OURS and not check.ok]

    def time_of(self, op: str, case: str, impl: str = OURS) -> float | None:
        for row in self.rows:
            if (row.op, row.case, row.impl) == (op, case, impl):
                return row.ms
        return None

    def share_of(self, op: str, case: str, impl: str = OURS) -> float | None:
        for row in self.rows:
            if (row.op, row.case, row.impl) == (op, case, impl):
                return row.share(self.best)
        return None

    def extra_of(self, op: str, case: str, name: str) -> float | None:
        for row in self.rows:
            if (row.op, row.case, row.impl) == (op, case, OURS):
                return row.extra.get(name)
        return None

    def write(self, path: Path, bars: Iterable[JsonRow] = ()) -> None:
        best = self.best
        document = {
            "command": self.command,
            "device": self.device,
            "date": self.date,
            "versions": self.versions,
            "copy_tb_s": round(best.copy_tb_s, 4),
            "gemm_tflop_s": round(best.gemm_tflop_s, 1),
            "ceilings": [asdict(sample) for sample in self.ceilings],
            "notes": self.notes,
            "bars": list(bars),
            "rows": [row.to_json(best) for row in self.rows],
            "checks": [check.to_json() for check in self.checks],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        draft.replace(path)


def read_report(path: Path) -> Report:
    """What an earlier process of the same run wrote."""
    document = json.loads(path.read_text())
    checks = []
    for row in document["checks"]:
        error = row["worst_head_error"]
        fields = {name: value for name, value in row.items() if name != "ok"}
        checks.append(
            Check(**fields | {"worst_head_error": math.nan if error is None else float(error)})
        )
    return Report(
        command=document["command"],
        device=document["device"],
        date=document["date"],
        versions=document["versions"],
        notes=document["notes"],
        ceilings=[Ceilings(**sample) for sample in document["ceilings"]],
        rows=[
            Row(**{name: value for name, value in row.items() if name not in ("floor_ms", "share")})
            for row in document["rows"]
        ],
        checks=checks,
    )


def table(report: Report) -> str:
    """Markdown, one table an operator: a case a line, an implementation a column."""
    parts = []
    for op in dict.fromkeys(row.op for row in report.rows):
        rows = [row for row in report.rows if row.op == op]
        impls = list(dict.fromkeys(row.impl for row in rows))
        lines = [f"| {op}, ms | floor | " + " | ".join(impls) + " |"]
        lines.append("|---" * (len(impls) + 2) + "|")
        for case in sorted({row.case for row in rows}, key=_natural):
            by_impl = {row.impl: row for row in rows if row.case == case}
            floors = [row.floor_ms(report.best) for row in by_impl.values()]
            cells = [_cell(by_impl.get(impl), report.best) for impl in impls]
            lines.append(f"| {_spoken(case)} | {_ms(max(floors))} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _natural(case: str) -> list[tuple[int, str]]:
    """Sorts the numbers in a name as numbers."""
    parts = re.findall(r"\d+|\D+", case)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _spoken(case: str) -> str:
    """Numbers of tokens as people say them: T=65536 is T=64K."""

    def shorter(found: re.Match[str]) -> str:
        number = int(found[0])
        for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
            if number % unit == 0:
                return f"{number // unit}{name}"
        return found[0]

    return re.sub(r"(?<=T=)\d{4,}", shorter, case)


def _cell(row: Row | None, ceilings: Ceilings) -> str:
    if row is None:
        return "-"
    if row.ms is None:
        return "failed"
    share = row.share(ceilings)
    return _ms(row.ms) if share is None else f"{_ms(row.ms)} ({share:.0%})"


def _ms(ms: float) -> str:
    if not ms:
        return "-"
    return f"{ms:.4f}" if ms < 1 else f"{ms:.3f}" if ms < 10 else f"{ms:.1f}"
