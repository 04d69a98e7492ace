"""The direction of imports, and what else the source must hold as a whole.

`MAY_IMPORT` is the architecture: what each part may see of the others, whether at the top of a
file, inside a function or for type checking only.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("megatron_rl", "checkpoints_tools")
MAX_LINES = 600

_ENGINES = ["policy", "rollout", "sync"]
_BELOW_TRAINER = ["config", "precision", "models", "platforms", "algorithms", "data", "metrics"]
_TRAINER = [*_BELOW_TRAINER, *_ENGINES, "rewards", "report", "checkpoints_tools"]

# Part -> the parts, or single modules, that it may import beside itself. Names are relative to
# megatron_rl, except checkpoints_tools.
MAY_IMPORT: dict[str, list[str]] = {
    "config": [],
    "precision": ["config"],
    "models": ["config", "precision"],
    "algorithms": ["config"],
    "data": ["config"],
    "rewards": ["config"],
    "metrics": ["config"],
    "report": ["config", "metrics"],
    "platforms": ["config"],
    "policy": [*_BELOW_TRAINER, "checkpoints_tools.hf"],
    "rollout": ["config", "precision", "models", "platforms"],
    "sync": ["config", "precision", "models", "policy", "rollout"],
    "trainer": _TRAINER,
    "launch": [*_TRAINER, "trainer"],
    "checkpoints_tools": ["models", "precision"],
}

# Library -> the only places that may import it, anywhere in a file.
ONLY_IN: dict[str, list[str]] = {
    "vllm": [
        "megatron_rl/rollout/*",
        "megatron_rl/sync/*",
        "megatron_rl/platforms/cpu_attention.py",
    ],
    "megatron": [
        "megatron_rl/policy/*",
        "megatron_rl/platforms/*",
    ],
    "transformer_engine": ["megatron_rl/precision/*", "megatron_rl/policy/*"],
}

# Files that only vLLM's own processes load, and that may therefore import it at the top.
VLLM_AT_THE_TOP = ["megatron_rl/rollout/worker.py", "megatron_rl/rollout/fp8_kernel.py"]

# A configuration is checked, and a flow compared, on machines and in moments without torch.
WITHOUT_TORCH = [
    "megatron_rl/config/*",
    "megatron_rl/precision/audit.py",
    "megatron_rl/precision/bounds.py",
    "megatron_rl/precision/contract.py",
    "megatron_rl/precision/environment.py",
    "megatron_rl/precision/exactness.py",
    "megatron_rl/precision/flow.py",
    "megatron_rl/precision/flows.py",
    "megatron_rl/precision/formats.py",
    "megatron_rl/precision/graph.py",
    "megatron_rl/precision/partition.py",
    "megatron_rl/precision/te.py",
]


@dataclass(frozen=True)
class Import:
    """One imported name; `deferred` inside a function or under TYPE_CHECKING."""

    name: str
    line: int
    deferred: bool


def imports_of(source: str, module: str) -> Iterator[Import]:
    """All imports of a file, as absolute dotted names; `module` is the package it lies in."""
    stack: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    while stack:
        node, deferred = stack.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, deferred)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: len(module.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, deferred)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("import_module", "importlib.import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield Import(str(node.args[0].value), node.lineno, deferred)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack += [(child, True) for child in node.body]
            stack += [(child, deferred) for child in node.orelse]
            continue
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        stack += [(child, deferred or is_function) for child in ast.iter_child_nodes(node)]


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def part_of(name: str) -> str | None:
    """The row of `MAY_IMPORT` for a dotted name; None for a library or the bare root package."""
    first, *rest = name.split(".")
    if first == "checkpoints_tools":
        return first
    if first == "megatron_rl" and rest and not rest[0].startswith("__"):
        return rest[0]
    return None


def allowed(part: str, imported: str) -> bool:
    """Whether a file of `part` may import the dotted name `imported` of ours."""
    prefixes = [
        other if other.startswith("checkpoints_tools") else f"megatron_rl.{other}"
        for other in [part, *MAY_IMPORT[part]]
    ]
    return any(within(imported, prefix) for prefix in prefixes)


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def all_imports() -> Iterator[tuple[Path, Import]]:
    """Every import of the two packages, with its file relative to the repository."""
    for path in source_files():
        relative = path.relative_to(ROOT)
        for found in imports_of(path.read_text(), ".".join(relative.parent.parts)):
            yield relative, found


def report(violations: list[str]) -> str:
    return "\n".join(["", *violations])


def test_the_table_has_no_cycles():
    order: list[str] = []
    waiting = {
        part: {other.split(".")[0] for other in others} for part, others in MAY_IMPORT.items()
    }
    while waiting:
        ready = [part for part, others in waiting.items() if others <= set(order)]
        assert ready, f"these import each other: {sorted(waiting)}"
        order += ready
        for part in ready:
            del waiting[part]


def test_every_part_is_in_the_table():
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in source_files())
    parts = {part for name in names if (part := part_of(name))}
    assert parts <= set(MAY_IMPORT)


def test_our_imports_run_one_way():
    violations = []
    for path, found in all_imports():
        part = part_of(".".join(path.with_suffix("").parts))
        if part_of(found.name) is None:
            continue
        if part is None or not allowed(part, found.name):
            violations.append(f"{path}:{found.line}: {part or 'the root'} imports {found.name}")
    assert not violations, report(violations)


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_stays_in_its_place(library):
    violations = [
        f"{path}:{found.line}: {found.name} belongs in {', '.join(ONLY_IN[library])}"
        for path, found in all_imports()
        if within(found.name, library) and not any(path.match(place) for place in ONLY_IN[library])
    ]
    assert not violations, report(violations)


def test_vllm_is_imported_late():
    violations = [
        f"{path}:{found.line}: {found.name} at the top; import it in the function that uses it"
        for path, found in all_imports()
        if within(found.name, "vllm")
        and not found.deferred
        and not any(path.match(place) for place in VLLM_AT_THE_TOP)
    ]
    assert not violations, report(violations)


def test_configuration_and_flow_import_no_torch():
    violations = [
        f"{path}:{found.line}: {found.name}"
        for path, found in all_imports()
        if within(found.name, "torch") and any(path.match(place) for place in WITHOUT_TORCH)
    ]
    assert not violations, report(violations)


def test_importing_us_loads_no_engine():
    ours = [
        "megatron_rl",
        "megatron_rl.config",
        "megatron_rl.precision",
        "megatron_rl.rollout",
        "megatron_rl.metrics",
        "megatron_rl.report",
        "megatron_rl.launch.cli",
        "checkpoints_tools.cli",
    ]
    program = (
        f"import sys, {', '.join(ours)}\n"
        "print(*sorted({'vllm', 'megatron.core', 'transformer_engine'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == ""


def test_configuration_loads_no_torch():
    program = "import sys, megatron_rl.config; print('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert run.stdout.strip() == "False", run.stderr


def test_no_file_is_too_long():
    lengths = {path: len(path.read_text().splitlines()) for path in source_files()}
    violations = [f"{path}: {n} lines" for path, n in lengths.items() if n > MAX_LINES]
    assert not violations, report(violations)


def test_no_file_names_a_developers_machine():
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    local_path = b"/" + b"work/"
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    files = {path: path.read_bytes() for path in paths if path.is_file()}
    violations = [str(path) for path, content in files.items() if local_path in content]
    assert not violations, report(violations)


SAMPLE = """
import vllm.config
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from vllm import LLM
class A:
    import torch
    def f(self):
        from ..policy import model
        import importlib
        importlib.import_module("megatron.core")
from . import types
from .worker import Worker
"""


def test_the_checker_sees_every_form_of_import():
    found = {(i.name, i.deferred) for i in imports_of(SAMPLE, "megatron_rl.rollout")}
    assert found == {
        ("vllm.config", False),
        ("typing.TYPE_CHECKING", False),
        ("vllm.LLM", True),
        ("torch", False),
        ("megatron_rl.policy.model", True),
        ("importlib", True),
        ("megatron.core", True),
        ("megatron_rl.rollout.types", False),
        ("megatron_rl.rollout.worker.Worker", False),
    }


def test_the_checker_tells_a_module_from_its_package():
    assert allowed("policy", "checkpoints_tools.hf.read_tensors")
    assert not allowed("policy", "checkpoints_tools.gguf")
    assert not allowed("policy", "checkpoints_tools.hf_other")
    assert not allowed("rollout", "megatron_rl.policy.model")
