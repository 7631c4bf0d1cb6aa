"""Who may import whom, and what a bare import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "agentrl", *(ROOT / p for p in ("envs", "tools", "sandboxes"))]

# Package -> packages of agentrl that it may import. `types`, `errors`, `seeding` are for everyone.
COMMON = {"types", "errors", "seeding"}
BASE = COMMON | {"registry", "kwargs", "finite", "extras", "headers", "references"}
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "seeding": set(),
    "extras": COMMON,
    "finite": COMMON,
    "headers": COMMON,
    "references": set(),
    "registry": COMMON,
    "kwargs": COMMON,
    "batch": COMMON,
    "sandbox": BASE,
    "net": BASE,
    "tool": BASE | {"sandbox", "net"},
    "env": BASE | {"sandbox", "tool"},
    "model": BASE,
    "data": BASE,
    "agent": BASE | {"env", "tool", "sandbox"},
    "reward": BASE | {"agent", "env", "tool", "sandbox", "model", "net"},
    "weights": BASE,
    "rollout": BASE | {"weights", "agent", "model", "env", "tool", "sandbox", "reward"},
    "algo": BASE | {"batch"},
    "dist": BASE | {"algo", "batch", "rollout", "model", "weights"},
    "telemetry": BASE | {"batch"},
    "testing": BASE
    | {
        "weights",
        "env",
        "tool",
        "sandbox",
        "agent",
        "rollout",
        "model",
        "telemetry",
        "batch",
        "algo",
    }
    | {"weights"},
    "train": BASE
    | {"env", "tool", "sandbox", "agent", "rollout", "model", "algo", "batch", "dist", "telemetry"}
    | {"data"},
    "config": BASE
    | {"env", "tool", "sandbox", "reward", "rollout", "algo", "dist", "train", "telemetry"}
    | {"data"},
}
# Packs see the protocols, never the machinery that runs them.
PACK_ALLOWED = BASE | {"env", "tool", "sandbox", "net"}
# Wiring: may import everything.
TOP = {"launch", "plan", "engines", "rollouts", "cluster", "resume", "playground", "play", "sft"}
TOP |= {"__init__", "cli", "memory_plan", "doctor", "bench", "limits", "resuming", "sft_start"}
TOP |= {"memory_buckets"}


def _modules() -> list[Path]:
    return sorted(path for source in SOURCES for path in source.rglob("*.py"))


def _agentrl_imports(path: Path) -> set[str]:
    """Dotted names below ``agentrl`` imported at run time (TYPE_CHECKING blocks do not count)."""
    names: set[str] = set()

    class Visitor(ast.NodeVisitor):
        def visit_If(self, node: ast.If) -> None:
            test = ast.unparse(node.test)
            if test not in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                self.generic_visit(node)

        def visit_Import(self, node: ast.Import) -> None:
            names.update(alias.name for alias in node.names)

        def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
            if node.level == 0:  # a relative import stays inside its own package
                names.add(node.module or "")

    Visitor().visit(ast.parse(path.read_text()))
    return {name for name in names if name == "agentrl" or name.startswith("agentrl.")}


def _package(dotted: str) -> str:
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_packages_import_only_what_the_design_allows() -> None:
    wrong = []
    for path in _modules():
        relative = path.relative_to(ROOT)
        in_core = relative.parts[0] == "agentrl"
        own = Path(relative.parts[1]).stem if in_core else "pack"
        if in_core and own in TOP:
            continue
        allowed = ALLOWED[own] | {own, "__init__"} if in_core else PACK_ALLOWED | {"__init__"}
        wrong += [
            f"{relative} imports {name}"
            for name in sorted(_agentrl_imports(path))
            if _package(name) not in allowed
        ]
    assert not wrong, "\n".join(wrong)


def test_core_never_imports_a_pack() -> None:
    for path in (ROOT / "agentrl").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                assert not name.startswith(
                    ("agentrl_envs", "agentrl_tools", "agentrl_sandboxes")
                ), f"{path}: {name}"


@pytest.mark.parametrize(
    ("library", "home"),
    [("ray", "agentrl/dist"), ("vllm", "agentrl/rollout/engines"), ("docker", "sandboxes")],
)
def test_heavy_libraries_stay_in_their_corner(library: str, home: str) -> None:
    for path in _modules():
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            if any(name.split(".")[0] == library for name in names):
                assert str(path.relative_to(ROOT)).startswith(home), path


def test_no_import_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for path in (ROOT / "agentrl").rglob("*.py"):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        graph[name] = _module_level_imports(path)
    graph = {name: {dep for dep in deps if dep in graph} for name, deps in graph.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name in done:
            return
        for dependency in sorted(graph[name]):
            visit(dependency, (*trail, name))
        done.add(name)

    for name in sorted(graph):
        visit(name, ())


def _module_level_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("module", ["agentrl", "agentrl.types", "agentrl.cli.main"])
def test_import_loads_no_heavy_library(module: str) -> None:
    heavy = ["torch", "ray", "vllm", "docker", "transformers", "matplotlib", "gymnasium", "hydra"]
    if module == "agentrl.types":
        heavy.remove("gymnasium")
    code = f"import sys, {module}; print(sorted(set({heavy!r}) & set(sys.modules)))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "[]"


def test_public_names_resolve() -> None:
    import agentrl

    for name in agentrl.__all__:
        assert getattr(agentrl, name) is not None
