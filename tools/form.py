"""Counts of form: what makes code hard to read and can be counted, each with the most that `make lint` lets stand.

    python tools/form.py                 counts beside their limits; fails where one is over
    python tools/form.py NAME [NAME...]  and the places behind these counts

A count is a place to look at, not a verdict. A limit is what stands today or less: it goes down with the code, and up
only with a reason in the commit.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent / "autopar"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.Assert, ast.comprehension, ast.BoolOp)
RELATIVE = re.compile(r"(What|Of|Where|Who|Whom|Whose|Which|Until|When|How)\b(?!.*\?$)")
FRAGMENT = re.compile(
    r"#\s*(of|what|by|it|its|those|where|whose|which|and|or|as|in|to|for|with|from|at|on|that|but|besides?)\b"
)
IS_NO = re.compile(r"\b(is|are|was) no\b")
PRIVATE = re.compile(r"\btorch(?!\.ops\.)(?:\.\w+)*\._(?!_|pytree)\w+")  # ops and structures of arguments apart
MADE_IN = ("__init__", "__post_init__", "__new__", "__enter__")


@dataclass(frozen=True)
class Module:
    """One file: its path, its lines, and what they parse to."""

    path: Path
    lines: list[str]
    tree: ast.Module

    @staticmethod
    def of(path: Path) -> Module:
        text = path.read_text()
        return Module(path, text.splitlines(), ast.parse(text))

    def all(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    def comments(self) -> Iterator[tokenize.TokenInfo]:
        tokens = tokenize.generate_tokens(io.StringIO("\n".join(self.lines) + "\n").readline)
        return (token for token in tokens if token.type == tokenize.COMMENT)


Places = Iterator[tuple[int, str]]  # a line, and what stands there
COUNTS: dict[str, tuple[int, str, Callable[[Module], Places]]] = {}


def count(limit: int, what: str) -> Callable[[Callable[[Module], Places]], Callable[[Module], Places]]:
    """Register a count under its function's name, with the most places that may stand."""

    def register(places: Callable[[Module], Places]) -> Callable[[Module], Places]:
        COUNTS[places.__name__.replace("_", "-")] = limit, what, places
        return places

    return register


def own(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it."""
    pending = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.Lambda)):
            pending += ast.iter_child_nodes(node)


def length(node: ast.AST) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


@count(2, "functions of more than 60 lines")
def long_functions(module: Module) -> Places:
    return ((f.lineno, f.name) for f in module.all(*FUNCTIONS) if length(f) > 60)


@count(8, "functions of a cyclomatic complexity over 20")
def tangled_functions(module: Module) -> Places:
    for f in module.all(*FUNCTIONS):
        nodes = list(own(f))
        more = sum(len(node.values) - 2 for node in nodes if isinstance(node, ast.BoolOp))
        if 1 + sum(isinstance(node, BRANCHES) for node in nodes) + more > 20:
            yield f.lineno, f.name


@count(33, "functions of more than 8 parameters")
def many_parameters(module: Module) -> Places:
    for f in module.all(*FUNCTIONS):
        if len(f.args.args) + len(f.args.kwonlyargs) + len(f.args.posonlyargs) > 8:
            yield f.lineno, f.name


@count(1, "classes of more than 200 lines")
def long_classes(module: Module) -> Places:
    return ((c.lineno, c.name) for c in module.all(ast.ClassDef) if length(c) > 200)


def made(of: ast.ClassDef) -> dict[str, tuple[int, str]]:
    """Attributes that methods of a class assign to self: the line of each, and the method."""
    found: dict[str, tuple[int, str]] = {}
    for method in (node for node in of.body if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(method):
            is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_stored and isinstance(node.value, ast.Name) and node.value.id == "self":
                found.setdefault(node.attr, (node.lineno, method.name))
    return found


@count(4, "classes of more than 15 attributes")
def many_attributes(module: Module) -> Places:
    for c in module.all(ast.ClassDef):
        if len(made(c)) + sum(isinstance(node, ast.AnnAssign) for node in c.body) > 15:
            yield c.lineno, c.name


@count(3, "attributes made outside __init__")
def late_attributes(module: Module) -> Places:
    for c in module.all(ast.ClassDef):
        fields = {node.target.id for node in c.body if isinstance(node, ast.AnnAssign)}
        for name, (line, method) in made(c).items():
            if method not in MADE_IN and name not in fields:
                yield line, f"{c.name}.{name}"


@count(16, "comprehensions inside comprehensions")
def nested_comprehensions(module: Module) -> Places:
    for node in module.all(*COMPREHENSIONS):
        if any(isinstance(inner, COMPREHENSIONS) for inner in ast.walk(node) if inner is not node):
            yield node.lineno, ""


@count(243, "tuples of things assigned in one line")
def unlike_assignments(module: Module) -> Places:
    for node in module.all(ast.Assign):
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield node.lineno, ast.unparse(node)[:80]


@count(0, "comments that begin with a fragment")
def fragments(module: Module) -> Places:
    return ((c.start[0], c.string[:80]) for c in module.comments() if FRAGMENT.match(c.string))


@count(0, "docstrings that begin with a relative clause")
def relative_clauses(module: Module) -> Places:
    for f in module.all(*FUNCTIONS):
        if RELATIVE.match(ast.get_docstring(f) or ""):
            yield f.lineno, f.name


@count(0, "first lines of docstrings over 100 characters")
def long_summaries(module: Module) -> Places:
    for f in module.all(*FUNCTIONS):
        if len((ast.get_docstring(f) or "").partition("\n")[0]) > 100:
            yield f.lineno, f.name


@count(0, 'texts that say "is no" or "are no"')
def is_no(module: Module) -> Places:
    for node in module.all(ast.Constant):
        if isinstance(node.value, str) and "\n" not in node.value and IS_NO.search(node.value):
            yield node.lineno, node.value[:80]


@count(78, "numbers at module level")
def constants(module: Module) -> Places:
    for node in module.tree.body:
        if isinstance(node, ast.Assign):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            numbers = [v for v in values if isinstance(v, ast.Constant) and type(v.value) in (int, float)]
            if numbers:
                yield node.lineno, ast.unparse(node)[:80]


@count(1, "raw replace_all_uses_with")
def raw_replacements(module: Module) -> Places:
    return ((n.lineno, "") for n in module.all(ast.Attribute) if n.attr == "replace_all_uses_with")


@count(0, "private names of torch outside the files that are for them")
def private_names(module: Module) -> Places:
    if "private" in module.path.name or "patches" in module.path.name:
        return
    texts = [node for node in module.all(ast.Constant) if isinstance(node.value, str)]
    said = {line for text in texts for line in range(text.lineno, text.end_lineno + 1)}
    for number, line in enumerate(module.lines, 1):
        if number not in said and (found := PRIVATE.search(line.split("#")[0])):
            yield number, found.group()


@count(1, "type: ignore")
def ignored_types(module: Module) -> Places:
    return ((k, "") for k, line in enumerate(module.lines, 1) if "type: ignore" in line)


@count(8, "imports inside functions")
def late_imports(module: Module) -> Places:
    for f in module.all(*FUNCTIONS):
        for node in own(f):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield node.lineno, ast.unparse(node)[:80]


@count(0, "files of more than 500 lines")
def long_files(module: Module) -> Places:
    return iter([(1, f"{len(module.lines)} lines")] if len(module.lines) > 500 else [])


def lines_of_functions(modules: list[Module]) -> str:
    """A line about the size of the package and of its functions."""
    lengths = sorted(length(f) for module in modules for f in module.all(*FUNCTIONS))
    lines = sum(len(module.lines) for module in modules)
    median, most = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
    return f"{lines} lines, {len(lengths)} functions: median {median}, nine of ten up to {most}, longest {lengths[-1]}"


def main(shown: list[str]) -> int:
    modules = [Module.of(path) for path in sorted(ROOT.rglob("*.py"))]
    print(lines_of_functions(modules))
    counts = Counter[str]()
    for name, (limit, what, places) in COUNTS.items():
        found = [(module.path.relative_to(ROOT), *place) for module in modules for place in places(module)]
        counts[name] = len(found)
        is_over = len(found) > limit
        print(f"{len(found):5} of {limit:3}  {what} ({name}){'  OVER' if is_over else ''}")
        for path, line, said in found if name in shown else ():
            print(f"              {path}:{line} {said}")
    return int(any(counts[name] > limit for name, (limit, _, _) in COUNTS.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
