"""The house holds together: who may import whom, what is installed, and how a runbook reads."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from rattler import MatchSpec

ROOT = Path(__file__).resolve().parents[1]
LIB = ROOT / "lib" / "proofbook"
RUNBOOKS = sorted((ROOT / "runbooks").glob("*.ipynb"))

#: Top down: a room imports only rooms above it (and its own).
ORDER = (
    "errors",
    "visible",
    "model",
    "intent",
    "redact",
    "journal",
    "remote",
    "transports",
    "lab",
    "host",
    "inventory",
    "signatures",
    "probes",
    "checks",
    "measures",
    "changes",
    "hosts",
    "leases",
    "view",
    "run",
    "procedures",
    "record",
    "archive",
    "begun",
    "reading",
    "triage",
    "live",
    "notebook",
    "launch",
    "recover",
    "demo",
    "fleet",
    "cli",
)

#: What costs much to import, or must be tamed in one place, has one home.
HOMES = {
    "fabric": ("transports/ssh.py",),
    "invoke": ("transports/ssh.py",),
    "paramiko": ("transports/ssh.py",),
    "asyncssh": ("lab/",),
    "httpx": ("measures/client.py",),
    "pandas": ("view.py",),
    "matplotlib": ("view.py",),
    "ipywidgets": ("live.py",),
    "papermill": ("launch.py",),
}

#: Needed although no module imports them.
NOT_IMPORTED = {
    "hyperscan": "loaded by name where there is a wheel of it; the filter has other engines",
    "ipykernel": "the kernel that runbooks run in, started by name",
    "jupyterlab": "the program that shows runbooks",
    "sniffio": "httpcore asks it which event loop runs",
}


# ---------------------------------------------------------------------------------------- import direction


def modules() -> list[Path]:
    return sorted(LIB.rglob("*.py"))


def short(path: Path) -> str:
    return path.relative_to(LIB).as_posix()


def room(path: Path) -> str:
    return path.relative_to(LIB).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """Line and dotted name of everything that a module imports, lazily or not; but for what only the type checker reads."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    package = ("proofbook", *path.relative_to(LIB).parent.parts)
    for node in _without_type_checking(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from proofbook import record` names a room; `from proofbook.record import Keeper` already did.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def _without_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        test = child.test if isinstance(child, ast.If) else None
        if getattr(test, "id", "") == "TYPE_CHECKING" or getattr(test, "attr", "") == "TYPE_CHECKING":
            continue
        yield child
        yield from _without_type_checking(child)


def own_imports(path: Path) -> Iterator[tuple[int, str]]:
    """The imports of proofbook's own modules: line, and the path below the package (``probes.base.drive``)."""
    for line, name in imports(path):
        first, _, rest = name.partition(".")
        if first == "proofbook" and rest.split(".")[0] in ORDER:
            yield line, rest


def test_every_module_has_its_place() -> None:
    unknown = {room(path) for path in modules()} - {*ORDER, "__init__"}
    assert not unknown, f"say in ORDER where {sorted(unknown)} stand"


def test_a_module_imports_only_what_stands_above_it() -> None:
    wrong = [
        f"{short(path)}:{line} imports {name}, which stands below it"
        for path in modules()
        if room(path) != "__init__"
        for line, name in own_imports(path)
        if ORDER.index(name.split(".")[0]) > ORDER.index(room(path))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_direction_test_would_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "LIB", tmp_path)
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes" / "boot.py").write_text(
        "def late():\n    from ..run import Run\n    from proofbook import cli\n    import os\n"
    )
    found = [name for path in modules() for _, name in own_imports(path)]
    assert found == ["run.Run", "cli"]


def test_checks_are_pure() -> None:
    """A check holds observations against an expectation; it knows nothing that could reach a machine."""
    allowed = {"errors", "model", "intent", "redact", "signatures", "probes", "checks"}
    foreign = {"subprocess", "socket", "os", "urllib", "http", "asyncio"}
    wrong = [
        f"{short(path)}:{line} imports {name}"
        for path in modules()
        if room(path) == "checks"
        for line, name in imports(path)
        if name.split(".")[0] in foreign or (name.startswith("proofbook.") and name.split(".")[1] not in allowed)
    ]
    assert not wrong, "\n".join(wrong)


def test_run_knows_no_concrete_probe_check_measure_or_change() -> None:
    wrong = [
        name
        for _, name in own_imports(LIB / "run.py")
        if name.split(".")[0] in {"probes", "checks", "measures", "changes"} and not name.startswith("probes.base.")
    ]
    assert not wrong


@pytest.mark.parametrize("package", HOMES)
def test_what_is_tamed_in_one_place_is_imported_there_alone(package: str) -> None:
    importers = {short(path) for path in modules() for _, name in imports(path) if name.split(".")[0] == package}
    assert not [path for path in importers if not path.startswith(HOMES[package])]


@pytest.mark.parametrize("module", ["proofbook", "proofbook.cli", "proofbook.inventory", "proofbook.hosts"])
def test_importing_is_cheap(module: str) -> None:
    heavy = ["pandas", "matplotlib", "papermill", "ipywidgets", "fabric", "asyncssh", "nbformat", "IPython"]
    program = f"import sys, {module}; print(*[m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_no_promises_in_the_code() -> None:
    promise = re.compile(r"\b(TODO|FIXME|XXX)\b")
    files = [*modules(), *LIB.rglob("*.sh"), *LIB.rglob("*.toml")]
    assert not [f"{short(f)}:{n}" for f in files for n, line in enumerate(f.read_text().splitlines(), 1) if promise.search(line)]


# ---------------------------------------------------------------------------------------------- packages


@cache
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def declared() -> dict[str, Requirement]:
    return {canonicalize_name(r.name): r for r in map(Requirement, pyproject()["project"]["dependencies"])}


def test_what_is_imported_is_declared_and_what_is_declared_is_used() -> None:
    distributions = packages_distributions()
    used: dict[str, str] = {}
    for path in modules():
        for _, name in imports(path):
            top = name.split(".")[0]
            if top != "proofbook" and top not in sys.stdlib_module_names:
                for distribution in distributions.get(top, [top]):
                    used[canonicalize_name(distribution)] = short(path)
    undeclared = {name: where for name, where in used.items() if name not in declared()}
    # WHY: IPython is the kernel's own shell; asking for it beside ipykernel could only disagree with it.
    undeclared.pop("ipython", None)
    assert not undeclared, "add them to pyproject.toml, with the reason"
    unused = set(declared()) - set(used) - set(NOT_IMPORTED)
    assert not unused, "nothing imports them: take them out, or say in NOT_IMPORTED why they are needed"


def test_every_dependency_says_why() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("dependencies = [") : text.index("[project.optional-dependencies]")]
    lines = [line for line in block.splitlines() if line.strip().startswith('"')]
    assert len(lines) == len(declared())
    assert not [line for line in lines if "# " not in line]


def test_conda_users_get_the_same() -> None:
    text = (ROOT / "environment.yml").read_text()
    environment = yaml.safe_load(text)
    specs = [MatchSpec(spec, strict=True) for spec in environment["dependencies"] if isinstance(spec, str)]
    conda = {canonicalize_name(str(s.name.normalized)): str(s.version) if s.version is not None else "" for s in specs}
    assert SpecifierSet(conda.pop("python")) == SpecifierSet(pyproject()["project"]["requires-python"])
    conda.pop("pip")
    conda["matplotlib"] = conda.pop("matplotlib-base")
    wanted = {n: r.specifier for n, r in declared().items()}
    # WHY: it comes with the editable install, which pip makes in either case; only some platforms have a wheel of it.
    wanted.pop("hyperscan")
    assert {n: SpecifierSet(v) for n, v in conda.items()} == wanted
    assert environment["dependencies"][-1] == {"pip": ["--editable ."]}


def locked() -> dict[str, list[tuple[str, str]]]:
    """Name → its entries in the lock: the pinned version and the lines that follow it."""
    entries: dict[str, list[tuple[str, str]]] = {}
    for entry in re.split(r"\n(?=[^\s#])", (ROOT / "requirements.lock").read_text()):
        found = re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", entry)
        if found:
            entries.setdefault(canonicalize_name(found[1]), []).append((found[2], entry))
    return entries


def test_the_lock_covers_what_is_declared_the_tests_and_the_build() -> None:
    extras = pyproject()["project"]["optional-dependencies"]
    wanted = [Requirement(r) for r in [*extras["test"], *extras["dev"], *pyproject()["build-system"]["requires"]]]
    pins = locked()
    for requirement in [*declared().values(), *wanted]:
        if requirement.name == "proofbook":
            continue
        versions = [version for version, _ in pins.get(canonicalize_name(requirement.name), [])]
        assert versions, f"{requirement.name} is not in requirements.lock: run `make lock`"
        assert all(requirement.specifier.contains(v) for v in versions), f"{requirement} and the lock disagree: run `make lock`"


def test_every_locked_package_has_its_hashes() -> None:
    assert len(locked()) > 100
    assert not [name for name, entries in locked().items() if any("--hash=sha256:" not in text for _, text in entries)]


@pytest.mark.parametrize("name", ["requirements.lock", "environment.yml", "pyproject.toml", "Makefile", ".ci/run"])
def test_no_file_names_where_packages_come_from(name: str) -> None:
    """Whoever installs has their own index or mirror; a file that names one works for nobody else."""
    text = (ROOT / name).read_text()
    where = r"\w+://[^\s\"']*|--(?:extra-)?index[-]url|--find[-]links|--trusted[-]host"
    assert not re.findall(where, text.replace("--no-index", ""))


def test_an_installed_proofbook_brings_its_runbooks_and_data(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
        metadata = archive.read(next(n for n in names if n.endswith(".dist-info/entry_points.txt"))).decode()
    data = [
        path
        for path in LIB.rglob("*")
        if path.is_file() and path.suffix in {".py", ".toml", ".sh", ".j2", ".html", ".css", ".typed"}
    ]
    assert not [path for path in data if f"proofbook/{short(path)}" not in names]
    assert {f"proofbook/_runbooks/{path.name}" for path in RUNBOOKS} <= names
    assert not [n for n in names if "__pycache__" in n or n.startswith("tests/")]
    assert "proofbook = proofbook.cli:main" in metadata
    program = "from proofbook.launch import runbook_file; print(runbook_file('reboot-verification'))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()) == tmp_path / "installed/proofbook/_runbooks/reboot-verification.ipynb"


# ---------------------------------------------------------------------------------------------- runbooks


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_there_are_runbooks() -> None:
    assert RUNBOOKS


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda p: p.name)
def test_a_runbook_is_an_exemplar_not_evidence(path: Path) -> None:
    code = cells(path, "code")
    assert not [c for c in code if c["outputs"] or c["execution_count"] is not None]


LOGIC = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.For,
    ast.While,
    ast.Try,
    ast.With,
    ast.If,
    ast.Lambda,
    ast.ListComp,
)


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda p: p.name)
def test_a_runbook_holds_no_logic(path: Path) -> None:
    for cell in cells(path, "code"):
        # ast.parse also refuses `!shell` and `%magic` lines.
        found = [type(node).__name__ for node in ast.walk(ast.parse(source(cell))) if isinstance(node, LOGIC)]
        assert not found, source(cell)


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda p: p.name)
def test_a_runbook_reads_as_one(path: Path) -> None:
    prose, code = [source(c) for c in cells(path, "markdown")], cells(path, "code")
    assert prose[0].startswith("# ")
    for what in ("Changes the host", "Undo", "Takes", "Needs"):
        assert what in prose[0], f"the opening says nothing about: {what}"
    assert [i for i, c in enumerate(code) if "parameters" in c["metadata"].get("tags", [])] == [0]
    assert sum("open_run(" in source(c) for c in code) == 1
    assert f'open_run("{path.stem}"' in source(code[1])
    assert source(code[-1]).strip().startswith("run.close(")
    assert len(prose) >= len(code) - 2, "each step has its question before it"
    for line in source(code[0]).splitlines():
        if line.strip() and not line.startswith("#"):
            assert re.match(r"\w+: [\w| \[\]]+ = .+#\s*\S", line), f"a parameter has a type, a default and a comment: {line}"


# ---------------------------------------------------------------------------------------------- README, make


def readme_commands() -> list[str]:
    blocks = re.findall(r"```(?:sh|console)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return [line.removeprefix("$ ").split("#")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_what_the_readme_says_to_type_exists() -> None:
    import typer

    from proofbook.cli import app

    group: Any = typer.main.get_command(app)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = readme_commands()
    assert "make demo" in commands
    assert "make test" in commands
    for words in [c.split() for c in commands]:
        if words[0] == "make":
            assert words[1] in targets, words
        if words[0] in {"proofbook", ".venv/bin/proofbook"}:
            assert words[1] in group.commands, words
            command = group.commands[words[1]]
            if hasattr(command, "commands"):
                assert words[2] in command.commands, words
                command = command.commands[words[2]]
            options = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in words if word.startswith("-")} <= options, words


def test_ci_is_a_script_that_bash_can_read() -> None:
    script = ROOT / ".ci" / "run"
    subprocess.run(["bash", "-n", script], check=True)
    assert script.stat().st_mode & 0o111
    lines = script.read_text().splitlines()
    # Both are run, and nothing stands after them that could hide how they ended.
    assert lines.index("make test") < lines.index('make test-vm VM="vm and not long"') == len(lines) - 1
