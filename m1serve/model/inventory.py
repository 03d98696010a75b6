"""Which tensors a model directory holds, by the headers of its files: no tensor is read. No torch.

M1's 413 files take as long as 413 small reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from m1serve.errors import WeightsError
from m1serve.model.directory import read_weight_map, weight_files
from m1serve.model.tensor_file import StoredTensor, stored_tensors

# transformers saves these; they follow from the config and are computed here
DERIVED = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
ROUTER = ".block_sparse_moe.gate.weight"
READABLE = ("F32", "BF16", "F16")
_IN_MEMORY = (".mlp.gate.weight", ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    files: Mapping[Path, Mapping[str, StoredTensor]]
    """Of the files that are there and whole"""
    missing_files: tuple[Path, ...]
    broken_files: tuple[str, ...]
    """What is wrong with each of the others"""
    weight_map: Mapping[str, str] | None
    """Tensor name -> file name, as the index says"""

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """All that the headers say, what follows from the config left out."""
        found: dict[str, StoredTensor] = {}
        for tensors in self.files.values():
            found |= {name: t for name, t in tensors.items() if not is_derived(name)}
        return found

    @property
    def num_bytes(self) -> int:
        return sum(t.end - t.start for t in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """dtype -> number of tensors"""
        return dict(Counter(t.dtype for t in self.tensors.values()))

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors; those of files that are not there as the index has them."""
        listed = (name for name in self.weight_map or {} if not is_derived(name))
        return frozenset(self.tensors) | frozenset(listed)

    def file_problems(self) -> list[str]:
        """Missing and broken files, and tensors that are not where the index says."""
        owners: dict[str, list[str]] = {}
        for path, tensors in self.files.items():
            for name in tensors:
                owners.setdefault(name, []).append(path.name)
        present = {path.name for path in self.files}
        return [
            *self._missing_files(),
            *self.broken_files,
            *(
                f"{name} is in {files}, wanted in one of them; fetch them again"
                for name, files in owners.items()
                if len(files) > 1
            ),
            *(
                f"{name} is not in {file}, where the index has it; fetch both again"
                for name, file in (self.weight_map or {}).items()
                if file in present and file not in owners.get(name, [])
            ),
        ]

    def _missing_files(self) -> list[str]:
        if not self.missing_files:
            return []
        names = [path.name for path in self.missing_files]
        if len(names) == 1:
            return [f"{self.missing_files[0]} is missing; fetch it again"]
        num_all = len(names) + len(self.files) + len(self.broken_files)
        folder = self.missing_files[0].parent
        return [
            f"{len(names)} of {num_all} files are missing in {folder}; fetch them again: "
            f"{abridged(names, 4)}"
        ]


def is_derived(name: str) -> bool:
    return name.rpartition(".")[2] in DERIVED


def take_inventory(path: Path) -> Inventory:
    """Reads the index and the headers; WeightsError only when the index itself is unreadable."""
    files: dict[Path, dict[str, StoredTensor]] = {}
    missing: list[Path] = []
    broken: list[str] = []
    for file in weight_files(path):
        if not file.exists():
            missing.append(file)
            continue
        try:
            files[file] = stored_tensors(file)
        except WeightsError as error:
            broken.append(str(error))
    return Inventory(
        files=files,
        missing_files=tuple(missing),
        broken_files=tuple(broken),
        weight_map=read_weight_map(path),
    )


def tensor_problems(inventory: Inventory, wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Missing, unexpected and misshapen tensors, and those of a dtype that is not read."""
    names, problems = inventory.names, list[str]()
    unexpected = sorted(names - wanted.keys())
    if any(name.endswith(_IN_MEMORY) for name in unexpected):
        problems.append(
            "the names are those that transformers has in memory; "
            "write them with save_pretrained(save_original_format=True)"
        )
    problems += [f"unexpected {name}" for name in unexpected]
    for name, tensor in inventory.tensors.items():
        if name in wanted and tensor.shape != wanted[name]:
            problems.append(f"{name} is {list(tensor.shape)}, wanted {list(wanted[name])}")
        if name in wanted and tensor.dtype not in READABLE:
            problems.append(f"{name} has dtype {tensor.dtype}, wanted one of {list(READABLE)}")
    return problems + [f"missing {name}" for name in sorted(wanted.keys() - names)]


def narrow_routers(inventory: Inventory) -> list[str]:
    """Routers that are not stored in fp32, as M1's own are."""
    tensors = inventory.tensors
    return [name for name in tensors if name.endswith(ROUTER) and tensors[name].dtype != "F32"]


def abridged(items: Iterable[str], most: int = 20) -> str:
    """The first few of many, and how many more there are."""
    parts = list(items)
    more = f"; and {len(parts) - most} more" if len(parts) > most else ""
    return "; ".join(parts[:most]) + more
